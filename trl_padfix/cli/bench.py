"""`trl-padfix bench`."""

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
    outputs,
    print_as_is,
    write_json,
    write_output,
)
from .progress import progress
from .user_errors import user_errors_of


if TYPE_CHECKING:
    from ..tools.bench import BenchSettings, VariantResult

__all__ = ["bench"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

QUICK: dict[str, Any] = {"shape": "tiny", "steps": 3, "warmup": 1, "memory": False}
"""What `--quick` sets, where the option itself is not given."""


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
    trainer: Annotated[
        str, Option(help="dpo; sft, on what was chosen; or grpo: its step on random completions.")
    ] = "dpo",
    quick: Annotated[
        bool, Option("--quick", help="In about 30 seconds, roughly: shape tiny, 3 steps, no memory.")
    ] = False,
    variants: Annotated[
        str,
        Option(
            help="Of trl, trl_grouped, padded, padding_free, prefix_sharing, auto, group_by_prefix, token_budget, "
            "padding_free_compiled, prefix_sharing_compiled, with sft trl_padding_free, trl_packing; trl first."
        ),
    ] = "trl,padding_free,prefix_sharing",
    pairs: Annotated[int, Option(min=1, help="Pairs per batch; with sft, rows; with grpo, prompts.")] = 8,
    generations: Annotated[int, Option(min=2, help="With grpo: completions of a prompt.")] = 8,
    prompt_length: Annotated[int, Option(min=1, help="With grpo: tokens of a random prompt, about.")] = 512,
    completion_length: Annotated[int, Option(min=1, help="With grpo: tokens of a completion, about.")] = 64,
    logprob_passes: Annotated[
        bool,
        Option(
            "--logprob-passes", help="With grpo: count in the passes for the old and the reference log-probabilities."
        ),
    ] = False,
    spread: Annotated[
        float,
        Option(min=0, max=1, help="Of 'lengths:': how far lengths part from their mean, as a share of it."),
    ] = 0.25,
    steps: Annotated[int | None, Option(min=1, help="Counted steps. [default: 10; quick: 3]")] = None,
    warmup: Annotated[int | None, Option(min=0, help="Steps before them. [default: 2; quick: 1]")] = None,
    group_by_prefix: Annotated[
        bool,
        Option("--group-by-prefix", help="Also measure batches of rows that begin alike, as training draws them."),
    ] = False,
    expand_turns: Annotated[
        bool, Option("--expand-turns", help="With sft: a row for each turn of the assistant in `messages`.")
    ] = False,
    shape: Annotated[
        str | None,
        Option(
            help="Model shape: tiny, small, 0.5b, 7b, or hybrid: Qwen3.5's mixers in a small one. "
            "[default: small; quick: tiny]"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(help="Id or path: its tokens and chat template. [default: a BPE trained on the data]"),
    ] = None,
    device: Annotated[str, Option(help="cpu, cuda, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, Option(help="float32, bfloat16, or autocast (TRL's default).")] = "float32",
    attn: Annotated[str, Option(help="Attention implementation.")] = "sdpa",
    max_length: Annotated[
        int | None,
        Option(min=2, max=LONGEST, help="Longest sequence, in tokens. [default: 1024; of a tree its longest row]"),
    ] = None,
    max_tokens_per_batch: Annotated[
        int | None, Option(min=1, help="Of token_budget; by default the mean of the fixed batches.")
    ] = None,
    lora: Annotated[int, Option(min=0, help="Rank of LoRA adapters on all linear layers; 0 for none.")] = 0,
    gradient_checkpointing: Annotated[bool, Option(help="Recompute activations in backward.")] = False,
    optimizer: Annotated[bool, Option(help="Count AdamW's step in.")] = True,
    memory: Annotated[
        bool | None,
        Option(help="Measure peak memory; on CPU one more step of each variant. [default: yes; quick: no]"),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        Option(help="Peak of the device for the share of it that is used; by default a matrix product's."),
    ] = None,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of weights and batches.")] = 0,
    compile: Annotated[
        bool, Option("--compile", help="Also measure the packed variants with compiled layers.")
    ] = False,
    compile_backend: Annotated[str, Option(help="Backend of torch.compile.")] = "inductor",
    liger: Annotated[bool, Option("--liger", help="Put Liger's layers into the model: CUDA only.")] = False,
    json: JsonOption = None,
    plot: Annotated[Path | None, Option(help="Draw them to this PNG file.")] = None,
    profile: Annotated[bool, Option(help="Also print where the time of a step goes.")] = False,
) -> None:
    """Time a step of TRL's and the same without padding, side by side; losses and gradients must agree."""
    options = dict(locals())
    device = device_of(device)
    warnings.simplefilter("ignore", FutureWarning)  # transformers', of what TRL calls
    from ..core.attention.attention import refuse_implementation
    from ..tools import bench as b
    from ..tools.reading import load_tokenizer
    from ..tools.tiny import BENCH_SHAPES

    fields = b.BenchSettings.__dataclass_fields__
    given = {name: value for name, value in options.items() if name in fields and value is not None}
    given = (QUICK if quick else {}) | given
    one_of("--shape", given.get("shape", "small"), BENCH_SHAPES)
    one_of("--trainer", trainer, b.TRAINERS)
    one_of("--dtype", dtype, ["autocast", *(str(known).removeprefix("torch.") for known in b.TOLERANCE)])
    if data is None and trainer != "grpo":
        data, split = "Anthropic/hh-rlhf", "test"
    if reason := refuse_implementation(attn):
        raise typer.BadParameter(reason, param_hint="--attn")
    with user_errors_of("--data"):
        tree = b.parse_tree(data or "")
    if expand_turns and (trainer != "sft" or tree is not None):
        raise typer.BadParameter("is for `--trainer sft` on conversations.", param_hint="--expand-turns")
    if tree is not None:
        given = {"max_length": max(tree.longest, 1024), "shuffle": group_by_prefix} | given
    try:
        settings = b.BenchSettings(
            **given | {"device": device, "variants": _named(variants, compile, group_by_prefix)}
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--variants") from error
    if peak_tflops is not None and not peak_tflops > 0:
        raise typer.BadParameter(f"{peak_tflops} is no speed: give more than 0.", param_hint="--peak-tflops")
    if lora and find_spec("peft") is None:
        raise typer.BadParameter("adapters need peft: `pip install 'trl-padfix[peft]'`.", param_hint="--lora")
    if liger and device == "cpu":
        raise typer.BadParameter("Liger's layers are Triton kernels, which run on GPUs only.", param_hint="--liger")
    if liger and find_spec("liger_kernel") is None:
        raise typer.BadParameter("Liger is not installed: `pip install liger-kernel`.", param_hint="--liger")
    outputs(json=json, plot=plot)
    if tokenizer is not None:
        with user_errors_of("--tokenizer"):
            load_tokenizer(tokenizer)
    with user_errors_of("--data"):
        dataset, name = _dataset(data, settings, spread, split, columns)
        try:
            step = b.prepare(dataset, settings)
        except ImportError as error:
            raise typer.BadParameter(str(error), param_hint="--attn") from error
    partial_results, impossible = False, None
    with progress() as watch:
        try:
            results = b.measure(step, settings, watch=watch)
        except b.Interrupted as interrupted:
            results, partial_results = interrupted.results, True
        except b.ImpossibleFigureError as error:
            results, impossible = error.results, str(error)
    about = b.describe(settings, name) | {
        "chat_template": step.rendered,
        "rough": quick,
        "partial": partial_results,
        "impossible": impossible,
    }
    sizes = {"dpo": f"DPO step, {pairs} pairs", "sft": f"SFT step, {pairs} rows"}
    what = sizes.get(trainer, f"GRPO step without generation, {pairs} x {generations} completions")
    family = "Qwen3.5" if settings.shape.startswith("hybrid") else "Qwen2"
    title = f"{what}, {family} shape '{settings.shape}', {dtype} on {about['device']}, {attn}"
    console.print(_table(results, title))
    print_as_is(*_notes(results, step.rendered, settings, quick, partial_results))
    if profile and not (partial_results or impossible):
        for variant, operations in b.profile(step, settings).items():
            print_as_is(f"\n{variant}", operations)
    write_json(json, {**about, "variants": [asdict(result) for result in results]})
    if plot is not None:
        from ..tools.report import plot_bench

        write_output("--plot", plot, partial(plot_bench, results, f"{title}\n{name}, {about['threads']} threads"))
    if impossible is not None:
        typer.echo(impossible, err=True)
        raise typer.Exit(1)
    if partial_results:
        raise typer.Exit(INTERRUPTED)


def _notes(
    results: list[VariantResult], rendered: str | None, settings: BenchSettings, quick: bool, stopped: bool
) -> Iterator[str]:
    """What is to be known of the figures."""
    yield f"loss {results[0].loss:.6f}, gradient norm {results[0].grad_norm:.6f}: equal in all variants"
    if rendered is not None:
        yield f"Conversations were rendered with {rendered}."
    if quick:
        yield f"Rough: {settings.steps} steps of shape '{settings.shape}'. Leave --quick out for figures to rely on."
    if stopped:
        left_out = sorted(set(settings.variants) - {result.name for result in results})
        yield (
            f"PARTIAL: stopped after {results[0].steps} of {settings.steps} counted steps"
            + (f"; without {', '.join(left_out)}, whose batches hold other rows" if left_out else "")
            + "."
        )


def _named(variants: str, compile: bool, group_by_prefix: bool) -> tuple[str, ...]:
    named = variants.split(",")
    if group_by_prefix and "group_by_prefix" not in named:
        named.append("group_by_prefix")
    packed = [name for name in named if name in ("padding_free", "prefix_sharing")] if compile else []
    return (*named, *(f"{name}_compiled" for name in packed))


def _dataset(
    data: str | None, settings: BenchSettings, spread: float, split: str, columns: str | None
) -> tuple[Any, str]:
    from ..tools import bench as b

    if data is None:
        return None, "random"
    count = settings.pairs * (settings.steps + settings.warmup)
    if (rows := b.synthetic_rows(data, settings.trainer, count, spread, settings.seed)) is not None:
        if settings.trainer == "grpo":
            raise ValueError(f"{data} is for dpo and sft: of grpo give --prompt-length and --completion-length.")
        return rows, f"{data}, spread {spread:g}" if data.startswith("lengths:") else data
    rows = b.load_examples(data, settings.trainer, expand_turns=settings.expand_turns, split=split, columns=columns)
    return rows, Path(data).name


def _table(results: list[VariantResult], title: str) -> Table:
    columns = ("variant", "s", "min-max", "x TRL", "limit", "share", "tok/s", "MFU", "GiB", "kept")
    rows = (
        (
            r.name,
            f"{r.seconds:.2f}",
            f"{r.low:.2f}-{r.high:.2f}",
            f"{r.speedup:.2f}",
            f"{r.token_limit:.2f}",
            f"{r.speedup / r.token_limit:.2f}",
            f"{r.tokens_per_second:.0f}",
            f"{r.mfu:.0%}",
            "-" if r.peak_gib is None else f"{r.peak_gib:.2f}",
            "-" if r.kept_mib is None else f"{r.kept_mib:.1f}",
        )
        for r in results
    )
    caption = (
        "s: median step; limit: TRL's padded tokens over those computed; share: of that limit; MFU: the arithmetic "
        "that distinct tokens need at the least, over time and peak; GiB: peak memory; kept: MiB that the graph of a "
        "step keeps for its backward"
    )
    return figure_table(columns, rows, box=SIMPLE, padding=0, title=title, caption=caption)
