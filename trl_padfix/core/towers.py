"""
The module of a multimodal model that makes inputs of its decoder from images and other things beside text.

The text decoder alone is packed. What lies around it computes what it always did, but nothing twice, and leaves word
of what the decoder itself is not told: the ids that its embeddings were made from, and the two-dimensional mask.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .call.arguments import bind
from .call.batch_metadata import VerifiedMetadata, facts_of
from .call.calls import ModelCall, model_call
from .call.images import tensors_in
from .call.layers import takes_any_argument
from .context import context, set_until_reset, within
from .handle import PaddingRemoval
from .model.patching import ForwardPatch


__all__ = ["MultimodalPatch", "TowerPatch", "towers"]


def towers(multimodal: PreTrainedModel, decoder: nn.Module) -> list[nn.Module]:
    """The parts of a multimodal module that turn what is not text into features: vision towers, projectors."""
    parts = [m for m in multimodal.children() if not isinstance(m, nn.Embedding) and any(True for _ in m.parameters())]
    head = multimodal.get_output_embeddings()
    return [m for m in parts if m is not head and all(part is not decoder for part in m.modules())]


class MultimodalPatch(ForwardPatch):
    """Keeps the arguments of a call for the decoder within it, and lets it make no cache unless one is asked for."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = bind(self.wrapped, args, kwargs)
        cached = call.get("use_cache") is not None or call.get("past_key_values") is not None
        takes_it = "use_cache" in inspect.signature(self.wrapped).parameters or takes_any_argument(self.module)
        if takes_it and not cached:
            call["use_cache"] = False
        outer = model_call(self.attachment.decoder)
        around = outer or ModelCall(self.attachment.decoder)
        # The states that the head asks for are selected here: what lies between may want all of them.
        with within(model=replace(around, arguments=call, scored=None)):
            output = self.wrapped(**call)
            inner = model_call(self.attachment.decoder)
        if around.scored is not None:
            states = output.last_hidden_state.flatten(0, 1)
            output["last_hidden_state"] = states.index_select(0, around.scored).unsqueeze(0)
        elif outer is not None and inner is not None:
            set_until_reset(model=replace(outer, layout=inner.layout))
        return output


class TowerPatch(ForwardPatch):
    """
    Runs a tower once for a batch of images that repeats itself, as chosen and rejected rows do, for both halves.

    Whether the halves of its output belong to those of its input is tried out once: a tower that answers otherwise (in
    one row for all images, say) is left alone, and so is one whose weights are sharded (FSDP, ZeRO-3): its processes
    have to run it equally often. Whether its input repeats itself is looked at on the device, unless the batch came
    with word that images of this shape do, also for what another tower made of them.
    """

    def __init__(self, module: nn.Module, attachment: PaddingRemoval):
        super().__init__(module, attachment)
        self.separates_halves: bool | None = None
        self.word = VerifiedMetadata()

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = model_call(self.attachment.decoder)
        doubled_features, given = (call.doubled_features, call.arguments) if call is not None else ([], {})
        known = facts_of(given.get("input_ids"), given.get("attention_mask")) if given else None
        # Where the batch came with word that its images do not repeat, nobody looks on the device.
        may = self.separates_halves is not False and (known is None or known.halves_equal is not False)
        may = may and not _draws(self.module) and not _is_sharded(self.module)
        if not may or not self._repeats([*args, *kwargs.values()], doubled_features):
            return self.wrapped(*args, **kwargs)
        half = [_first_half(v) for v in args], {k: _first_half(v) for k, v in kwargs.items()}
        output = _twice(self.wrapped(*half[0], **half[1]))
        doubled_features += map(weakref.ref, tensors_in(output))
        if self.separates_halves is None:
            with torch.no_grad():
                self.separates_halves = _agree(output, self.wrapped(*args, **kwargs))
        return output if self.separates_halves else self.wrapped(*args, **kwargs)

    def _repeats(self, given: list[Any], doubled_features: list[weakref.ref[torch.Tensor]]) -> bool:
        """Whether every tensor among the arguments is the same twice, one half after the other."""
        if any(isinstance(v, list | tuple | dict) and tensors_in(v) for v in given):
            return False
        tensors = [v for v in given if isinstance(v, torch.Tensor) and v.dim() > 0]
        if not tensors or any(v.shape[0] == 0 or v.shape[0] % 2 for v in tensors):
            return False
        step = context().step
        if step is not None and all(step.images_are_doubled(v, doubled_features) for v in tensors):
            differ = torch.stack([(first != second).any() for first, second in (v.detach().chunk(2) for v in tensors)])
            if self.word.verify("The images of the batch are those that its collator saw", differ.any()):
                return True
        return all(torch.equal(*v.chunk(2)) for v in tensors)


def _first_half(value: Any) -> Any:
    return value.chunk(2)[0] if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def _twice(output: Any) -> Any:
    return tree_map(lambda x: torch.cat([x, x]) if isinstance(x, torch.Tensor) else x, output)


def _agree(a: Any, b: Any) -> bool:
    """Whether two outputs have the same shapes, and the same values to rounding."""
    pairs = list(zip(tensors_in(a), tensors_in(b), strict=False))
    tolerance = 1e-3 if all(x.dtype == torch.float32 for x, _ in pairs) else 0.05
    return len(pairs) > 0 and all(
        x.shape == y.shape and bool(((x - y).abs().max() <= tolerance * y.abs().max()).item()) for x, y in pairs
    )


def _is_sharded(module: nn.Module) -> bool:
    return any(p.numel() == 0 or hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in module.parameters())


def _draws(module: nn.Module) -> bool:
    """Whether a second run of `module` would differ from the first: dropout, or statistics of the batch."""
    for part in module.modules():
        if not part.training:
            continue
        rates = [v for k, v in vars(part).items() if "drop" in k and isinstance(v, float)]
        if isinstance(part, nn.modules.dropout._DropoutNd):
            rates.append(part.p)
        if any(rates) or isinstance(part, nn.modules.batchnorm._BatchNorm):
            return True
    return False
