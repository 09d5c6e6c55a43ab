"""The patch of a model through which the runner of a training step computes its forwards in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..context import context, within
from ..model.find import find_decoder, find_multimodal, find_pretrained
from ..model.inspection import bind
from ..model.older import has_cache
from ..model.patching import Attachment, ForwardPatch, in_checkpoint, patches_on


__all__ = ["RunnerPatch", "attach_runner_patch"]

IN_CHECKPOINT = "a torch checkpoint around the model recomputes it in backward. Checkpoint its layers"


class RunnerPatch(ForwardPatch):
    """Passes forwards of padded batches to the runner of the [`Context`], if there is one."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        runner = context().runner
        if runner is None or not self.attachment.enabled:
            return self.wrapped(*args, **kwargs)
        call = bind(self.wrapped, args, kwargs) if args else kwargs
        with within(runner=None):  # the modules inside of this one have such a patch, too
            if reason := IN_CHECKPOINT if in_checkpoint() else _why_no_batch(call):
                runner.leave(self.module, call, reason)
                return self.wrapped(*args, **kwargs)
            return runner.run(self.module, self.wrapped, call)


def _why_no_batch(call: dict[str, Any]) -> str | None:
    """Why a model's arguments are not a padded batch whose rows can be computed separately; `None` if they are."""
    ids, mask = call.get("input_ids"), call.get("attention_mask")
    tokens = ids if ids is not None else call.get("inputs_embeds")
    if has_cache(call):
        return "it has a cache (`use_cache=True`, or an earlier one). Leave the cache out of a loss"
    if tokens is None or tokens.dim() != (2 if tokens is ids else 3):
        return (
            "it has neither `input_ids` of shape `(B, L)` nor `inputs_embeds` of shape `(B, L, H)`. Pass one of them"
        )
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2]):
        return "its `attention_mask` is not of shape `(B, L)`. Pass such a mask"
    return None


def attach_runner_patch(model: nn.Module) -> Attachment:
    """
    Put a [`RunnerPatch`] on `model` and on its decoder, which a loss may call, in place of the patches of earlier
    trainers.
    """
    pretrained, attachment = find_pretrained(model), Attachment()
    decoder = find_decoder(pretrained)
    # Modules that compute a padded batch: the model, the module that embeds images, the decoder.
    parts: tuple[Any, ...] = (pretrained, find_multimodal(pretrained, decoder), decoder)
    modules = dict.fromkeys(part for part in parts if part is not None)
    for module in modules:
        for patch in patches_on(module):
            if isinstance(patch, RunnerPatch):
                patch.attachment.remove()
    return attachment.attach(RunnerPatch(module, attachment) for module in modules)
