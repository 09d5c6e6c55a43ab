"""`trl-padfix parity`: options and printing; [`~trl_padfix.tools.parity`] does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from typer import Option

from .console import LONGEST, JsonOption, console, device_of, one_of, or_dash, outputs, write_json
from .user_errors import user_errors_of


if TYPE_CHECKING:
    from ..tools.parity import Comparison, ModelSource

__all__ = ["parity"]

DTYPES = ("float32", "bfloat16", "float16")
COLUMNS = ("attention", "mode", "tokens", "logps", "gradient", "packed", "")
UNLIMITED = 1000
"""Characters of a line: a long name widens the table, and is not cut."""


def parity(
    model: Annotated[str | None, Option(help="Model id or path.")] = None,
    data: Annotated[str | None, Option(help="Local file or folder, or Hub id, of TRL's formats.")] = None,
    config: Annotated[Path | None, Option(help="YAML of a training: its model, data and max_length.")] = None,
    attn: Annotated[list[str] | None, Option(help="Attention implementation; may be repeated.")] = None,
    dtype: Annotated[str, Option(help=f"{', '.join(DTYPES)}: what is compared with float32.")] = "float32",
    device: Annotated[str, Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    rows: Annotated[int, Option(min=1, help="Examples to compare on; a pair is two rows.")] = 4,
    max_length: Annotated[
        int | None, Option(min=2, max=LONGEST, help="Longest row, in tokens; 512 by default.")
    ] = None,
    gradients: Annotated[bool, Option(help="Compare gradients too.")] = True,
    json: JsonOption = None,
) -> None:
    """Compare packed with padded, and every backend with eager float32, on your model and data; 1 if they differ."""
    import torch
    import transformers
    from trl.data_utils import is_conversational

    from ..tools.data import give_template, load_recipe, load_rows, whole_number
    from ..tools.parity import ComparisonReport, compare, default_backends, tokenize_rows

    transformers.logging.disable_progress_bar()
    one_of("--dtype", dtype, DTYPES)
    outputs(json=json)
    device = device_of(device)
    with user_errors_of("--config"):
        recipe = load_recipe(str(config)) if config is not None else {}
        max_length = max_length or whole_number(recipe, "max_length", 512, at_least=2) or 512
    source = _model_source(model, recipe)
    if data is None and config is None:
        raise typer.BadParameter("give the data, here or in the YAML of `--config`.", param_hint="--data")
    data_option = "--data" if data else "--config"
    with user_errors_of(data_option):
        dataset = load_rows(data or str(config))
    with user_errors_of("--model" if source.tiny_shape is None else data_option):
        tokenizer = source.tokenizer(dataset)
    plain_template = give_template(tokenizer) and is_conversational(dataset[0])
    with user_errors_of(data_option):
        batch = tokenize_rows(dataset, tokenizer, rows, max_length)
    batch = {name: value.to(device) for name, value in batch.items()}

    backends = attn or default_backends(dtype, device)
    load = source.loader(tokenizer, device)
    with console.status("comparing"), user_errors_of("--model"):
        comparisons = list(compare(load, batch, backends, getattr(torch, dtype), gradients))
    report = ComparisonReport(
        model=source.name,
        device=device,
        dtype=dtype,
        lengths=batch["attention_mask"].sum(1).tolist(),
        padded_tokens=batch["attention_mask"].numel(),
        comparisons=comparisons,
    )
    Console(width=UNLIMITED).print(_table(comparisons))
    typer.echo(report.summary(plain_template))
    write_json(json, report.to_dict())
    for line in report.failures:
        typer.echo(line, err=True)
    if report.failures:
        raise typer.Exit(1)


def _model_source(model: str | None, recipe: dict[str, Any]) -> ModelSource:
    """The model of `--model`, or the one that the recipe names or builds."""
    from ..tools.parity import ModelSource
    from ..tools.tiny import SHAPES

    model = model or recipe.get("model_name_or_path")
    tiny_shape = recipe.get("tiny_model") if model is None else None
    if tiny_shape is not None:
        one_of("--config (tiny_model)", tiny_shape, SHAPES)
        model = f"tiny_model {tiny_shape}"
    if not isinstance(model, str):
        raise typer.BadParameter(
            "give a model, here or as `model_name_or_path` (or `tiny_model`) of `--config`.", param_hint="--model"
        )
    return ModelSource(model, tiny_shape)


def _table(comparisons: list[Comparison]) -> Table:
    """A row for each comparison, in Markdown, so that an issue shows the table as a table."""
    table = Table(*(Column(name, no_wrap=True) for name in COLUMNS), box=box.MARKDOWN)
    for c in comparisons:
        differences = (c.logps, c.gradient, c.parity and c.parity.maximum)
        figures = [or_dash(c.tokens), *(or_dash(value, ".1e") for value in differences)]
        table.add_row(c.attention, c.mode, *figures, "ok" if c.ok else "FAILED")
    return table
