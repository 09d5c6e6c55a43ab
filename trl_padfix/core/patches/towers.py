"""
The module of a multimodal model that turns images and other inputs into embeddings for its decoder.

Only the text decoder is packed. Vision tower and projector run unpacked, once for duplicated images. The multimodal
module stores `input_ids` and the mask `(B, L)` for the decoder, which itself receives embeddings and prepared masks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from ..anatomy import has_shards
from ..call.arguments import padded_output
from ..call.calls import model_call
from ..call.layout_of import tensors_in
from ..context import within
from ..handle import PaddingRemoval
from ..model.inspection import takes, takes_any_argument
from ..model.older import has_cache
from ..model.patching import BatchPatch, ForwardPatch


__all__ = ["MultimodalPatch", "TowerPatch", "towers"]


def towers(multimodal: PreTrainedModel, decoder: nn.Module) -> list[nn.Module]:
    """The modules of a multimodal module that compute features of images or sound: vision towers, projectors."""
    children = [m for m in multimodal.children() if not isinstance(m, nn.Embedding) and [*m.parameters()]]
    head = multimodal.get_output_embeddings()
    return [m for m in children if m is not head and all(part is not decoder for part in m.modules())]


class MultimodalPatch(BatchPatch):
    """Stores the arguments of a call for the decoder within it; switches the cache off unless the call has one."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = self.bind(args, kwargs)
        takes_use_cache = takes(self.module, "use_cache") or takes_any_argument(self.module)
        if takes_use_cache and call.get("use_cache") is None and not has_cache(call):
            call["use_cache"] = False
        outer = model_call(self.attachment.decoder)
        # The states for the head are selected here, not in the decoder: modules in between may need all of them.
        with within(model=replace(outer, outer_arguments=call, scored_index=None)):
            return padded_output(self.wrapped(**call), outer)


class TowerPatch(ForwardPatch):
    """
    Runs a tower on one half of a batch of images if both halves are equal, as for chosen and rejected rows.

    The first such batch tests whether each half of the output depends on its half of the input only. A tower that
    fails the test always runs on the full batch, such as one that returns a single row for all images. A tower with
    sharded weights (FSDP, ZeRO-3) does so as well: all processes must run it equally often.

    The device compares the halves.
    """

    attachment: PaddingRemoval

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.separates_halves: bool | None = None  # `None` until the first batch with equal halves

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        may_halve = self.separates_halves is not False and not _is_random(self.module) and not has_shards(self.module)
        if not may_halve or not self._halves_are_equal([*args, *kwargs.values()]):
            return self.wrapped(*args, **kwargs)
        half_kwargs = {k: _first_half(v) for k, v in kwargs.items()}
        half = self.wrapped(*map(_first_half, args), **half_kwargs)
        output = tree_map_only(torch.Tensor, lambda x: torch.cat([x, x]), half)
        if self.separates_halves is None:
            with torch.no_grad():
                self.separates_halves = _are_close(output, self.wrapped(*args, **kwargs))
        return output if self.separates_halves else self.wrapped(*args, **kwargs)

    def _halves_are_equal(self, arguments: list[Any]) -> bool:
        """Whether in every tensor among the arguments the second half of the rows equals the first."""
        if any(isinstance(v, list | tuple | dict) and tensors_in(v) for v in arguments):
            return False  # a list with one tensor per image has no halves of rows
        tensors = [v for v in arguments if isinstance(v, torch.Tensor) and v.dim() > 0]
        if not tensors or any(v.shape[0] == 0 or v.shape[0] % 2 for v in tensors):
            return False
        halves = [v.detach().chunk(2) for v in tensors]
        return bool(torch.stack([(first == second).all() for first, second in halves]).all())


def _first_half(value: Any) -> Any:
    return value.chunk(2)[0] if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def _are_close(a: Any, b: Any) -> bool:
    """Whether two outputs have the same shapes, and the same values up to rounding."""
    # Not strict: a tower that returns one tensor per image returns half as many of them for `a`, each twice as long.
    # The shapes of the first pair distinguish these.
    pairs = list(zip(tensors_in(a), tensors_in(b), strict=False))
    # Relative to the largest value. Kernels differ with the batch size: in half precision, over the depth of a tower,
    # by some percent; outputs of other images differ by their own size.
    tolerance = 1e-3 if all(x.dtype == torch.float32 for x, _ in pairs) else 0.05
    return len(pairs) > 0 and all(
        x.shape == y.shape and bool(((x - y).abs().max() <= tolerance * y.abs().max()).item()) for x, y in pairs
    )


def _is_random(module: nn.Module) -> bool:
    """Whether images get different features in both halves: by dropout, or by statistics of the batch."""
    for inner in (part for part in module.modules() if part.training):
        # Attention modules call functional dropout with a float attribute, such as `attention_dropout`.
        rates = [v for k, v in vars(inner).items() if "drop" in k and isinstance(v, float)]
        if isinstance(inner, nn.modules.dropout._DropoutNd):
            rates.append(inner.p)
        if any(rates) or isinstance(inner, nn.modules.batchnorm._BatchNorm):
            return True
    return False
