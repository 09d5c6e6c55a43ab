"""
Which attention the models of a trainer run with.

`attn_implementation` of a configuration is for the policy, `ref_attn_implementation` for the reference,
`teacher_attn_implementation` for the teacher. What cannot run is refused before weights are loaded. TRL loads the
policy with the choice; a model that is loaded already, the reference, which TRL loads as it loads the policy, and the
teacher are switched by transformers' `set_attn_implementation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..core.attention.backends import Implementation, Machine, Workload, assess, best_backend, require_usable, spread
from ..core.model.find import find_pretrained
from .field_types import parse_implementation, temporarily_set
from .parts import Part, Settings


__all__ = ["AttentionChoice", "set_attention"]

logger = get_logger(__name__)

_FOR_CONFIG = ("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
"""Keys of `model_init_kwargs` that `AutoConfig.from_pretrained` needs to find the configuration."""


class AttentionChoice(Part):
    """The attention of policy, reference and teacher."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._policys: Implementation | None = None
        self._references: Implementation | None = None
        self._teachers: Implementation | None = None
        self._loads_policy = False
        self._undo = contextlib.ExitStack()

    def check(self, config: Any, given: dict[str, Any]) -> None:
        self._check_teacher(config, given.get("teacher_model"))
        model, ref_model = given.get("model"), given.get("ref_model")
        asked = _requested_implementation(config, self.settings)
        ref_asked = parse_implementation(self.settings.ref_attn_implementation)
        if model is None or (asked is None and ref_asked is None):
            return
        workload = _workload(model, config, self.settings.padding_free)
        self._loads_policy = isinstance(model, str)
        if asked is not None:
            self._policys = _resolved(asked, workload, "attn_implementation")
        if ref_asked is not None:
            of_reference = workload if ref_model is None else _workload(ref_model, config, self.settings.padding_free)
            self._references = _resolved(ref_asked, of_reference, "ref_attn_implementation")
            adapted = getattr(model, "peft_config", None) or given.get("peft_config") is not None
            if ref_model is None and adapted:
                policys = self._policys or _default(model, workload)
                self._refuse_other_reference(policys, "it is the policy with its adapter switched off")
        elif ref_model is None:
            self._references = self._policys

    def _check_teacher(self, config: Any, teacher: Any) -> None:
        asked = _requested_implementation(config, self.settings, "teacher_")
        if asked is None:
            return
        if teacher is None:
            raise ValueError(
                f"`teacher_attn_implementation={asked!r}` is for a teacher model, and none is given. Leave it out, or "
                "pass `teacher_model`."
            )
        workload = _workload(teacher, config, self.settings.padding_free, "teacher_")
        self._teachers = _resolved(asked, workload, "teacher_attn_implementation")

    def constructing(self, config: Any) -> contextlib.AbstractContextManager[Any]:
        if not self._loads_policy or self._policys is None:
            return contextlib.nullcontext()
        given = (config.model_init_kwargs or {}) | {"attn_implementation": self._policys}
        return temporarily_set(config, "model_init_kwargs", given)

    def _refuse_other_reference(self, policys: Implementation, why: str) -> None:
        if self._references != policys:
            raise ValueError(
                f"`ref_attn_implementation={self._references!r}` is for a reference model with weights of its own, "
                f"and here there is none: {why}. Leave `ref_attn_implementation` out, or set it to the policy's "
                f"{policys!r}."
            )

    def attach(self) -> None:
        """Switch models that TRL did not load with the wanted attention, before anything is attached to them."""
        model, reference = self.trainer.model, getattr(self.trainer, "ref_model", None)
        teacher = getattr(self.trainer, "teacher_model", None)
        choices = ((model, self._policys), (reference, self._references), (teacher, self._teachers))
        for one, implementation in choices:
            if one is not None and implementation is not None:
                self._undo.callback(set_attention(one, implementation))
        if reference is None and self._references is not None:
            policys = self._policys or str(find_pretrained(model).config._attn_implementation)
            self._refuse_other_reference(policys, "`precompute_ref_log_probs=True`, `beta=0` and adapters need none")

    def abandon(self) -> None:
        self._undo.close()


def set_attention(model: nn.Module, implementation: Implementation) -> Callable[[], None]:
    """Let a loaded model run with another attention implementation, if it can; what is returned undoes it."""
    pretrained = find_pretrained(model)
    configs = {id(m.config): m.config for m in pretrained.modules() if isinstance(m, PreTrainedModel)}.values()
    before = [config._attn_implementation_internal for config in configs]

    def undo() -> None:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name

    if _runs_with(pretrained.config, implementation):
        return undo
    current = str(pretrained.config._attn_implementation)
    pretrained.set_attn_implementation(implementation)
    # transformers only warns where it cannot; a Hub kernel may stand for the name already.
    if "/" not in current and before == [config._attn_implementation_internal for config in configs]:
        raise ValueError(
            f"{type(pretrained).__name__} cannot be switched to `attn_implementation={implementation!r}` once it is "
            f"loaded; it runs with {current!r}. Load it with that implementation: pass its id, or "
            "`from_pretrained(..., attn_implementation=...)`."
        )
    return undo


def _runs_with(config: PretrainedConfig, implementation: Implementation) -> bool:
    if isinstance(implementation, str):
        implementation = dict.fromkeys(["", *config.sub_configs], implementation)
    parts = {part: getattr(config, part) if part else config for part in implementation}
    return all(part is None or part._attn_implementation == implementation[name] for name, part in parts.items())


def _requested_implementation(config: Any, settings: Settings, of: str = "") -> Implementation | None:
    """
    The implementation that a configuration asks for, in our field or in TRL's, which must not disagree; `of` is how
    the names of both begin.
    """
    ours = parse_implementation(getattr(settings, f"{of}attn_implementation"))
    keywords = getattr(config, f"{of}model_init_kwargs", None) or {}
    theirs = parse_implementation(keywords.get("attn_implementation"))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"`{of}attn_implementation={ours!r}` and `{of}model_init_kwargs={{'attn_implementation': {theirs!r}}}` "
            "disagree. Set one of them."
        )
    return ours if ours is not None else theirs


def _workload(model: str | nn.Module, config: Any, packs: bool = False, of: str = "") -> Workload:
    """
    Device, precision and model configuration of a run, known before weights are loaded; `of` as in
    [`_requested_implementation`].
    """
    if isinstance(model, str):
        given = getattr(config, f"{of}model_init_kwargs") or {}
        where = {name: given[name] for name in _FOR_CONFIG if name in given}
        where.setdefault("trust_remote_code", getattr(config, "trust_remote_code", False))
        model_config = given.get("config") or AutoConfig.from_pretrained(model, **where)
        dtype = given.get("dtype", given.get("torch_dtype", "float32"))  # TRL's default
        dtype = (model_config.dtype or torch.float32) if dtype in (None, "auto") else dtype
    else:
        pretrained = find_pretrained(model)
        model_config, dtype = pretrained.config, pretrained.dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    autocast = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else dtype
    return Workload(Machine.of(config.device), autocast, model_config, packs)


def _resolved(asked: Implementation, workload: Workload, field: str) -> Implementation:
    """`asked` with every `"auto"` replaced; all of it can run."""
    names = dict(spread(asked, workload.config, field))
    if "auto" in names.values():
        backend = best_backend(workload)
        logger.info(f"`{field}='auto'` is {backend.name!r}: {backend.note}.")
        names = {part: backend.name if name == "auto" else name for part, name in names.items()}
    found = names if isinstance(asked, dict) else names[""]
    require_usable(found, workload, field)
    return found


def _default(model: str | nn.Module, workload: Workload) -> str:
    """The implementation that a model runs with if the configuration does not name one."""
    if not isinstance(model, str):
        return str(find_pretrained(model).config._attn_implementation)
    return "sdpa" if assess("sdpa", workload).usable else "eager"
