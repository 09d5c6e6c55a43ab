"""`trl-padfix stats`: options and printing; [`~trl_padfix.tools.stats_report`] does the work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from .console import LONGEST, JsonOption, console, figure_table, one_of, outputs, print_as_is, write_json, write_output
from .user_errors import user_errors_of


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..tools.stats_report import StatsReport

__all__ = ["stats"]


def stats(
    data: Annotated[
        str,
        Argument(help="Hub id, folder, .jsonl, .json.gz, .parquet, or the YAML of a recipe."),
    ],
    tokenizer: Annotated[str | None, Option(help="Id or path of the tokenizer.")] = None,
    train_tokenizer: Annotated[
        int | None, Option(min=300, max=10**6, help="Instead: train a BPE of so many entries on the data's own text.")
    ] = None,
    columns: Annotated[str | None, Option(help="Other names, of message keys too: 'talk=messages,who=role'.")] = None,
    split: Annotated[str, Option(help="Split of the dataset.")] = "train",
    expand_turns: Annotated[bool, Option("--expand-turns", help="A row for each turn of the assistant.")] = False,
    group_by_prefix: Annotated[bool, Option("--group-by-prefix", help="Batches of rows that begin alike.")] = False,
    max_length: Annotated[int | None, Option(min=0, max=LONGEST, help="Longest sequence; 0 for any. [1024]")] = None,
    truncation_mode: Annotated[str | None, Option(help="keep_start or keep_end. [keep_start]")] = None,
    world_size: Annotated[str, Option(help="Numbers of processes to simulate.")] = "2,4,8,16,32,64",
    batch_size: Annotated[int | None, Option(min=1, help="Simulated: rows of a forward. [8]")] = None,
    accumulation: Annotated[int | None, Option(min=1, help="Simulated: forwards of a step. [4]")] = None,
    max_tokens_per_batch: Annotated[
        int | None, Option(min=1, help="Simulated: the token budget. [what the largest fixed batch has]")
    ] = None,
    trainer: Annotated[str | None, Option(help="dpo, sft, kto, reward, grpo or rloo. [by the columns]")] = None,
    generations: Annotated[int, Option(min=2, help="With grpo: completions of a prompt.")] = 8,
    completion_length: Annotated[int, Option(min=1, help="With grpo: tokens of one, about; made up.")] = 256,
    seed: Annotated[int, Option(min=0, help="Seed of the random batches.")] = 0,
    verbose: Annotated[bool, Option("--verbose", help="Also print the tokens of batches of other sizes.")] = False,
    plot: Annotated[Path | None, Option(help="Draw lengths and a batch to this PNG.")] = None,
    json: JsonOption = None,
) -> None:
    """Count the tokens of a dataset, and say which settings pay: padding, prefixes, truncation, waiting."""
    options = dict(locals())
    from ..tools import formats, tiny
    from ..tools.data import load_recipe
    from ..tools.stats import check_size
    from ..tools.stats_report import StatsSettings, analyze, load_training_rows

    processes = [int(size) if size.strip().isdecimal() else 0 for size in world_size.split(",")]
    if min(processes) < 1:
        raise typer.BadParameter(f"{world_size!r} is no list of numbers of 1 or more.", param_hint="--world-size")
    outputs(plot=plot, json=json)
    with user_errors_of("DATA"):
        recipe = load_recipe(data) if data.endswith((".yaml", ".yml")) else {}
        settings = StatsSettings.of(recipe, options)
    one_of("--truncation-mode", settings.truncation_mode, ["keep_start", "keep_end"])
    if trainer is not None:
        one_of("--trainer", trainer, formats.TRAINER_COLUMNS)
    with user_errors_of("--world-size"):
        check_size(max(processes), settings.batch_size, settings.accumulation)
    if tokenizer is None and train_tokenizer is None:
        tokenizer = recipe.get("model_name_or_path")
        train_tokenizer = tiny.SHAPES.get(str(recipe.get("tiny_model")), {}).get("vocab_size")
    if (tokenizer is None) == (train_tokenizer is None):
        message = "Give one of `--tokenizer` and `--train-tokenizer`: a model's name, or a size to train, as 2048."
        raise typer.BadParameter(message, param_hint="--tokenizer")
    with user_errors_of("DATA"):
        rows, texts, settings = load_training_rows(data, split, columns, settings)
    loaded, name = _tokenizer(tokenizer, train_tokenizer, texts)
    with user_errors_of("DATA"):
        report = analyze(rows, loaded, settings, processes, progress=console.is_terminal)
    _print_report(report, Path(data).name, name, verbose)
    # `benchmarks/bench.py` reads files with the columns of a trainer.
    is_plain = not recipe and columns is None and split == "train"
    measured = report.bench_data(data) if is_plain else None
    print_as_is("\nVerdict:", *report.verdict.lines(measured))
    write_json(json, report.to_dict(data, name, measured))
    if plot is not None:
        write_output("--plot", plot, report.draw)


def _tokenizer(
    tokenizer: str | None, train_size: int | None, texts: Iterable[str]
) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer that is named or trained on the texts, and its name in the report."""
    from ..tools import tiny
    from ..tools.reading import load_tokenizer

    if train_size is None:
        with user_errors_of("--tokenizer"):
            return load_tokenizer(str(tokenizer)), str(tokenizer)
    with console.status("Training a tokenizer"), user_errors_of("DATA"):
        return tiny.train_tokenizer(texts, train_size), f"a BPE of {train_size}"


def _print_report(report: StatsReport, data: str, tokenizer: str, verbose: bool) -> None:
    """Print the tables: lengths, truncation, waiting; `verbose` also tokens of batches."""
    settings, unit = report.settings, report.unit
    console.print(f"{report.rows:,} {unit} of {data}, tokenized with {tokenizer} for {settings.trainer}")
    if settings.is_online:
        of_each = f"{settings.generations} of each prompt, of {settings.completion_length} tokens +-25%"
        console.print(f"Completions are made up: {of_each}.")
    table = ((column, *(f"{value:,.0f}" for value in figures.values())) for column, figures in report.lengths.items())
    console.print(figure_table(("tokens", "mean", "median", "95%", "max"), table))
    if settings.max_length:
        truncated, dropped = report.truncation["truncated"], report.truncation["dropped"]
        kind = f"max_length={settings.max_length} ({settings.truncation_mode})"
        console.print(f"{kind} truncates {truncated:,} {unit} ({truncated / report.rows:.1%}) and drops {dropped:,}.")
    if verbose:
        _print_batches(report)
    console.print(
        "\nShare of the time that processes compute and do not wait, by distinct tokens; steps of "
        f"{settings.accumulation} x {settings.batch_size} {unit} per process:"
    )
    table = ((str(wait.processes), f"{wait.fixed:.1%}", f"{wait.budget:.1%}") for wait in report.waiting)
    headings = ("processes", "fixed batches", f"max_tokens_per_batch={report.token_budget}")
    console.print(figure_table(headings, table))


def _print_batches(report: StatsReport) -> None:
    """Print the tokens of batches of several sizes, and their ratios."""
    kind = "batches of rows that begin alike" if report.settings.group_by_prefix else "random batches"
    console.print(f"\nTokens of {kind}, and the speed-ups that they allow ({report.unit} per batch):")
    table = (
        (
            str(b.batch_size),
            *(f"{tokens:,.0f}" for tokens in (b.padded, b.real, b.distinct)),
            *(f"{ratio:.2f}" for ratio in (b.padded / b.real, b.real / b.distinct, b.padded / b.distinct)),
        )
        for b in report.batches
    )
    headings = ("batch", "padded", "real", "distinct", "padded/real", "real/dist.", "padded/dist.")
    console.print(figure_table(headings, table))
