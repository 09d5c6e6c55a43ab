"""Removes padding from the models of any trainer: policy, and reference or teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.call.layout_of import Lengths, PrefixSharing
from ..core.handle import PaddingRemoval
from ..core.remove import remove_padding
from .distributed import check_launch, is_sharded, models_of, refuse_whole_rows


if TYPE_CHECKING:
    from .parts import PaddingFreeTrainer


__all__ = ["attach_to_models"]


def attach_to_models(
    trainer: PaddingFreeTrainer,
    register: Callable[[PaddingRemoval], Any],
    *,
    models: list[Any] | None = None,
    prefix_sharing: PrefixSharing = False,
    pool_last_token: bool = False,
    strict: bool = False,
    packed_multiple_of: Lengths | None = None,
) -> None:
    """
    Attach to each model of a trainer, the policy first.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        register (`Callable`):
            Called with each new handle before anything else can fail, so that the caller can remove it.
        models (`list`, *optional*):
            Some of the trainer's models; by default all.
        prefix_sharing, pool_last_token, strict, packed_multiple_of:
            As in [`remove_padding`].

    Raises:
        ValueError, TypeError, PaddingRemovalError: For a launch or a model that cannot be packed.
    """
    check_launch(trainer)
    for model in models_of(trainer) if models is None else models:
        handle = remove_padding(
            model,
            prefix_sharing=prefix_sharing,
            pool_last_token=pool_last_token,
            strict=strict,
            packed_multiple_of=packed_multiple_of,
        )
        register(handle)
        if is_sharded(trainer):
            refuse_whole_rows(handle)
