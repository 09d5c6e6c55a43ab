"""Which tokens a loss on a batch scores, and whether it scores any of them from padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.call.batch_cache import on_host
from ...core.patches.heads import follow_padding


__all__ = ["PREFIXES", "scored_tokens", "scores_padding"]

PREFIXES = ("", "KL_")
"""Prefixes of the names in a batch, one for each forward of the policy: `KL_` marks KTO's mismatched completions."""

_READ = ("labels", "completion_mask", "input_ids", "attention_mask")


def scores_padding(batch: object) -> bool:
    """Whether a loss over the labels or completion masks of a batch scores tokens from padding."""
    if not isinstance(batch, Mapping):  # tuples and the like: only their loss can interpret them
        return False
    forwards = [[_tensor(batch.get(prefix + name)) for name in _READ] for prefix in PREFIXES]
    labeled = [forward for forward in forwards if _has_token_labels(*forward)]
    on_host(*(x for forward in labeled for x in forward))  # one wait, also for the layouts of these forwards
    return any(_follow_padding(*forward) for forward in labeled)


def _tensor(value: Any) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _has_token_labels(labels: Any, completion_mask: Any, *others: Any) -> bool:
    """Whether a forward has ids, a mask, and a label for each token: a classifier has one for each row or class."""
    tensors = [completion_mask if labels is None else labels, *others]
    return all(x is not None and x.shape == tensors[0].shape for x in tensors)


def _follow_padding(labels: Any, completion_mask: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> bool:
    labels, completion_mask, attention_mask = on_host(labels, completion_mask, attention_mask)
    return follow_padding(torch.where(completion_mask == 1, 0, -100) if labels is None else labels, attention_mask)


def scored_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """
    Mask of the tokens that a loss over labels or completions scores, `(B, L)`: never tokens of the first column.

    `None` if anything but such a loss reads the rows: then no column may be left out.
    """
    if [name for name in batch if name.endswith("input_ids")] != ["input_ids"]:
        return None
    scored = batch["labels"] != -100 if "labels" in batch else batch.get("completion_mask")
    if scored is None or scored.shape != batch["input_ids"].shape:
        return None
    return scored.bool() & (torch.arange(scored.shape[1], device=scored.device) > 0)
