"""`trl-padfix stats`: options and printing; [`~trl_padfix.tools.stats`] counts."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from ..files import refuse_missing
from ..versions import require


__all__ = ["stats"]


def stats(
    data: Annotated[str, Argument(help="Hub id, folder, .jsonl, .json.gz, .csv or .parquet; DPO, KTO, SFT columns.")],
    tokenizer: Annotated[str | None, Option(help="Tokenizer's id or path. Give this or --train-tokenizer.")] = None,
    train_tokenizer: Annotated[
        int | None,
        Option(min=300, max=10**6, help="Train a BPE tokenizer of this size on the data instead."),
    ] = None,
    expand_turns: Annotated[bool, Option("--expand-turns", help="Make one row for each assistant turn.")] = False,
    max_length: Annotated[int, Option(min=0, max=10**9, help="Truncate to this length; 0: no limit.")] = 1024,
    batch_size: Annotated[int, Option(min=1, help="Examples per batch.")] = 8,
) -> None:
    """Count the tokens of a dataset: padding, shared prefixes, truncation. Recommend settings."""
    refuse_missing(data, "DATA")
    if (tokenizer is None) == (train_tokenizer is None):
        message = "Give one of `--tokenizer` and `--train-tokenizer`: a model's name, or a size to train, as 2048."
        raise typer.BadParameter(message, param_hint="--tokenizer")
    if tokenizer is not None:
        refuse_missing(tokenizer, "--tokenizer", True, ("tokenizer.json", "tokenizer_config.json", "config.json"))
    require("trl", "tools.stats")

    import numpy as np

    from ..tools import tiny
    from ..tools.data import load_rows, trainer_of
    from ..tools.stats import UNITS, advise, measure
    from ..trainers.data.columns import needed_columns, require_columns
    from ..trainers.data.turns import expand_turns as expanded

    rows = load_rows(data)
    dataset = expanded(rows) if expand_turns else rows
    trainer = trainer_of(dataset.column_names)
    require_columns(dataset, data, *needed_columns(trainer))
    if tokenizer is not None:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    else:
        loaded = tiny.train_tokenizer(tiny.texts_of(rows), train_tokenizer)
    lengths = measure(dataset, loaded)
    kept, unit = lengths.truncated(max_length or None), UNITS[trainer]
    if not len(kept) or not kept.sequences.any():
        raise ValueError(f"no row is left: each row is empty, or its prompt alone fills max_length={max_length}.")
    truncated = int((kept.sequences > kept.kept_tokens).any(1).sum())
    typer.echo(f"{len(lengths):,} {unit} of {data} for {trainer}")
    typer.echo(f"{'tokens':12}{'mean':>9}{'median':>9}{'95%':>9}{'max':>9}")
    sequences = {"sequence": lengths.sequences} if "prompt" in lengths.columns else {}
    for column, tokens in (lengths.columns | sequences).items():
        figures = (tokens.mean(), *np.percentile(tokens, [50, 95, 100]))
        typer.echo(f"{column:12}" + "".join(f"{figure:9,.0f}" for figure in figures))
    if max_length:
        typer.echo(f"max_length={max_length} truncates {truncated:,} {unit} and drops {len(lengths) - len(kept):,}.")
    typer.echo("\n".join(["", "Verdict:", *advise(kept, trainer=trainer, batch_size=batch_size).lines()]))
