"""`trl-padfix bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.table import Table

from . import console, one_of


__all__ = ["bench"]


def bench(
    data: Annotated[str, typer.Option(help="Local file of preference pairs, Hub id, or 'equal'.")] = (
        "Anthropic/hh-rlhf"
    ),
    trainer: Annotated[str, typer.Option(help="dpo, sft (what is chosen), or grpo (random completions).")] = "dpo",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs per batch; with sft, rows; with grpo, prompts.")] = 8,
    generations: Annotated[int, typer.Option(min=2, help="With grpo: completions of a prompt.")] = 8,
    prompt_length: Annotated[int, typer.Option(min=1, help="With grpo: tokens of a prompt, about.")] = 512,
    completion_length: Annotated[int, typer.Option(min=1, help="With grpo: tokens of a completion, about.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Counted steps.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2,
    shape: Annotated[str, typer.Option(help="Model shape: tiny, small, 0.5b or 7b.")] = "small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    attn: Annotated[str, typer.Option(help="Attention implementation.")] = "sdpa",
    max_length: Annotated[int, typer.Option(min=2, help="Longest sequence, in tokens.")] = 1024,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute activations in backward.")] = False,
    optimizer: Annotated[bool, typer.Option(help="Count AdamW's step in.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    json: Annotated[Optional[Path], typer.Option(help="Write the figures to this file.")] = None,  # noqa: UP045
) -> None:
    """Time TRL's step padded, padding-free and with prefix sharing, side by side; losses must agree."""
    import torch

    from .. import bench as b
    from ..attention import refuse_implementation
    from ..tiny import SHAPES

    one_of("--shape", shape, SHAPES)
    one_of("--trainer", trainer, b.TRAINERS)
    one_of("--dtype", dtype, [str(known).removeprefix("torch.") for known in b.TOLERANCE])
    one_of("--device", device, ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    if reason := refuse_implementation(attn):
        raise typer.BadParameter(reason, param_hint="--attn")
    settings = b.BenchSettings(
        trainer=trainer, pairs=pairs, generations=generations, prompt_length=prompt_length,
        completion_length=completion_length, steps=steps, warmup=warmup, shape=shape, device=device, dtype=dtype,
        attn=attn, max_length=max_length, gradient_checkpointing=gradient_checkpointing, optimizer=optimizer,
        seed=seed,
    )  # fmt: skip
    if trainer == "grpo":
        dataset, name = None, "random"
        what = f"GRPO step without generation, {pairs} x {generations} completions"
    else:
        try:
            dataset = b.equal_length_pairs(2 * pairs * (steps + warmup)) if data == "equal" else b.load_pairs(data)
        except (FileNotFoundError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--data") from error
        name = "equal" if data == "equal" else Path(data).name
        what = f"SFT step, {pairs} rows" if trainer == "sft" else f"DPO step, {pairs} pairs"
    results = b.run(dataset, settings)
    about = b.describe(settings, name)
    table = Table(title=f"{what}, Qwen2 shape '{shape}', {dtype} on {about['device']}, {attn}")
    for column in ("variant", "median s", "min-max s", "x TRL", "token limit", "of limit", "real tok/s", "peak GiB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for r in results:
        table.add_row(
            r.name,
            f"{r.seconds:.3f}",
            f"{r.low:.3f}-{r.high:.3f}",
            f"{r.speedup:.2f}",
            f"{r.token_limit:.2f}",
            f"{r.speedup / r.token_limit:.2f}",
            f"{r.tokens_per_second:.0f}",
            "-" if r.peak_gib is None else f"{r.peak_gib:.2f}",
        )
    console.print(table)
    console.print(f"loss {results[0].loss:.6f}, gradient norm {results[0].grad_norm:.6f}: equal in all variants")
    if json is not None:
        json.write_text(b.to_json(results, about) + "\n")
