"""Observations of a model: the tokens that entered its decoder, and each row computed alone."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Model

from trl_padfix.core.model.patching import patches_on
from trl_padfix.core.patches.decoder import DecoderPatch


CACHE = "cache" if "cache" in inspect.signature(Qwen2Model.forward).parameters else "past_key_values"
"""Name of the argument for a cache; the second until transformers 5.23."""


def has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a decoder or a layer was called to continue cached tokens, as in generation."""
    return kwargs.get(CACHE) is not None


class EnteredTokens(list[int]):
    """Tokens of each forward of a layer; as a context manager it stops counting at the end of the block."""

    def __init__(self, layer: nn.Module) -> None:
        self.hook = layer.register_forward_pre_hook(lambda _, args: self.append(args[0].shape[:-1].numel()))

    def __enter__(self) -> EnteredTokens:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()


def entered_tokens(model: nn.Module) -> EnteredTokens:
    """
    Count the tokens that enter the first layer of a decoder, forward by forward: they show which mode ran.

    For a model with images, pass its decoder or its tower.
    """
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    entered = EnteredTokens(layers[0])
    accept_hooks(model)
    return entered


def accept_hooks(model: nn.Module) -> None:
    """Let calls stay packed although hooks that only count were registered after the attachment."""
    for module in model.modules():
        for patch in patches_on(module):
            if isinstance(patch, DecoderPatch):
                patch.attachment.accept_hooks()


def each_row_alone(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Results of `compute(ids, mask)` for the real tokens of each row in a batch of its own, concatenated."""
    rows = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    return torch.cat([compute(row, torch.ones_like(row)) for row in rows])


class LiveBytes:
    """Bytes of the storages that autograd keeps for backward, now and at most; each storage counts once."""

    def __init__(self, permanent: list[torch.Tensor]):
        self.excluded = {tensor.untyped_storage().data_ptr() for tensor in permanent}
        self.users: Counter[int] = Counter()
        self.now = self.most = 0

    def __enter__(self) -> LiveBytes:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self.excluded:
            self.now += size if not self.users[address] else 0
            self.most = max(self.most, self.now)
            self.users[address] += 1
            weakref.finalize(kept, self._free, address, size)  # autograd drops it when its node has run backward
        return kept

    def _free(self, address: int, size: int) -> None:
        self.users[address] -= 1
        self.now -= size if not self.users[address] else 0


class _Kept:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
