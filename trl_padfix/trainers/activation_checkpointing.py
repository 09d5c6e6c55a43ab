"""`every_n_layers`, `offload` and `selective` of `activation_checkpointing_kwargs`, in every trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..core.model.find import find_pretrained
from .parts import Part
from .temporary_attributes import temporarily_set


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .parts import PaddingFreeTrainer


__all__ = ["ActivationCheckpointing", "checkpointing_kwargs"]

METHOD = "gradient_checkpointing_enable"
OF_TRANSFORMERS = ("every_n_layers", "offload")
"""Keys that are arguments of [`~PreTrainedModel.activation_checkpointing_enable`], and none of torch's checkpoint."""
SELECTIVE = "trl.models.selective_activation_checkpointing"
"""TRL's module for the key `selective`; TRL 1.16 and later have it."""


def checkpointing_kwargs(config: TrainingArguments | None) -> dict[str, Any] | None:
    """`activation_checkpointing_kwargs`, or `gradient_checkpointing_kwargs`, its older name; `None` if it is off."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if (is_on := getattr(config, name, None)) is not None:
            return dict(getattr(config, f"{name}_kwargs", None) or {}) if is_on else None
    return None


class ActivationCheckpointing(Part):
    """
    Makes checkpointing survive TRL's forwards of the reference, and extends selective checkpointing.

    docs/upstream.md describes both faults of TRL. The part does nothing without one of the keys.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._undo = contextlib.ExitStack()

    def around_init(self, config: TrainingArguments | None) -> contextlib.AbstractContextManager[Any]:
        return (
            _keeping_packed_attention()
            if (checkpointing_kwargs(config) or {}).get("selective")
            else contextlib.nullcontext()
        )

    def attach_to_models(self) -> None:
        self.restore()
        kwargs, model = checkpointing_kwargs(self.trainer.args) or {}, find_pretrained(self.trainer.model)
        is_wrapped = getattr(vars(model).get(METHOD), "_is_sac_wrapped", False)  # by TRL's `SFTTrainer`
        if kwargs.get("selective") and not is_wrapped and find_spec(SELECTIVE) is not None:
            from trl.models import enable_selective_activation_checkpointing

            with _keeping_packed_attention():
                enable_selective_activation_checkpointing(model)
            self._undo.callback(vars(model).pop, METHOD, None)
        if kwargs.keys() & set(OF_TRANSFORMERS):
            enable = partial(_enable, getattr(model, METHOD))
            self._undo.enter_context(temporarily_set(model, METHOD, enable))

    def restore(self) -> None:
        self._undo.close()


def _enable(
    enable: Callable[..., None], gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    """Call `enable` with the arguments of transformers beside the dictionary of torch's, as `Trainer` does."""
    torch_kwargs = dict(gradient_checkpointing_kwargs or {})
    kwargs |= {name: torch_kwargs.pop(name) for name in OF_TRANSFORMERS if name in torch_kwargs}
    if not torch.accelerator.is_available():  # all is on the host, and torch cannot pin its memory
        kwargs.pop("offload", None)
    enable(gradient_checkpointing_kwargs=torch_kwargs or None, **kwargs)


def _keeping_packed_attention() -> contextlib.AbstractContextManager[None]:
    """A block in which selective checkpointing also keeps the outputs of attention over packed rows."""
    if find_spec(SELECTIVE) is None:
        return contextlib.nullcontext()
    from trl.models import selective_activation_checkpointing as selective

    from ..core.attention.operators import attention_operators

    trl_operators = selective._aten_attention_ops
    return temporarily_set(selective, "_aten_attention_ops", lambda: trl_operators() | attention_operators())
