"""
A training step of TRL's, padded and packed, side by side: DPO's, or GRPO's on completions that are given.

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
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from . import __version__
from .data import load_rows
from .decoder import remove_padding
from .layout import padding_free_layout, prefix_sharing_layout
from .tiny import SHAPES, build_qwen2, train_tokenizer


__all__ = ["BenchSettings", "VariantResult", "equal_length_pairs", "load_pairs", "run"]

TRAINERS = ("dpo", "grpo")

VARIANTS = ("trl", "padding_free", "prefix_sharing")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient norm between variants."""


@dataclass(frozen=True)
class BenchSettings:
    """What is measured; every field is an option of `trl-padfix bench`."""

    trainer: str = "dpo"
    pairs: int = 8
    generations: int = 8
    prompt_length: int = 512
    completion_length: int = 64
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
    dataset = load_rows(data, split="test")
    if missing := {"chosen", "rejected"} - set(dataset.column_names):
        raise ValueError(f"{data} has no column {sorted(missing)}; it has {dataset.column_names}.")
    return dataset


def equal_length_pairs(count: int, length: int = 128, seed: int = 0) -> Dataset:
    """Tokenized pairs of one length that share a prompt of one token: where removing padding cannot help."""
    ids = torch.randint(3, 256, (2 * count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = zip(ids[:count], ids[count:], strict=True)
    return Dataset.from_list([{"prompt_ids": a[:1], "chosen_ids": a[1:], "rejected_ids": b[1:]} for a, b in rows])


def run(data: Dataset | None, settings: BenchSettings) -> list[VariantResult]:
    """
    Time all variants on the same random batches.

    Args:
        data ([`~datasets.Dataset`], *optional*):
            Preference pairs, as text or tokenized. GRPO takes none: its completions are random.
        settings ([`BenchSettings`]):
            What to measure.

    Returns:
        `list[VariantResult]`, TRL's padded step first.

    Raises:
        RuntimeError: If losses or gradient norms of the variants differ.
    """
    trainer, batches = _online_trainer(settings) if settings.trainer == "grpo" else _trainer(data, settings)
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
    masks = [_rows(b)["attention_mask"] for b in counted]
    padded, real = sum(m.numel() for m in masks), sum(int(m.sum()) for m in masks)
    tokens = {
        "trl": padded,
        "padding_free": sum(padding_free_layout(m).packed_tokens for m in masks),
        "prefix_sharing": sum(prefix_sharing_layout(**_rows(b)).packed_tokens for b in counted),
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
    trainer = _GivenTokens(
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
    _without_a_loop(trainer)
    batches = [trainer._prepare_inputs(b) for b in itertools.islice(trainer.get_train_dataloader(), total)]
    if len(batches) < total:
        raise ValueError(f"The data gives {len(batches)} batches of {settings.pairs} pairs, and {total} are needed.")
    return trainer, batches


class _GivenTokens(trl.DPOTrainer):
    """DPO on pairs that are tokenized already, where they are."""

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset if "prompt_ids" in dataset.column_names else super()._prepare_dataset(dataset, *args)


class _GivenCompletions(trl.GRPOTrainer):
    """GRPO's step on completions that are there already: log-probabilities, loss and backward, no generation."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


def _online_trainer(settings: BenchSettings) -> tuple[trl.GRPOTrainer, list[dict[str, torch.Tensor]]]:
    """GRPO on `pairs` random prompts with `generations` random completions each, of about the lengths asked for."""
    shape = SHAPES[settings.shape]
    tokenizer = train_tokenizer([""], 1024)
    dtype = getattr(torch, settings.dtype)
    policy = build_qwen2(tokenizer, **shape, seed=settings.seed, attn_implementation=settings.attn, dtype=dtype)
    trainer = _GivenCompletions(
        model=policy.to(settings.device, dtype),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=settings.pairs * settings.generations,
            num_generations=settings.generations,
            max_completion_length=2 * settings.completion_length,
            gradient_checkpointing=settings.gradient_checkpointing,
            bf16=False,
            use_cpu=settings.device == "cpu",
            report_to=[],
            seed=settings.seed,
        ),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=tokenizer,
    )
    _without_a_loop(trainer)
    draw = torch.Generator().manual_seed(settings.seed)
    batches = [_completions(settings, shape["vocab_size"], draw) for _ in range(settings.warmup + settings.steps)]
    return trainer, [{k: v.to(settings.device) for k, v in batch.items()} for batch in batches]


def _completions(settings: BenchSettings, vocab_size: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    rows = settings.pairs * settings.generations

    def ragged(count: int, about: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(max(1, about * 3 // 4), about * 5 // 4 + 1, (count, 1), generator=draw)
        ids = torch.randint(3, vocab_size, (count, int(lengths.max())), generator=draw)
        return ids, (torch.arange(ids.shape[1]) < lengths).long()

    prompts, prompt_mask = (
        x.flip(1).repeat_interleave(settings.generations, 0) for x in ragged(settings.pairs, settings.prompt_length)
    )
    completions, completion_mask = ragged(rows, settings.completion_length)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "advantages": torch.rand(rows, generator=draw) + 0.5,
        "num_items_in_batch": completion_mask.sum(),
    }


def _without_a_loop(trainer: trl.DPOTrainer | trl.GRPOTrainer) -> None:
    """Set what the training loop would have set."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, weight_decay=0.0)  # weights stay equal


def _rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ids and mask that a batch puts through the decoder."""
    if "input_ids" in batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    return {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    }


@contextlib.contextmanager
def _variant(trainer: Any, name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if name != "trl":
            for model in filter(None, (trainer.model, trainer.ref_model)):
                stack.enter_context(remove_padding(model, prefix_sharing=name == "prefix_sharing"))
        yield


def _timed_step(trainer: Any, batch: dict[str, torch.Tensor], settings: BenchSettings) -> dict[str, float]:
    cuda = settings.device == "cuda"
    # Fresh tensors: a layout found on a batch that was seen before would not be paid for.
    batch = {k: v.clone() for k, v in batch.items()}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = trainer.training_step(trainer.model, batch, None)
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
