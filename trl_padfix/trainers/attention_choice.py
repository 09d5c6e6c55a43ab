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

from ..core.attention.backends import Implementation, Machine, Workload, best_backend, require_usable, spread
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
        self._chosen: dict[str, Implementation] = {}
        """By how the names of a model's fields begin: `""`, `"ref_"`, `"teacher_"`."""
        self._loads_policy = False
        self._undo = contextlib.ExitStack()

    def check(self, config: Any, given: dict[str, Any]) -> None:
        policy, reference, teacher = (given.get(name) for name in ("model", "ref_model", "teacher_model"))
        self._loads_policy = isinstance(policy, str)
        models = {"": policy, "ref_": policy if reference is None else reference, "teacher_": teacher}
        for of, model in models.items():
            if (asked := _requested_implementation(config, self.settings, of)) is None:
                continue
            if model is not None:
                workload = _workload(model, config, self.settings.padding_free, of)
                self._chosen[of] = _resolved(asked, workload, f"{of}attn_implementation")
            elif of == "teacher_":
                raise ValueError(
                    f"`teacher_attn_implementation={asked!r}` is for a teacher model, and none is given. Leave it "
                    "out, or pass `teacher_model`."
                )
        if reference is None and "" in self._chosen:
            self._chosen.setdefault("ref_", self._chosen[""])

    def constructing(self, config: Any) -> contextlib.AbstractContextManager[Any]:
        if not self._loads_policy or "" not in self._chosen:
            return contextlib.nullcontext()
        given = (config.model_init_kwargs or {}) | {"attn_implementation": self._chosen[""]}
        return temporarily_set(config, "model_init_kwargs", given)

    def attach(self) -> None:
        """Switch models that TRL did not load with the wanted attention, before anything is attached to them."""
        models = {"": "model", "ref_": "ref_model", "teacher_": "teacher_model"}
        found = {of: getattr(self.trainer, name, None) for of, name in models.items()}
        for of, implementation in self._chosen.items():
            if found[of] is not None:
                self._undo.callback(set_attention(found[of], implementation))
        if found["ref_"] is None and "ref_" in self._chosen:
            references, policys = self._chosen["ref_"], self._chosen.get("")
            policys = policys or str(find_pretrained(self.trainer.model).config._attn_implementation)
            if references != policys:
                raise ValueError(
                    f"`ref_attn_implementation={references!r}` is for a reference model with weights of its own, and "
                    "here there is none: it is the policy with its adapter switched off, or needed in no step "
                    "(`precompute_ref_log_probs=True`, `beta=0`). Leave it out, or set it to the policy's "
                    f"{policys!r}."
                )

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


def _keywords(config: Any, of: str) -> dict[str, Any]:
    """With which keyword arguments TRL loads a model; the reference is loaded as the policy is."""
    return getattr(config, f"{'' if of == 'ref_' else of}model_init_kwargs", None) or {}


def _requested_implementation(config: Any, settings: Settings, of: str) -> Implementation | None:
    """The implementation that a configuration asks for, in our field or in TRL's, which must not disagree."""
    ours = parse_implementation(getattr(settings, f"{of}attn_implementation"))
    theirs = None if of == "ref_" else parse_implementation(_keywords(config, of).get("attn_implementation"))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"`{of}attn_implementation={ours!r}` and `{of}model_init_kwargs={{'attn_implementation': {theirs!r}}}` "
            "disagree. Set one of them."
        )
    return ours if ours is not None else theirs


def _workload(model: str | nn.Module, config: Any, packs: bool = False, of: str = "") -> Workload:
    """Device, precision and model configuration of a run, known before weights are loaded."""
    if isinstance(model, str):
        given = _keywords(config, of)
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
