"""
TRL's DPO step, padded and packed, side by side.

One TRL trainer, one policy, one reference, the same batches: what changes between variants is only what
`remove_padding` attaches. Steps are interleaved batch by batch, so that a machine that drifts drifts for all of them;
ratios are taken batch by batch. Losses and gradient norms of the variants must agree, or the run fails.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset, load_dataset

from . import __version__
from .decoder import remove_padding
from .layout import padding_free_layout, prefix_sharing_layout
from .tiny import SHAPES, build_qwen2, train_tokenizer


__all__ = ["BenchSettings", "VariantResult", "equal_length_pairs", "load_pairs", "run"]

VARIANTS = ("trl", "padding_free", "prefix_sharing")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient norm between variants."""


@dataclass(frozen=True)
class BenchSettings:
    """What is measured; every field is an option of `trl-padfix bench`."""

    pairs: int = 8
    steps: int = 10
    warmup: int = 2
    shape: str = "small"
    device: str = "cpu"
    dtype: str = "float32"
    attn: str = "sdpa"
    max_length: int = 1024
    gradient_checkpointing: bool = False
    optimizer: bool = True
    seed: int = 0


@dataclass
class VariantResult:
    """
    One variant over all counted steps.

    Attributes:
        seconds, low, high (`float`): Median, quickest and slowest step.
        speedup (`float`): Median over batches of TRL's step time over this one's.
        tokens (`int`): Tokens that entered the decoder per forward, over all batches.
        tokens_per_second (`float`): Real tokens of all batches over the time of all steps.
        token_limit (`float`): Padded tokens over `tokens`: the speed-up if time went with tokens alone.
        peak_gib (`float`, *optional*): Peak memory of a step, on CUDA.
        loss, grad_norm (`float`): Means over batches.
    """

    name: str
    seconds: float
    low: float
    high: float
    speedup: float
    tokens: int
    tokens_per_second: float
    token_limit: float
    peak_gib: float | None
    loss: float
    grad_norm: float


def load_pairs(data: str) -> Dataset:
    """
    Preference pairs with `chosen` and `rejected`, from a Hub id or a local `.jsonl`, `.jsonl.gz` or `.parquet`.

    Raises:
        FileNotFoundError: If `data` looks like a local file and there is none.
        ValueError: If columns are missing.
    """
    path = Path(data)
    if path.suffix in {".gz", ".json", ".jsonl", ".parquet"}:
        if not path.exists():
            raise FileNotFoundError(
                f"There is no file {data}. Give a local file of pairs, or the id of a Hub dataset."
            )
        dataset = load_dataset("parquet" if path.suffix == ".parquet" else "json", data_files=data, split="train")
    else:
        dataset = load_dataset(data, split="test")
    if missing := {"chosen", "rejected"} - set(dataset.column_names):
        raise ValueError(f"{data} has no column {sorted(missing)}; it has {dataset.column_names}.")
    return dataset


def equal_length_pairs(count: int, length: int = 128, seed: int = 0) -> Dataset:
    """Tokenized pairs of one length that share a prompt of one token: where removing padding cannot help."""
    ids = torch.randint(3, 256, (2 * count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = zip(ids[:count], ids[count:], strict=True)
    return Dataset.from_list([{"prompt_ids": a[:1], "chosen_ids": a[1:], "rejected_ids": b[1:]} for a, b in rows])


def run(data: Dataset, settings: BenchSettings) -> list[VariantResult]:
    """
    Time all variants on the same random batches.

    Args:
        data ([`~datasets.Dataset`]):
            Preference pairs, as text or tokenized.
        settings ([`BenchSettings`]):
            What to measure.

    Returns:
        `list[VariantResult]`, TRL's padded step first.

    Raises:
        RuntimeError: If losses or gradient norms of the variants differ.
    """
    trainer, batches = _trainer(data, settings)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for step, batch in enumerate(batches):
        # Each variant is first, second and third equally often.
        for name in VARIANTS[step % len(VARIANTS) :] + VARIANTS[: step % len(VARIANTS)]:
            with _variant(trainer, name):
                figures = _timed_step(trainer, batch, settings)
            if step >= settings.warmup:
                measured[name].append(figures)
    _check_equal(measured, TOLERANCE[getattr(torch, settings.dtype)])
    counted = batches[settings.warmup :]
    padded = sum(b["input_ids"].numel() for b in counted)
    real = sum(int(b["attention_mask"].sum()) for b in counted)
    tokens = {
        "trl": padded,
        "padding_free": sum(padding_free_layout(b["attention_mask"]).packed_tokens for b in counted),
        "prefix_sharing": sum(
            prefix_sharing_layout(b["input_ids"], b["attention_mask"]).packed_tokens for b in counted
        ),
    }
    results = []
    for name, figures in measured.items():
        seconds = [f["seconds"] for f in figures]
        ratios = [t["seconds"] / f["seconds"] for t, f in zip(measured["trl"], figures, strict=True)]
        peaks = [f["peak_gib"] for f in figures if "peak_gib" in f]
        results.append(
            VariantResult(
                name=name,
                seconds=statistics.median(seconds),
                low=min(seconds),
                high=max(seconds),
                speedup=statistics.median(ratios),
                tokens=tokens[name],
                tokens_per_second=real / sum(seconds),
                token_limit=padded / tokens[name],
                peak_gib=max(peaks) if peaks else None,
                loss=statistics.mean(f["loss"] for f in figures),
                grad_norm=statistics.mean(f["grad_norm"] for f in figures),
            )
        )
    return results


def describe(settings: BenchSettings, data: str) -> dict[str, Any]:
    """What a figure needs beside it: settings, machine and versions."""
    device = torch.cuda.get_device_name() if settings.device == "cuda" else platform.processor() or platform.machine()
    return {
        "data": data,
        "settings": asdict(settings),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {
            "trl_padfix": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "python": platform.python_version(),
        },
    }


def to_json(results: list[VariantResult], about: dict[str, Any]) -> str:
    """The results with what they were measured on."""
    return json.dumps({**about, "variants": [asdict(r) for r in results]}, indent=2)


def _trainer(data: Dataset, settings: BenchSettings) -> tuple[trl.DPOTrainer, list[dict[str, torch.Tensor]]]:
    shape = SHAPES[settings.shape]
    texts = (text for row in data for text in (row["chosen"], row["rejected"])) if "chosen" in data.features else [""]
    tokenizer = train_tokenizer(texts, min(shape["vocab_size"], 8192))
    total = settings.warmup + settings.steps
    data = data.shuffle(seed=settings.seed).select(range(min(len(data), 2 * total * settings.pairs)))
    dtype = getattr(torch, settings.dtype)
    policy, reference = (
        build_qwen2(tokenizer, **shape, seed=seed, attn_implementation=settings.attn, dtype=dtype).to(
            settings.device, dtype
        )
        for seed in (settings.seed, settings.seed + 1)
    )
    trainer = trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=trl.DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=settings.pairs,
            max_length=settings.max_length,
            gradient_checkpointing=settings.gradient_checkpointing,
            bf16=False,
            use_cpu=settings.device == "cpu",
            report_to=[],
            seed=settings.seed,
        ),
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop, which is not run here
    trainer.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0)  # weights stay equal
    batches = [trainer._prepare_inputs(b) for b in itertools.islice(trainer.get_train_dataloader(), total)]
    if len(batches) < total:
        raise ValueError(f"The data gives {len(batches)} batches of {settings.pairs} pairs, and {total} are needed.")
    return trainer, batches


@contextlib.contextmanager
def _variant(trainer: trl.DPOTrainer, name: str) -> Iterator[None]:
    if name == "trl":
        yield
        return
    sharing = name == "prefix_sharing"
    with (
        remove_padding(trainer.model, prefix_sharing=sharing),
        remove_padding(trainer.ref_model, prefix_sharing=sharing),
    ):
        yield


def _timed_step(trainer: trl.DPOTrainer, batch: dict[str, torch.Tensor], settings: BenchSettings) -> dict[str, float]:
    cuda = settings.device == "cuda"
    # Fresh tensors: a layout found on a batch that was seen before would not be paid for.
    batch = {k: v.clone() for k, v in batch.items()}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = trainer.training_step(trainer.model, batch)
    if settings.optimizer:
        trainer.optimizer.step()
    if cuda:
        torch.cuda.synchronize()
    figures = {"seconds": time.perf_counter() - start, "loss": loss.item()}
    if cuda:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    norms = torch._foreach_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])
    figures["grad_norm"] = torch.stack(norms).norm().item()
    trainer.optimizer.zero_grad()
    return figures


def _check_equal(measured: dict[str, list[dict[str, float]]], tolerance: float) -> None:
    for name, figures in measured.items():
        for step, (theirs, ours) in enumerate(zip(measured["trl"], figures, strict=True)):
            for quantity in ("loss", "grad_norm"):
                difference = abs(ours[quantity] - theirs[quantity]) / abs(theirs[quantity])
                if not difference <= tolerance:
                    raise RuntimeError(
                        f"{name} is not the same computation: in step {step} its {quantity} is {ours[quantity]:.6g} "
                        f"and TRL's {theirs[quantity]:.6g}, {difference:.1e} apart (at most {tolerance:.0e})."
                    )
