"""
A model on the user's data, computed in every mode with every attention backend: how far apart the numbers are.

The yardstick is the padded forward and backward in float32 with eager attention, the computation that nothing was
optimized in. [`check_parity`] beside it says whether packed and padded agree where nothing but the packing differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from ..core.errors import PaddingRemovalError
from ..core.parity.check import TOLERANCES, check_parity
from ..core.parity.report import ParityReport
from ..core.remove import remove_padding
from .data import checked_rows
from .formats import as_trl_takes_them, trainer_of
from .stats import sequences_of, token_rows


__all__ = ["MODES", "Comparison", "compare", "tokenize_rows"]

MODES = {"padded": None, "padding-free": False, "prefix sharing": True}
"""Modes, and whether prefixes are shared in them."""

GRADIENT = 1e-3
"""Largest relative difference of the gradient from the yardstick's, in float32."""

SEARCHED = 16
"""So many times the rows that are asked for are searched for rows of other lengths."""

ROUNDING = 2.0
"""Half precision may be this many times as far from the yardstick packed as it is padded."""


@dataclass(frozen=True)
class Comparison:
    """One mode with one backend; figures are `None` where there are none, and the `note` says why."""

    attention: str
    mode: str
    ok: bool = False  # whether all figures are within tolerance
    note: str = ""
    tokens: int | None = None  # that entered the decoder
    logps: float | None = None  # largest difference of a log-probability from the yardstick's
    gradient: float | None = None  # norm of the difference of the gradients over the norm of the yardstick's
    parity: ParityReport | None = None  # packed against padded with this backend


def tokenize_rows(dataset: Dataset, tokenizer: Any, count: int, max_length: int) -> dict[str, torch.Tensor]:
    """
    `count` examples of data that a trainer takes as a batch padded right: `input_ids` and `attention_mask`, `(B, L)`.

    They are the first ones, unless these are all of one length: then there would be no padding to compare, and rows of
    other lengths are looked for among the following ones. A preference pair gives two rows.

    Raises:
        ValueError: If the rows have no text that TRL would train on.
    """
    dataset = as_trl_takes_them(dataset.select(range(min(len(dataset), SEARCHED * count))))
    trainer = trainer_of(dataset)

    def tokenized(start: int, stop: int) -> list[list[list[int]]]:
        """Token ids of the sequences of some examples."""
        rows = token_rows(list(checked_rows(dataset, start, stop)), tokenizer, trainer)
        return [[ids[:max_length] for ids in sequences_of(row)] for row in rows]

    examples = tokenized(0, count)
    if len({len(ids) for sequences in examples for ids in sequences}) == 1:
        examples += tokenized(count, len(dataset))
        examples.sort(key=lambda sequences: min(map(len, sequences)))
        step = (len(examples) - 1) / max(count - 1, 1)  # the shortest, the longest, and some in between
        examples = [examples[round(i * step)] for i in range(min(count, len(examples)))]
    rows = [torch.tensor(ids) for sequences in examples for ids in sequences]
    if min(map(len, rows)) < 2:
        raise ValueError("A row has no token to predict: its text is empty. Filter such rows out.")
    pad = torch.nn.utils.rnn.pad_sequence
    padded = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    return {"input_ids": padded, "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True)}


def compare(
    load: Callable[[str, torch.dtype], nn.Module],
    batch: dict[str, torch.Tensor],
    backends: list[str],
    dtype: torch.dtype,
    gradients: bool = True,
) -> Iterator[Comparison]:
    """
    Compute a batch in every mode with every backend, and tell how far each is from float32 with eager attention.

    `load` loads the model with an attention implementation and a dtype, on the device of the batch (`input_ids` and
    `attention_mask`, `(B, L)`). It is called anew for each backend, and one model is held at a time. Comparing
    gradients takes three times the memory of the weights in float32.
    """
    model = load("eager", torch.float32)
    known, largest = model.get_input_embeddings().num_embeddings, int(batch["input_ids"].max())
    if largest >= known:
        raise ValueError(
            f"The tokenizer gives token {largest}, and the model has embeddings for 0 to {known - 1}: they do not "
            "belong together. Use the model's own tokenizer, or `model.resize_token_embeddings(len(tokenizer))`."
        )
    yardstick = _compute(model, batch, gradients)
    del model
    for backend in backends:
        try:
            model = load(backend, dtype)
        except (ImportError, ValueError) as error:  # the backend cannot run here, or not on this model
            yield Comparison(backend, "-", note=str(error))
            continue
        room = (TOLERANCES[torch.float32][1], GRADIENT)
        for mode, sharing in MODES.items():
            try:
                tokens, logps, gradient, parity = _compare(model, batch, sharing, yardstick)
            except (PaddingRemovalError, RuntimeError) as error:
                yield Comparison(backend, mode, note=str(error))
                continue
            if mode == "padded" and dtype != torch.float32:
                room = (ROUNDING * logps, ROUNDING * (gradient or 0.0))
            near = logps <= room[0] and (gradient is None or gradient <= room[1])
            ok = near and (parity is None or parity.ok)
            yield Comparison(backend, mode, ok, "", tokens, logps, gradient, parity)
        del model


def _compare(
    model: nn.Module, batch: dict[str, torch.Tensor], sharing: bool | None, yardstick: _Figures
) -> tuple[int, float, float | None, ParityReport | None]:
    """The figures of a [`Comparison`]: tokens, and how far log-probabilities, gradient and packing are off."""
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
        """Relative difference of the gradient of `other`."""
        if not self.gradient:
            return None
        differences = [(other.gradient[name] - mine).norm() for name, mine in self.gradient.items()]
        norms = [mine.norm() for mine in self.gradient.values()]
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
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Figures(logps.detach().cpu(), found)
