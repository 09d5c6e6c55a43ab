"""The plan of a GPU report: its cells in the order of their importance, and the same at toy size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench import Settings


__all__ = ["BUDGET", "Cell", "plan_of"]

BUDGET = 24 * 60
"""Default time limit of a report, in seconds."""

SPREAD = 0.75
"""Relative spread of random lengths: about that of chat data."""

UNCOMPILED = ("trl", "padding_free", "prefix_sharing")
COMPILED = (*UNCOMPILED, "prefix_sharing_compiled")


@dataclass(frozen=True)
class Cell:
    """One benchmark of a report: `benchmarks/bench.py` with these settings."""

    name: str
    settings: Settings
    data: str | None  # random pairs, `lengths:...`, if the report is given no data; `None` for GRPO
    needs: tuple[str, ...] = ()  # modules that must be installed
    seconds: float = 60.0  # estimated time, model and compilation included; with less time left it is not begun


def plan_of(*, toy: bool = False, backend: str | None = "inductor") -> list[Cell]:
    """
    Cells of a report.

    Args:
        toy (`bool`):
            Whether to shrink the cells to sizes for a CPU.
        backend (`str`, *optional*):
            Backend of `torch.compile`; with `None` no layers are compiled.
    """
    cells = [
        _cell("dpo", "0.5b", "autocast", 8, COMPILED, seconds=120),
        _cell("dpo", "7b", "bfloat16", 8, COMPILED, lora=16, seconds=150),
        _cell("dpo", "0.5b", "autocast", 64, UNCOMPILED, checkpointing=True, seconds=70),
        _cell("sft", "0.5b", "autocast", 16, COMPILED, seconds=90),
        _cell("grpo", "0.5b", "autocast", 8, COMPILED, seconds=90),
        _cell("dpo", "7b", "autocast", 8, UNCOMPILED, lora=16, checkpointing=True, seconds=100),
        _cell("dpo", "0.5b", "bfloat16", 8, COMPILED, seconds=90),
        _cell("dpo", "0.5b", "bfloat16", 64, COMPILED, checkpointing=True, seconds=110),
        _cell("dpo", "7b", "bfloat16", 64, UNCOMPILED, lora=16, checkpointing=True, seconds=180),
        _cell("dpo", "0.5b", "autocast", 4, UNCOMPILED, lengths="4096/512", checkpointing=True, seconds=60),
        _cell("sft", "7b", "bfloat16", 16, UNCOMPILED, lora=16, checkpointing=True, seconds=90),
        _cell("grpo", "7b", "bfloat16", 8, UNCOMPILED, lora=16, checkpointing=True, seconds=110),
        _cell("dpo", "0.5b", "autocast", 16, UNCOMPILED, seconds=45),
        _cell("dpo", "0.5b", "autocast", 32, UNCOMPILED, checkpointing=True, seconds=55),
        _cell("sft", "0.5b", "bfloat16", 16, UNCOMPILED, seconds=45),
        _cell("grpo", "0.5b", "bfloat16", 8, UNCOMPILED, seconds=45),
        # Last, because Liger replaces functions of transformers for the rest of the process.
        _cell("dpo", "0.5b", "autocast", 8, UNCOMPILED, liger=True, seconds=50),
        _cell("sft", "0.5b", "autocast", 16, UNCOMPILED, liger=True, seconds=50),
        _cell("dpo", "7b", "bfloat16", 8, UNCOMPILED, lora=16, liger=True, seconds=90),
        _cell("grpo", "0.5b", "autocast", 8, UNCOMPILED, liger=True, seconds=50),
    ]
    cells = [_compiled_with(cell, backend) for cell in cells]
    return [_as_toy(cell) for cell in cells] if toy else cells


def _cell(
    trainer: str,
    shape: str,
    dtype: str,
    pairs: int,
    variants: tuple[str, ...],
    *,
    lora: int = 0,
    checkpointing: bool = False,
    liger: bool = False,
    lengths: str = "192/128",
    seconds: float,
) -> Cell:
    settings = Settings(
        trainer=trainer, variants=variants, pairs=pairs, prompt_length=512, completion_length=128, steps=8, warmup=2,
        shape=shape, device="cuda", dtype=dtype, max_length=8192, lora=lora, gradient_checkpointing=checkpointing,
        liger=liger,
    )  # fmt: skip
    words = [trainer.upper(), shape.upper(), "LoRA" if lora else "", settings.batch_size]
    words.append(lengths if lengths != "192/128" else "")
    details = [dtype, "checkpointing" if checkpointing else "", "Liger" if liger else ""]
    return Cell(
        name=f"{' '.join(filter(None, words))}, {', '.join(filter(None, details))}",
        settings=settings,
        data=None if trainer == "grpo" else f"lengths:{lengths}/{SPREAD}",
        needs=(*(["peft"] if lora else []), *(["liger_kernel"] if liger else [])),
        seconds=seconds,
    )


def _compiled_with(cell: Cell, backend: str | None) -> Cell:
    compiled = {"variants": UNCOMPILED} if backend is None else {"compile_backend": backend}
    return replace(cell, settings=replace(cell.settings, **compiled))


def _as_toy(cell: Cell) -> Cell:
    settings = replace(
        cell.settings, pairs=min(cell.settings.pairs, 2), generations=2, prompt_length=12, completion_length=6,
        steps=1, warmup=0, shape="tiny", device="cpu", lora=min(cell.settings.lora, 2), memory=False, max_length=64,
    )  # fmt: skip
    # 0 seconds: a toy cell is begun however little time is left.
    return replace(cell, settings=settings, data=cell.data and f"lengths:12/6/{SPREAD}", seconds=0.0)
