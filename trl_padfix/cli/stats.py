"""`trl-padfix stats`."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from .console import LONGEST, JsonOption, console, figure_table, one_of, outputs, print_as_is, write_json, write_output
from .user_errors import user_errors_of


if TYPE_CHECKING:
    from ..tools.verdict import Verdict

__all__ = ["stats"]


def stats(
    data: Annotated[
        str,
        Argument(
            help="Hub id, folder, .jsonl, .json.gz, .parquet, or the YAML of a recipe; or for a verdict alone what "
            "`bench` makes up: 'equal', 'lengths:PROMPT/COMPLETION' or 'tree:ROLLOUTSxTURNS/SYSTEM/TURN'."
        ),
    ],
    tokenizer: Annotated[str | None, Option(help="Id or path of the tokenizer.")] = None,
    train_tokenizer: Annotated[
        int | None, Option(min=300, max=10**6, help="Instead: train a BPE of so many entries on the data's own text.")
    ] = None,
    columns: Annotated[
        str | None,
        Option(help="Other names of columns, or of keys of messages: 'talk=messages,who=role,said=content'."),
    ] = None,
    split: Annotated[str, Option(help="Split of the dataset.")] = "train",
    expand_turns: Annotated[
        bool, Option("--expand-turns", help="A row for each turn of the assistant in `messages`.")
    ] = False,
    group_by_prefix: Annotated[
        bool, Option("--group-by-prefix", help="Batches of rows that begin alike, as training draws them.")
    ] = False,
    max_length: Annotated[int | None, Option(min=0, max=LONGEST, help="Longest sequence; 0 for any. [1024]")] = None,
    truncation_mode: Annotated[str | None, Option(help="keep_start or keep_end. [keep_start]")] = None,
    world_size: Annotated[str, Option(help="Numbers of processes to simulate.")] = "2,4,8,16,32,64",
    batch_size: Annotated[int | None, Option(min=1, help="Simulated: rows of a forward. [8]")] = None,
    accumulation: Annotated[int | None, Option(min=1, help="Simulated: forwards of a step. [4]")] = None,
    max_tokens_per_batch: Annotated[
        int | None,
        Option(min=1, help="Simulated: the token budget. By default what the largest fixed batch has."),
    ] = None,
    trainer: Annotated[
        str | None, Option(help="dpo, sft, kto, reward, grpo or rloo. [the one that takes the columns]")
    ] = None,
    generations: Annotated[int, Option(min=2, help="With grpo: completions of a prompt.")] = 8,
    completion_length: Annotated[int, Option(min=1, help="With grpo: tokens of one, about; made up.")] = 256,
    shape: Annotated[str, Option(help="Model shape of `bench` whose speed the verdict estimates.")] = "small",
    seed: Annotated[int, Option(min=0, help="Seed of the random batches.")] = 0,
    plot: Annotated[Path | None, Option(help="Draw lengths and a batch to this PNG.")] = None,
    json: JsonOption = None,
) -> None:
    """Count the tokens of a dataset, and say which settings pay: padding, prefixes, truncation, waiting."""
    from dataclasses import asdict

    if data == "equal" or data.startswith(("tree:", "lengths:")):
        outputs(json=json)
        return _synthetic_rows(data, trainer or "dpo", batch_size, max_tokens_per_batch, shape, seed, json)
    from ..tools import formats, tiny
    from ..tools import stats as s
    from ..tools import verdict as v
    from ..tools.data import load_recipe, load_rows, rename_columns, whole_number
    from ..tools.reading import load_tokenizer
    from ..tools.stats_picture import plot as draw_picture
    from ..trainers.data.turns import expand_turns as expand

    sizes = [int(size) if size.strip().isdecimal() else 0 for size in world_size.split(",")]
    if min(sizes) < 1:
        raise typer.BadParameter(f"{world_size!r} is no list of numbers of 1 or more.", param_hint="--world-size")
    outputs(plot=plot, json=json)
    with user_errors_of("DATA"):
        recipe = load_recipe(data) if data.endswith((".yaml", ".yml")) else {}
        max_length = whole_number(recipe, "max_length", 1024, at_least=0) if max_length is None else max_length
        batch_size = batch_size or whole_number(recipe, "per_device_train_batch_size", 8)
        accumulation = accumulation or whole_number(recipe, "gradient_accumulation_steps", 4)
        max_tokens_per_batch = max_tokens_per_batch or whole_number(recipe, "max_tokens_per_batch", None)
    truncation_mode = truncation_mode or recipe.get("truncation_mode", "keep_start")
    one_of("--truncation-mode", truncation_mode, ["keep_start", "keep_end"])
    one_of("--shape", shape, tiny.BENCH_SHAPES)
    if trainer is not None:
        one_of("--trainer", trainer, formats.TAKES)
    with user_errors_of("--world-size"):
        s.check_size(max(sizes), batch_size, accumulation)
    if tokenizer is None and train_tokenizer is None:
        tokenizer = recipe.get("model_name_or_path")
        train_tokenizer = tiny.SHAPES.get(str(recipe.get("tiny_model")), {}).get("vocab_size")
    if (tokenizer is None) == (train_tokenizer is None):
        message = "Give one of `--tokenizer` and `--train-tokenizer`: a model's name, or a size to train, as 2048."
        raise typer.BadParameter(message, param_hint="--tokenizer")
    with user_errors_of("DATA"):
        rows = formats.as_trl_takes_them(rename_columns(load_rows(data, split), columns))
        expand_turns = expand_turns or bool(recipe.get("expand_turns"))
        trainer = trainer or ("sft" if expand_turns else formats.trainer_of(rows))
        is_online = trainer in ("grpo", "rloo")
        group_by_prefix = group_by_prefix or bool(recipe.get("group_by_prefix"))
        if expand_turns and trainer != "sft":
            raise ValueError(f"`expand_turns` makes rows for sft, and the trainer is {trainer}.")
        if group_by_prefix and is_online:
            raise ValueError(f"`group_by_prefix` is for rows that are there, and {trainer} generates its completions.")
        texts = s.texts_of(rows)  # of rollouts, each once
        rows = formats.of_trainer(expand(rows) if expand_turns else rows, trainer)
    max_length = None if is_online else max_length or None

    if train_tokenizer is not None:
        with console.status("Training a tokenizer"), user_errors_of("DATA"):
            loaded, name = tiny.train_tokenizer(texts, train_tokenizer), f"a BPE of {train_tokenizer}"
    else:
        with user_errors_of("--tokenizer"):
            loaded, name = load_tokenizer(str(tokenizer)), tokenizer
    with user_errors_of("DATA"):
        lengths = s.measure(rows, loaded, trainer=trainer, progress=console.is_terminal)
        if is_online:
            lengths = s.with_completions(lengths, generations, completion_length, seed)
        s.check_kept(lengths, max_length, truncation_mode)
    how = {"max_length": max_length, "truncation_mode": truncation_mode}
    kept = lengths.kept(**how)
    costs = kept.costs(**how)
    budget = max_tokens_per_batch or s.memory_of(costs, batch_size, seed)
    drawn = {"seed": seed, "grouped": group_by_prefix}
    simulated = {"batch_size": batch_size, "accumulation": accumulation}
    batches = s.batch_tokens(kept, [1, 2, 4, 8, 16, 32, 64], **drawn, **how)
    waits = [s.waiting(costs, size, budget=budget, **simulated, **drawn) for size in sizes]
    cut, parts = s.truncated(lengths, **how), s.summary(lengths)
    unit = v.UNITS[trainer]

    console.print(f"{len(lengths):,} {unit} of {Path(data).name}, tokenized with {name} for {trainer}")
    if is_online:
        console.print(f"Completions are made up: {generations} of each prompt, of {completion_length} tokens +-25%.")
    table = ((part, *(f"{value:,.0f}" for value in figures.values())) for part, figures in parts.items())
    console.print(figure_table(("tokens", "mean", "median", "95%", "max"), table))
    if max_length:
        share = cut["truncated"] / len(lengths)
        kind = f"max_length={max_length} ({truncation_mode})"
        console.print(f"{kind} truncates {cut['truncated']:,} {unit} ({share:.1%}) and drops {cut['dropped']:,}.")
    kind = "batches of rows that begin alike" if group_by_prefix else "random batches"
    console.print(f"\nTokens of {kind}, and the speed-ups that they allow ({unit} per batch):")
    table = (
        (
            str(b.batch_size),
            *(f"{n:,.0f}" for n in (b.padded, b.real, b.distinct)),
            *(f"{ratio:.2f}" for ratio in (b.padded / b.real, b.real / b.distinct, b.padded / b.distinct)),
        )
        for b in batches
    )
    headings = ("batch", "padded", "real", "distinct", "padded/real", "real/dist.", "padded/dist.")
    console.print(figure_table(headings, table))
    console.print(
        "\nShare of the time that processes compute and do not wait, by distinct tokens; steps of "
        f"{accumulation} x {batch_size} {unit} per process:"
    )
    table = ((str(wait.processes), f"{wait.fixed:.1%}", f"{wait.budget:.1%}") for wait in waits)
    console.print(figure_table(("processes", "fixed batches", f"max_tokens_per_batch={budget}"), table))
    seen = v.sample(rows, loaded, max_length, trainer, lengths.parts["completion"] if is_online else None)
    verdict = None
    longest = max_length or max(1024, int(lengths.sequences.max()))
    measured = _for_bench(
        data, expand_turns, shape=shape, columns=columns, split=split, tokenizer=tokenizer,
        max_length=None if is_online else max(2, longest), completion_length=completion_length if is_online else None,
    )  # fmt: skip
    if seen:
        hidden_size = tiny.BENCH_SHAPES[shape]["hidden_size"]
        verdict = v.advise(
            seen, batch_size=batch_size, budget=budget, seed=seed, hidden_size=hidden_size, trainer=trainer
        )
        console.print(f"\nVerdict, by the first {verdict.rows:,} {unit}:")
        _print(verdict, measured)
    write_json(
        json,
        {
            "data": data, "trainer": trainer, "tokenizer": name, **how, **drawn, "lengths": parts, "truncation": cut,
            "batches": [asdict(b) for b in batches], "simulation": {**simulated, "max_tokens_per_batch": budget},
            "waiting": [asdict(wait) for wait in waits], "verdict": verdict and verdict.to_dict(measured),
        },
    )  # fmt: skip
    if plot is not None:
        tree = v.prefix_tree(seen) if seen else None
        draw = partial(draw_picture, kept, batch_size=batch_size, max_length=max_length, seed=seed, tree=tree)
        write_output("--plot", plot, draw)


def _synthetic_rows(
    data: str, trainer: str, batch_size: int | None, budget: int | None, shape: str, seed: int, json: Path | None
) -> None:
    """The verdict on data that `bench` makes up."""
    from dataclasses import replace

    from ..tools import bench as b
    from ..tools import verdict as v
    from ..tools.stats import sequences_of
    from ..tools.tiny import BENCH_SHAPES

    one_of("--trainer", trainer, v.FITTED)
    one_of("--shape", shape, BENCH_SHAPES)
    with user_errors_of("DATA"):
        tree = b.parse_tree(data)
        batch_size = batch_size or (8 if tree is None else tree.rows)
        count = 400 if tree is None else 12 * max(batch_size, tree.rows)
        rows = v.tokenized(b.synthetic_rows(data, trainer, count, seed=seed))
    hidden_size = BENCH_SHAPES[shape]["hidden_size"]
    found = v.advise(rows, batch_size=batch_size, budget=budget or 0, seed=seed, hidden_size=hidden_size)
    found = replace(found, budget=budget or round(found.tokens))
    longest = max(len(sequence) for row in rows for sequence in sequences_of(row))
    measured = _for_bench(data, shape=shape, max_length=max(1024, longest) if tree is None else None)
    _print(found, measured)
    write_json(json, {"data": data, "verdict": found.to_dict(measured)})


def _print(verdict: Verdict, measured: str) -> None:
    """What the speed is made of, and the verdict."""
    from ..tools.verdict import FITTED, verdict_lines

    if verdict.trainer in FITTED:
        heading = f"a batch, in tokens of a decoder of hidden size {verdict.hidden_size}"
        console.print(figure_table((heading, "TRL, padded", "as advised"), verdict.table()))
    print_as_is(*verdict_lines(verdict, measured))


def _for_bench(data: str, expand_turns: bool = False, **given: Any) -> str:
    """What `bench` is to be given to measure the same: the data, and flags for all that is not its default."""
    by_default = {"shape": "small", "split": "train", "max_length": 1024}
    given = {name: value for name, value in given.items() if value not in (None, by_default.get(name))}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join([data, *flags]) + " --expand-turns" * expand_turns
