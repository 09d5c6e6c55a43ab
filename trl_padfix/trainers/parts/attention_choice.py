"""
The attention implementations of the models of a trainer.

In a configuration `attn_implementation` is for the policy, `ref_attn_implementation` for the reference and
`teacher_attn_implementation` for the teacher. TRL loads the policy with the chosen one. All other models are switched
after loading, by `set_attn_implementation` of transformers: models passed in, the teacher, and the reference, which
TRL loads like the policy. transformers refuses implementations that cannot run.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import AutoConfig, PretrainedConfig, TrainingArguments

from ...core.anatomy import find_pretrained, restore_attention, set_attention
from ...core.attention.availability import Machine, fastest_attention
from ...core.context import temporarily_set
from ..field_types import Implementation, parse_implementation
from ..settings import Settings
from .part import PaddingFreeTrainer, Part


__all__ = ["AttentionChoice", "load_model_config", "model_init_kwargs"]

logger = get_logger(__name__)


class AttentionChoice(Part):
    """`attn_implementation` and its siblings: chooses the attention of policy, reference and teacher."""

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._chosen: dict[str, Implementation] = {}
        """Implementations by the prefix of a model's fields: `""`, `"ref_"`, `"teacher_"`."""
        self._loads_policy = False
        self._undo = contextlib.ExitStack()

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        policy, reference, teacher = (init_kwargs.get(name) for name in ("model", "ref_model", "teacher_model"))
        self._loads_policy = isinstance(policy, str)
        models = {"": policy, "ref_": policy if reference is None else reference, "teacher_": teacher}
        for prefix, model in models.items():
            requested = _requested_implementation(config, self.settings, prefix)
            if requested is not None and model is not None:
                self._chosen[prefix] = _resolve(requested, model, config, prefix)
            elif requested is not None and prefix == "teacher_":
                raise ValueError("`teacher_attn_implementation` needs `teacher_model`. Set both, or neither.")
        if reference is None and "" in self._chosen:
            self._chosen.setdefault("ref_", self._chosen[""])

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[Any]:
        if not self._loads_policy or "" not in self._chosen:
            return contextlib.nullcontext()
        kwargs = (config.model_init_kwargs or {}) | {"attn_implementation": self._chosen[""]}
        return temporarily_set(config, model_init_kwargs=kwargs)

    def attach_to_models(self) -> None:
        """Switch models that TRL did not load with the chosen attention, before anything is attached to them."""
        attributes = {"": "model", "ref_": "ref_model", "teacher_": "teacher_model"}
        models = {prefix: getattr(self.trainer, name, None) for prefix, name in attributes.items()}
        config = self.trainer.args
        requested = None if "" in self._chosen else _requested_implementation(config, self.settings, "")
        if requested is not None:  # `model_init` makes the model, so there was none to resolve it for
            self._chosen[""] = _resolve(requested, models[""], config)
        for prefix, implementation in self._chosen.items():
            if models[prefix] is not None:
                self._undo.callback(restore_attention, set_attention(models[prefix], implementation))
        if models["ref_"] is None and "ref_" in self._chosen:
            # The policy computes the reference's forwards, too, so another implementation would be silently ignored.
            of_reference, of_policy = self._chosen["ref_"], self._chosen.get("")
            of_policy = of_policy or str(find_pretrained(self.trainer.model).config._attn_implementation)
            if of_reference != of_policy:
                raise ValueError(
                    f"`ref_attn_implementation={of_reference!r}` is for a reference model with its own weights, "
                    "and this run has none: it is the policy with its adapter switched off, or needed in no step "
                    "(`precompute_ref_log_probs=True`, `beta=0`). Leave it out, or set it to the policy's "
                    f"{of_policy!r}."
                )

    def restore(self) -> None:
        self._undo.close()


def _requested_implementation(config: TrainingArguments, settings: Settings, prefix: str) -> Implementation | None:
    """The implementation in our field of a configuration, or an `"auto"` in TRL's; if both are set, they are equal."""
    ours = parse_implementation(vars(settings)[f"{prefix}attn_implementation"])
    kwargs = {} if prefix == "ref_" else model_init_kwargs(config, prefix)  # a reference has no such field
    theirs = parse_implementation(kwargs.get("attn_implementation"))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"`{prefix}attn_implementation={ours!r}` and `{prefix}model_init_kwargs={{'attn_implementation': "
            f"{theirs!r}}}` disagree. Set only one of them."
        )
    has_auto = "auto" in (theirs.values() if isinstance(theirs, dict) else [theirs])
    return theirs if ours is None and has_auto else ours


def _resolve(
    requested: Implementation, model: str | nn.Module, config: TrainingArguments, prefix: str = ""
) -> Implementation:
    """Replace every `"auto"` of an implementation, and check that the model has the parts that it names."""
    field = f"{prefix}attn_implementation"
    model_config = (
        load_model_config(model, config, prefix) if isinstance(model, str) else find_pretrained(model).config
    )
    if isinstance(requested, dict) and (unknown := requested.keys() - {"", *model_config.sub_configs}):
        parts = ", ".join(map(repr, model_config.sub_configs)) or "none, so name one implementation for all of it"
        raise ValueError(
            f"`{field}` names {sorted(unknown)}, and the parts of a {type(model_config).__name__} are: {parts}. "
            "transformers would ignore parts that it does not know."
        )
    names = requested if isinstance(requested, dict) else {"": requested}
    if "auto" in names.values():
        dtype = _attention_dtype(model, model_config, config, prefix)
        fastest, obstacles = fastest_attention(Machine.of(config.device), dtype, model_config)
        skipped = "".join(f"; not {name!r}: {reason}" for name, reason in obstacles.items())
        logger.info(f"`{field}='auto'` is {fastest!r}{skipped}.")
        names = {part: fastest if name == "auto" else name for part, name in names.items()}
    return names if isinstance(requested, dict) else names[""]


def _attention_dtype(
    model: str | nn.Module, model_config: PretrainedConfig, config: TrainingArguments, prefix: str
) -> torch.dtype:
    """The precision of attention in a run, without loading weights."""
    if config.bf16 or config.fp16:
        return torch.bfloat16 if config.bf16 else torch.float16
    if not isinstance(model, str):
        return find_pretrained(model).dtype
    kwargs = model_init_kwargs(config, prefix)
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype", "float32"))  # TRL's default
    dtype = (model_config.dtype or torch.float32) if dtype in (None, "auto") else dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


_FOR_CONFIG = ("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
"""Keys of `model_init_kwargs` that `AutoConfig.from_pretrained` needs to find a model's configuration."""


def load_model_config(model: str, config: TrainingArguments | None, prefix: str = "") -> PretrainedConfig:
    """The configuration of a model that TRL will load by its id or path."""
    kwargs = model_init_kwargs(config, prefix)
    config_kwargs = {name: kwargs[name] for name in _FOR_CONFIG if name in kwargs}
    config_kwargs.setdefault("trust_remote_code", getattr(config, "trust_remote_code", False))
    return kwargs.get("config") or AutoConfig.from_pretrained(model, **config_kwargs)


def model_init_kwargs(config: TrainingArguments, prefix: str) -> dict[str, Any]:
    """Keyword arguments with which TRL loads a model; the reference is loaded with the policy's."""
    return getattr(config, f"{'' if prefix == 'ref_' else prefix}model_init_kwargs", None) or {}
