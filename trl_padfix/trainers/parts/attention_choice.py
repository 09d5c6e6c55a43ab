"""
The attention implementation of a trainer's models.

An implementation that cannot run is refused before weights are loaded. TRL loads the policy with the chosen one. A
policy that is passed in, and a reference that TRL makes, are switched after loading, by `set_attn_implementation` of
transformers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn

from ...core.attention.backends import Implementation, Machine, Workload, best_backend, require_usable, spread
from ...core.model.find import find_pretrained
from ...core.model.implementation import restore_attention, set_attention
from ..checks.model_config import load_model_config, model_init_kwargs
from ..distributed import named_models_of
from ..field_types import parse_implementation
from ..settings import Settings
from ..temporary_attributes import temporarily_set
from .part import Part


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from .part import PaddingFreeTrainer


__all__ = ["AttentionChoice"]

logger = get_logger(__name__)


class AttentionChoice(Part):
    """`attn_implementation`: chooses the attention of the policy, and of a reference that TRL makes."""

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._chosen: Implementation | None = None
        self._loads_policy = self._is_reference_given = False
        self._undo = contextlib.ExitStack()

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        model = init_kwargs.get("model")
        self._loads_policy, self._is_reference_given = isinstance(model, str), init_kwargs.get("ref_model") is not None
        if model is not None:
            self._choose(model, config)

    def _choose(self, model: str | nn.Module, config: TrainingArguments) -> None:
        if (requested := _requested_implementation(config, self.settings)) is not None:
            self._chosen = _resolve(requested, _workload(model, config, self.settings.padding_free))

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[Any]:
        if not self._loads_policy or self._chosen is None:
            return contextlib.nullcontext()
        kwargs = (config.model_init_kwargs or {}) | {"attn_implementation": self._chosen}
        return temporarily_set(config, model_init_kwargs=kwargs)

    def attach_to_models(self) -> None:
        """Switch models that TRL did not load with the chosen attention, before anything is attached to them."""
        models = named_models_of(self.trainer)
        if self._chosen is None:  # `model_init` makes the model, so there was none to resolve it for
            self._choose(models["model"], self.trainer.args)
        if self._chosen is None:
            return
        for role in ("model",) if self._is_reference_given else ("model", "reference model"):
            if role in models:
                self._undo.callback(restore_attention, set_attention(models[role], self._chosen))

    def on_init_error(self) -> None:
        self._undo.close()


def _requested_implementation(config: TrainingArguments, settings: Settings) -> Implementation | None:
    """The implementation in our field of a configuration or in TRL's; if both are set, they must be equal."""
    ours = parse_implementation(settings.attn_implementation)
    theirs = parse_implementation(model_init_kwargs(config).get("attn_implementation"))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"`attn_implementation={ours!r}` and `model_init_kwargs={{'attn_implementation': {theirs!r}}}` disagree. "
            "Set one of them."
        )
    return ours if ours is not None else theirs


def _workload(model: str | nn.Module, config: TrainingArguments, packs: bool = False) -> Workload:
    """Device, precision and model configuration of a run, without loading weights."""
    if isinstance(model, str):
        kwargs, model_config = model_init_kwargs(config), load_model_config(model, config)
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype", "float32"))  # TRL's default
        dtype = (model_config.dtype or torch.float32) if dtype in (None, "auto") else dtype
    else:
        pretrained = find_pretrained(model)
        model_config, dtype = pretrained.config, pretrained.dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    autocast = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else dtype
    return Workload(Machine.of(config.device), autocast, model_config, packs)


def _resolve(requested: Implementation, workload: Workload) -> Implementation:
    """Replace every `"auto"` of an implementation, and check that all its names can run."""
    field = "attn_implementation"
    names = dict(spread(requested, workload.config, field))
    if "auto" in names.values():
        backend = best_backend(workload)
        logger.info(f"`{field}='auto'` is {backend.name!r}: {backend.note}.")
        names = {part: backend.name if name == "auto" else name for part, name in names.items()}
    implementation = names if isinstance(requested, dict) else names[""]
    require_usable(implementation, workload, field)
    return implementation
