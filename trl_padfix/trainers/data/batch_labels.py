"""Whether a loss on a batch scores tokens from padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.call.batch_cache import on_host
from ...core.patches.heads import follow_padding


__all__ = ["PREFIXES", "scores_padding"]

PREFIXES = ("", "KL_")
"""Prefixes of the names in a batch, one for each forward of the policy: `KL_` marks KTO's mismatched completions."""

_READ = ("labels", "completion_mask", "input_ids", "attention_mask")


def scores_padding(batch: object) -> bool:
    """Whether a loss over the labels or completion masks of a batch scores tokens from padding."""
    if not isinstance(batch, Mapping):  # tuples and the like: only their loss can interpret them
        return False
    forwards = [{name: _tensor(batch, prefix + name) for name in _READ} for prefix in PREFIXES]
    labeled = [forward for forward in forwards if _has_token_labels(forward)]
    on_host(*(x for forward in labeled for x in forward.values()))  # one wait, also for the layouts of these forwards
    return any(_follow_padding(**forward) for forward in labeled)


def _tensor(batch: Mapping[str, Any], name: str) -> torch.Tensor | None:
    value = batch.get(name)
    return value if isinstance(value, torch.Tensor) else None


def _has_token_labels(forward: dict[str, Any]) -> bool:
    """Whether a batch has a mask, and a label for each token: a classifier has one for each row or class."""
    labels = forward["completion_mask"] if forward["labels"] is None else forward["labels"]
    ids, mask = forward["input_ids"], forward["attention_mask"]
    return labels is not None and ids is not None and mask is not None and labels.shape == ids.shape == mask.shape


def _follow_padding(labels: Any, completion_mask: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> bool:
    labels, completion_mask, attention_mask = on_host(labels, completion_mask, attention_mask)
    return follow_padding(torch.where(completion_mask == 1, 0, -100) if labels is None else labels, attention_mask)
