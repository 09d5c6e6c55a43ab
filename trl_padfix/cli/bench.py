"""`trl-padfix bench`: options, tables and files of a benchmark. [`trl_padfix.tools.bench`] measures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from typer import Option

from .console import (
    LONGEST,
    JsonOption,
    console,
    device_of,
    figure_table,
    one_of,
    or_dash,
    outputs,
    print_as_is,
    write_json,
    write_output,
)
from .progress import progress
from .recipe import folder
from .user_errors import user_errors_of


if TYPE_CHECKING:
    from ..tools.bench.settings import BenchSettings, Measurement, VariantResult
    from ..tools.bench.steps import BenchStep

__all__ = ["bench"]

DEFAULT_DATA = "Anthropic/hh-rlhf"

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

QUICK: dict[str, Any] = {"shape": "tiny", "steps": 3, "warmup": 1, "memory": False}
"""Values of the options that `--quick` changes, unless they are given."""


def bench(
    data: Annotated[
        str | None,
        Option(
            help="Local file, folder, Hub id, or YAML of a recipe: pairs (sft: also texts or conversations; grpo: "
            "prompts); or 'equal', 'lengths:PROMPT/COMPLETION', or 'tree:ROLLOUTSxTURNS/SYSTEM/TURN': a row or pair "
            "for each turn. [default: test split of Anthropic/hh-rlhf; grpo: random prompts]"
        ),
    ] = None,
    split: Annotated[str, Option(help="Split of a folder or Hub id.")] = "train",
    columns: Annotated[str | None, Option(help="Columns of other names: 'question=prompt,answer=completion'.")] = None,
    trainer: Annotated[str, Option(help="dpo; sft, on what was chosen; or grpo, on random completions.")] = "dpo",
    quick: Annotated[bool, Option("--quick", help="About 30 seconds: shape tiny, 3 steps, no memory.")] = False,
    variants: Annotated[
        str,
        Option(
            help="Of trl, trl_grouped, padded, padding_free, prefix_sharing, auto, group_by_prefix, token_budget, "
            "padding_free_compiled, prefix_sharing_compiled, with sft trl_padding_free, trl_packing. trl comes first, "
            "and may be left out."
        ),
    ] = "trl,padding_free,prefix_sharing",
    pairs: Annotated[int, Option(min=1, help="Pairs per batch; with sft, rows; with grpo, prompts.")] = 8,
    generations: Annotated[int, Option(min=2, help="With grpo: completions of a prompt.")] = 8,
    prompt_length: Annotated[int, Option(min=1, help="With grpo: tokens of a random prompt, about.")] = 512,
    completion_length: Annotated[int, Option(min=1, help="With grpo: tokens of a completion, about.")] = 64,
    logprob_passes: Annotated[
        bool, Option("--logprob-passes", help="With grpo: also the passes for old and reference log-probabilities.")
    ] = False,
    spread: Annotated[float, Option(min=0, max=1, help="Of 'lengths:': up to this share from their mean.")] = 0.25,
    steps: Annotated[int | None, Option(min=1, help="Counted steps. [default: 10; quick: 3]")] = None,
    warmup: Annotated[int | None, Option(min=0, help="Steps before them. [default: 2; quick: 1]")] = None,
    group_by_prefix: Annotated[
        bool, Option("--group-by-prefix", help="Also batches of rows that begin alike, as training draws them.")
    ] = False,
    expand_turns: Annotated[
        bool, Option("--expand-turns", help="With sft: a row for each turn of the assistant in `messages`.")
    ] = False,
    shape: Annotated[
        str | None, Option(help="tiny, small, 0.5b, 7b, or hybrid: small, of Qwen3.5. [default: small; quick: tiny]")
    ] = None,
    tokenizer: Annotated[str | None, Option(help="Id or path. [default: a BPE trained on the data]")] = None,
    device: Annotated[str, Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, Option(help="float32, bfloat16, or autocast (TRL's default).")] = "float32",
    attn: Annotated[str, Option(help="Attention implementation.")] = "sdpa",
    max_length: Annotated[
        int | None,
        Option(min=2, max=LONGEST, help="Tokens of the longest row. [default: 1024; of a tree, its own]"),
    ] = None,
    max_tokens_per_batch: Annotated[
        int | None, Option(min=1, help="Of token_budget. [default: half of the distinct tokens of a step]")
    ] = None,
    lora: Annotated[int, Option(min=0, help="Rank of LoRA adapters on all linear layers; 0 for none.")] = 0,
    gradient_checkpointing: Annotated[bool, Option(help="Recompute activations in backward.")] = False,
    optimizer: Annotated[bool, Option(help="Count AdamW's step in.")] = True,
    memory: Annotated[
        bool | None, Option(help="Measure peak memory; on CPU in one more step each. [default: yes; quick: no]")
    ] = None,
    peak_tflops: Annotated[float | None, Option(help="Peak, for MFU. [default: that of a matrix product]")] = None,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of weights and batches.")] = 0,
    compile: Annotated[bool, Option("--compile", help="Also the packed variants with compiled layers.")] = False,
    compile_backend: Annotated[str, Option(help="Backend of torch.compile.")] = "inductor",
    liger: Annotated[bool, Option("--liger", help="Put Liger's layers into the model: CUDA only.")] = False,
    json: JsonOption = None,
    plot: Annotated[Path | None, Option(help="Draw them to this PNG file.")] = None,
    profile: Annotated[bool, Option(help="Also print where the time of a step goes.")] = False,
) -> None:
    """Time a step of TRL's and the same without padding, side by side; losses and gradients must agree."""
    options = dict(locals())
    # transformers' warnings about deprecated fields that TRL sets; no user can change them.
    warnings.simplefilter("ignore", FutureWarning)
    from ..tools.bench.measure import describe, measure
    from ..tools.bench.measure import profile as profiled

    settings, data, split = _settings(options)
    outputs(json=json, plot=plot)
    _check_settings(settings)
    step, data_name = _prepare(data, settings, spread, split, columns, quick)
    with progress() as watch:
        measured = measure(step, watch=watch)
    results, is_partial = measured.results, measured.interrupt is not None
    about = describe(settings, data_name) | {
        "chat_template": step.rendered,
        "rough": quick,
        "left_out": measured.left_out,
        "partial": is_partial,
        "impossible": measured.impossible,
    }
    title = settings.title(about["device"])
    console.print(_table(results, title))
    print_as_is(*_notes(measured, step, quick))
    if profile and not (is_partial or measured.impossible):
        for variant, operations in profiled(step).items():
            print_as_is(f"\n{variant}", operations)
    write_json(json, {**about, "variants": [asdict(result) for result in results]})
    if plot is not None:
        from ..tools.report import plot_bench

        subtitle = f"{data_name}, {about['threads']} threads"
        write_output("--plot", plot, partial(plot_bench, results, f"{title}\n{subtitle}"))
    if measured.impossible is not None:
        typer.echo(measured.impossible, err=True)
        raise typer.Exit(1)
    if is_partial:
        raise typer.Exit(INTERRUPTED)


def _settings(options: dict[str, Any]) -> tuple[BenchSettings, str | None, str]:
    """Settings, data and split of the options; a value that cannot be measured is an error about its option."""
    from ..core.attention.attention import implementation_obstacle
    from ..tools.bench.data import parse_tree
    from ..tools.bench.settings import TOLERANCE, TRAINERS, BenchSettings, select_variants
    from ..tools.tiny import BENCH_SHAPES

    data, split, trainer = options["data"], options["split"], options["trainer"]
    device = device_of(options["device"])
    fields = BenchSettings.__dataclass_fields__
    values = {name: value for name, value in options.items() if name in fields and value is not None}
    values = (QUICK if options["quick"] else {}) | values
    one_of("--shape", values.get("shape", "small"), BENCH_SHAPES)
    one_of("--trainer", trainer, TRAINERS)
    one_of("--dtype", options["dtype"], ["autocast", *(str(dtype).removeprefix("torch.") for dtype in TOLERANCE)])
    if data is None and trainer != "grpo":
        data, split = DEFAULT_DATA, "test"
    if reason := implementation_obstacle(options["attn"]):
        raise typer.BadParameter(reason, param_hint="--attn")
    with user_errors_of("--data"):
        tree = parse_tree(data or "")
    if options["expand_turns"] and (trainer != "sft" or tree is not None):
        raise typer.BadParameter("is for `--trainer sft` on conversations.", param_hint="--expand-turns")
    groups = options["group_by_prefix"]
    if tree is not None:
        # Rows of a tree stay in the order of its turns, unless batches are formed by prefix.
        values = {"max_length": max(tree.longest, 1024), "shuffle": groups} | values
    variants = select_variants(options["variants"], compiled=options["compile"], group_by_prefix=groups)
    try:
        return BenchSettings(**values | {"device": device, "variants": variants}), data, split
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--variants") from error


def _check_settings(settings: BenchSettings) -> None:
    """Refuse settings that this machine cannot measure."""
    from ..tools.reading import load_tokenizer

    peak = settings.peak_tflops
    if peak is not None and not peak > 0:  # not `<=`: NaN must be refused
        raise typer.BadParameter(f"{peak} is no speed: give more than 0.", param_hint="--peak-tflops")
    if settings.lora and find_spec("peft") is None:
        raise typer.BadParameter("adapters need peft: `pip install 'trl-padfix[peft]'`.", param_hint="--lora")
    if settings.liger and settings.device == "cpu":
        raise typer.BadParameter("Liger's layers are Triton kernels, which run on GPUs only.", param_hint="--liger")
    if settings.liger and find_spec("liger_kernel") is None:
        raise typer.BadParameter("Liger is not installed: `pip install liger-kernel`.", param_hint="--liger")
    if settings.tokenizer is not None:
        with user_errors_of("--tokenizer"):
            load_tokenizer(settings.tokenizer)


def _prepare(
    data: str | None, settings: BenchSettings, spread: float, split: str, columns: str | None, quick: bool
) -> tuple[BenchStep, str]:
    """The step to measure, and the name of its data."""
    from ..tools.bench.building import prepare
    from ..tools.bench.data import select_rows
    from ..tools.reading import UnreadableError

    with user_errors_of("--data"):
        try:
            rows, name = select_rows(data, settings, spread=spread, split=split, columns=columns)
        except UnreadableError:
            if not (quick and data == DEFAULT_DATA):
                raise
            data = str(folder() / "data" / "preferences")
            typer.echo(f"{DEFAULT_DATA} cannot be read here; these are the preferences that ship ({data}).", err=True)
            rows, name = select_rows(data, settings, spread=spread)
        try:
            return prepare(rows, settings), name
        except ImportError as error:  # of an attention's package: transformers imports it with the model
            raise typer.BadParameter(str(error), param_hint="--attn") from error


def _notes(measured: Measurement, step: BenchStep, is_rough: bool) -> Iterator[str]:
    """Lines below the table: what holds for all figures, and their restrictions."""
    results, settings = measured.results, step.settings
    yield f"loss {results[0].loss:.6f}, gradient norm {results[0].grad_norm:.6f}: equal in all variants"
    for name, reason in measured.left_out.items():
        yield f"{name} was left out: {reason}."
    if step.rendered is not None:
        yield f"Conversations were rendered with {step.rendered}."
    if is_rough:
        yield f"Rough: {settings.steps} steps of shape '{settings.shape}'. Leave --quick out for figures to rely on."
    if measured.interrupt is not None:
        missing = sorted(set(settings.variants) - {result.name for result in results} - measured.left_out.keys())
        yield (
            f"PARTIAL: stopped after {results[0].steps} of {settings.steps} counted steps"
            + (f"; without {', '.join(missing)}, whose batches hold other rows" if missing else "")
            + "."
        )


def _table(results: list[VariantResult], title: str) -> Table:
    columns = ("variant", "s", "min-max", "x TRL", "limit", "share", "tok/s", "MFU", "GiB", "kept")
    rows = (
        (
            r.name,
            f"{r.seconds:.2f}",
            f"{r.low:.2f}-{r.high:.2f}",
            or_dash(r.speedup, ".2f"),
            f"{r.token_limit:.2f}",
            or_dash(r.speedup and r.speedup / r.token_limit, ".2f"),
            f"{r.tokens_per_second:.0f}",
            f"{r.mfu:.0%}",
            or_dash(r.peak_gib, ".2f"),
            or_dash(r.kept_mib, ".1f"),
        )
        for r in results
    )
    caption = (
        "s: median step; limit: TRL's padded tokens over those computed; share: of that limit; MFU: the arithmetic "
        "that distinct tokens need at the least, over time and peak; GiB: peak memory; kept: MiB that the graph of a "
        "step keeps for its backward"
    )
    return figure_table(columns, rows, box=SIMPLE, padding=0, title=title, caption=caption)
