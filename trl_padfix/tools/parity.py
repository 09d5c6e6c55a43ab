"""
Compare the numbers of a model on the user's data, in every mode with every attention backend.

The yardstick is the padded forward and backward in float32 with eager attention: the computation without any
optimization. [`check_parity`] compares packed with padded beside it, where only the packing differs.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from ..core.errors import PaddingRemovalError
from ..core.parity.check import TOLERANCES, check_parity
from ..core.parity.report import ParityReport
from ..core.remove import remove_padding
from ..versions import installed_version
from .data import checked_rows, texts_of
from .formats import to_trl_format, trainer_of
from .reading import SAFE_LOADING, load_model, load_tokenizer
from .tiny import SHAPES, build_qwen2, train_tokenizer
from .token_rows import sequences_of, token_rows


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "MODES", "Comparison", "ComparisonReport", "ModelSource", "compare", "default_backends", "tokenize_rows",
]  # fmt: skip

MODES = {"padded": None, "padding-free": False, "prefix sharing": True}
"""Modes, and the `prefix_sharing` of [`remove_padding`] in each; `None` leaves the padding."""

GRADIENT = 1e-3
"""Largest relative difference of the gradient from the yardstick's, in float32."""

SEARCHED = 16
"""Rows of different lengths are searched among this many times the requested rows."""

ROUNDING = 2.0
"""In half precision, the largest distance of a packed result from the yardstick over that of the padded result."""


@dataclass(frozen=True)
class Comparison:
    """One mode with one backend. Figures are `None` if it cannot run, and the `note` says why."""

    attention: str
    mode: str
    ok: bool = False  # whether all figures are within tolerance
    note: str = ""
    tokens: int | None = None  # in the decoder
    logps: float | None = None  # largest difference of a log-probability from the yardstick's
    gradient: float | None = None  # norm of the difference of the gradients over the norm of the yardstick's
    parity: ParityReport | None = None  # packed against padded with this backend


@dataclass(frozen=True)
class ModelSource:
    """A model by its name or path, or with `tiny_shape` a random one of [`SHAPES`], as a training builds it."""

    model: str
    tiny_shape: str | None = None

    @property
    def name(self) -> str:
        """The name without its folders, which a report must not show."""
        return Path(self.model).name

    def tokenizer(self, dataset: Dataset) -> PreTrainedTokenizerBase:
        """The tokenizer of the model; that of a tiny one is trained on the data."""
        if self.tiny_shape is None:
            return load_tokenizer(self.model)
        return train_tokenizer(texts_of(dataset), SHAPES[self.tiny_shape]["vocab_size"])

    def loader(self, tokenizer: PreTrainedTokenizerBase, device: str) -> Callable[[str, torch.dtype], nn.Module]:
        """The argument `load` of [`compare`]."""

        def load(backend: str, dtype: torch.dtype) -> nn.Module:
            options: dict[str, Any] = {"attn_implementation": backend, "dtype": dtype}
            if self.tiny_shape is not None:
                shape = SHAPES[self.tiny_shape] | {"vocab_size": len(tokenizer)}
                return build_qwen2(tokenizer, **shape, **options).to(device, dtype)
            if backend == "eager":
                # The yardstick is loaded first. A failure is one of reading the model, which `load_model` explains.
                return load_model(self.model, **options).to(device)
            # A failure of another backend is its own: `compare` catches it and goes on.
            return AutoModelForCausalLM.from_pretrained(self.model, **SAFE_LOADING, **options).to(device)

        return load


@dataclass(frozen=True)
class ComparisonReport:
    """All comparisons of a model on one batch."""

    model: str
    device: str
    dtype: str
    lengths: list[int]  # real tokens of each row
    padded_tokens: int
    comparisons: list[Comparison]

    @property
    def has_padding(self) -> bool:
        """Whether rows have different lengths: without padding nothing was compared."""
        return min(self.lengths) < max(self.lengths)

    @property
    def versions(self) -> str:
        return ", ".join(
            f"{name} {installed_version(name)}" for name in ("trl-padfix", "torch", "transformers", "trl")
        )

    @property
    def failures(self) -> list[str]:
        """A line for each comparison that failed, and one if there was no padding."""
        failures = [
            f"{c.attention}, {c.mode}: {c.note or c.parity or 'too far from the yardstick'}"
            for c in self.comparisons
            if not c.ok
        ]
        if not self.has_padding:
            failures.append(
                f"There was no padding to compare: all {len(self.lengths)} rows have {max(self.lengths)} tokens. Take "
                "more rows (`--rows`), a larger `--max-length`, or other data."
            )
        return failures

    def summary(self, plain_template: bool) -> str:
        """The lines below the table; `plain_template` tells that conversations had no template of their own."""
        return (
            f"{self.model} in {self.dtype} on {self.device}, {len(self.lengths)} rows of {min(self.lengths)} to "
            f"{max(self.lengths)} tokens{', conversations in a plain chat template' if plain_template else ''}.\n"
            "logps, gradient: largest difference of a log-probability, and relative\n"
            "difference of the gradient, from padded eager float32. packed: largest\n"
            f"difference between packed and padded.\n{self.versions},\nPython {platform.python_version()}."
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON."""
        names = ("model", "device", "dtype", "lengths", "padded_tokens", "versions")
        figures = {name: getattr(self, name) for name in names}
        results = [{**vars(c), "parity": c.parity and c.parity.maximum} for c in self.comparisons]
        return figures | {"compared": self.has_padding, "ok": not self.failures, "results": results}


def default_backends(dtype: str, device: str) -> list[str]:
    """Eager, SDPA, and FlashAttention 2 where it can run."""
    flash = dtype != "float32" and device == "cuda" and is_flash_attn_2_available()
    return ["eager", "sdpa", *(["flash_attention_2"] if flash else [])]


def tokenize_rows(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, count: int, max_length: int
) -> dict[str, torch.Tensor]:
    """
    Tokenize examples into a batch that is padded on the right.

    Args:
        dataset (`Dataset`):
            Data that a trainer takes.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the model.
        count (`int`):
            Number of examples; a preference pair gives two rows. The first ones are taken. If all of them have one
            length, there is no padding to compare, and the following ones are searched for other lengths.
        max_length (`int`):
            Tokens after which a row is truncated.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, each of shape `(B, L)`.

    Raises:
        ValueError: If the rows have no text that TRL would train on.
    """
    dataset = to_trl_format(dataset.select(range(min(len(dataset), SEARCHED * count))))
    trainer = trainer_of(dataset)

    def tokenized(start: int, stop: int) -> list[list[list[int]]]:
        """Token ids of the sequences of the examples from `start` to `stop`."""
        rows = token_rows(list(checked_rows(dataset, start, stop)), tokenizer, trainer)
        return [[ids[:max_length] for ids in sequences_of(row)] for row in rows]

    examples = tokenized(0, count)
    if len({len(ids) for sequences in examples for ids in sequences}) == 1:
        examples += tokenized(count, len(dataset))
        examples.sort(key=lambda sequences: min(map(len, sequences)))
        step = (len(examples) - 1) / max(count - 1, 1)  # the shortest, the longest, and evenly spaced ones in between
        examples = [examples[round(i * step)] for i in range(min(count, len(examples)))]
    rows = [torch.tensor(ids) for sequences in examples for ids in sequences]
    if min(map(len, rows)) < 2:
        raise ValueError("A row has no token to predict: its text is empty. Filter such rows out.")
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    return {"input_ids": padded, "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True)}


def compare(
    load: Callable[[str, torch.dtype], nn.Module], batch: dict[str, torch.Tensor], backends: list[str],
    dtype: torch.dtype, gradients: bool = True,
) -> Iterator[Comparison]:  # fmt: skip
    """
    Compute a batch in every mode with every backend, and compare each with float32 and eager attention.

    Args:
        load (`Callable[[str, torch.dtype], nn.Module]`):
            Loads the model with an attention implementation and a dtype, on the device of the batch. It is called once
            for each backend, and one model is held at a time.
        batch (`dict[str, torch.Tensor]`):
            `input_ids` and `attention_mask`, each of shape `(B, L)`.
        backends (`list[str]`):
            Attention implementations.
        dtype (`torch.dtype`):
            Precision of all computations but the yardstick.
        gradients (`bool`, *optional*, defaults to `True`):
            Whether to compare gradients, which takes three times the memory of the weights in float32.

    Yields:
        [`Comparison`], for each backend and mode.

    Raises:
        ValueError: If a token of the batch has no embedding.
    """
    model = load("eager", torch.float32)
    embeddings, largest = model.get_input_embeddings().num_embeddings, int(batch["input_ids"].max())
    if largest >= embeddings:
        raise ValueError(
            f"The tokenizer gives token {largest}, and the model has embeddings for 0 to {embeddings - 1}: they do "
            "not belong together. Use the model's own tokenizer, or `model.resize_token_embeddings(len(tokenizer))`."
        )
    yardstick = _compute(model, batch, gradients)
    del model  # before the next one is loaded: memory has room for one
    for backend in backends:
        try:
            model = load(backend, dtype)
        except (ImportError, ValueError) as error:  # the backend cannot run here, or not on this model
            yield Comparison(backend, "-", note=str(error))
            continue
        max_logps, max_gradient = TOLERANCES[torch.float32][1], GRADIENT
        for mode, sharing in MODES.items():
            try:
                tokens, logps, gradient, parity = _compare(model, batch, sharing, yardstick)
            except (PaddingRemovalError, RuntimeError) as error:
                yield Comparison(backend, mode, note=str(error))
                continue
            # In half precision rounding exceeds any fixed tolerance: the padded mode, which comes first, measures it.
            if mode == "padded" and dtype != torch.float32:
                max_logps, max_gradient = ROUNDING * logps, ROUNDING * (gradient or 0.0)
            is_near = logps <= max_logps and (gradient is None or gradient <= max_gradient)
            ok = is_near and (parity is None or parity.ok)
            yield Comparison(backend, mode, ok, "", tokens, logps, gradient, parity)
        del model


def _compare(
    model: nn.Module, batch: dict[str, torch.Tensor], sharing: bool | None, yardstick: _Figures
) -> tuple[int, float, float | None, ParityReport | None]:
    """The figures of a [`Comparison`]: tokens, and the differences of log-probabilities, gradient and packing."""
    tokens, parity = batch["attention_mask"].numel(), None
    with contextlib.ExitStack() as stack:
        if sharing is not None:
            handle = stack.enter_context(remove_padding(model, prefix_sharing=sharing))
            parity = check_parity(model, batch, gradients=bool(yardstick.gradient))
        computed = _compute(model, batch, bool(yardstick.gradient))
        if sharing is not None:
            tokens = handle.stats.packed_tokens
    difference = (computed.logps - yardstick.logps).abs().max().item()
    return tokens, difference, yardstick.distance(computed), parity


@dataclass(frozen=True)
class _Figures:
    """Log-probabilities of the real tokens, and the gradient of their mean."""

    logps: torch.Tensor
    gradient: dict[str, torch.Tensor]

    def distance(self, other: _Figures) -> float | None:
        """Norm of the difference of both gradients over the norm of this one; `None` without gradients."""
        if not self.gradient:
            return None
        # A norm of norms is the norm of all parameters together.
        differences = [(other.gradient[name] - gradient).norm() for name, gradient in self.gradient.items()]
        norms = [gradient.norm() for gradient in self.gradient.values()]
        return (torch.stack(differences).norm() / torch.stack(norms).norm()).item()


def _compute(model: nn.Module, batch: dict[str, torch.Tensor], gradients: bool) -> _Figures:
    model.eval()  # no dropout
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    with torch.set_grad_enabled(gradients):
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)[mask[:, 1:]]
        if not gradients:
            return _Figures(logps.cpu(), {})
        logps.mean().backward()
    gradients_by_name = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Figures(logps.detach().cpu(), gradients_by_name)
