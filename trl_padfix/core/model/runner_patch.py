"""The patch of a model through which the runner of a training step computes its forwards in parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..context import context, set_until_reset
from .find import find_pretrained
from .patching import Attachment, ForwardPatch


__all__ = ["RunnerPatch", "attach_runner_patch"]


class RunnerPatch(ForwardPatch):
    """Passes forwards of padded batches to the runner of the [`Context`], if there is one."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        runner, ids = context().runner, kwargs.get("input_ids")
        is_cached = kwargs.get("past_key_values") is not None or kwargs.get("use_cache") is True
        is_batch = not args and ids is not None and ids.dim() == 2 and not is_cached
        if runner is None or not is_batch or not self.attachment.enabled:
            return self.wrapped(*args, **kwargs)
        # Modules inside of this one may have such a patch, too. `within` would also reset the layout that the decoder
        # sets for the head.
        set_until_reset(runner=None)
        try:
            return runner.run(self.module, self.wrapped, kwargs)
        finally:
            set_until_reset(runner=runner)


def attach_runner_patch(model: nn.Module) -> Attachment:
    """Put a [`RunnerPatch`] on `model`, in place of the one that an earlier trainer attached."""
    pretrained = find_pretrained(model)
    patch = vars(pretrained).get("forward")
    while isinstance(patch, ForwardPatch):
        if isinstance(patch, RunnerPatch):
            patch.attachment.remove()
        patch = patch.below
    attachment = Attachment()
    return attachment.attach([RunnerPatch(pretrained, attachment)])
