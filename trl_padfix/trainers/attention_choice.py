"""
Which attention the models of a trainer run with.

`attn_implementation` of a configuration is for the policy, `ref_attn_implementation` for the reference. What cannot
run is refused before weights are loaded. TRL loads the policy with the choice; a model that is loaded already, and the
reference, which TRL loads as it loads the policy, are switched by transformers' `set_attn_implementation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..core.attention.backends import Implementation, Machine, Workload, assess, best_backend, require_usable, spread
from ..core.model.find import find_pretrained
from .field_types import parse_implementation


__all__ = ["AttentionChoiceMixin", "set_attention"]

logger = get_logger(__name__)

_FOR_CONFIG = ("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
"""Keys of `model_init_kwargs` that `AutoConfig.from_pretrained` needs to find the configuration."""


class AttentionChoiceMixin:
    """The attention of policy and reference for a TRL trainer; stands in front of [`PaddingRemovalMixin`]."""

    _attention: Implementation | None = None
    _ref_attention: Implementation | None = None
    _attention_is_set = False

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with contextlib.ExitStack() as self._constructing:
                super().__init__(*args, **kwargs)
            del self._constructing

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        super()._check_before(config, given)
        model, ref_model = given.get("model"), given.get("ref_model")
        asked = _requested_implementation(config)
        ref_asked = parse_implementation(getattr(config, "ref_attn_implementation", None))
        if model is None or (asked is None and ref_asked is None):
            return
        workload = _workload(model, config)
        if asked is not None:
            self._attention = _resolved(asked, workload, "attn_implementation")
        if ref_asked is not None:
            of_reference = workload if ref_model is None else _workload(ref_model, config)
            self._ref_attention = _resolved(ref_asked, of_reference, "ref_attn_implementation")
            adapted = getattr(model, "peft_config", None) or given.get("peft_config") is not None
            if ref_model is None and adapted:
                policys = self._attention or _default(model, workload)
                self._refuse_other_reference(policys, "it is the policy with its adapter switched off")
        elif ref_model is None:
            self._ref_attention = self._attention
        if isinstance(model, str) and self._attention is not None:
            self._constructing.callback(setattr, config, "model_init_kwargs", config.model_init_kwargs)
            config.model_init_kwargs = (config.model_init_kwargs or {}) | {"attn_implementation": self._attention}

    def _refuse_other_reference(self, policys: Implementation, why: str) -> None:
        if self._ref_attention != policys:
            raise ValueError(
                f"`ref_attn_implementation={self._ref_attention!r}` is for a reference model with weights of its own, "
                f"and here there is none: {why}. Leave `ref_attn_implementation` out, or set it to the policy's "
                f"{policys!r}."
            )

    def _set_up_padding(self) -> None:
        if not self._attention_is_set:
            self._attention_is_set = True
            self._set_attention()
        super()._set_up_padding()

    def _set_attention(self) -> None:
        """Switch models that TRL did not load with the wanted attention, before anything is attached to them."""
        reference = getattr(self, "ref_model", None)
        for model, implementation in ((self.model, self._attention), (reference, self._ref_attention)):
            if model is not None and implementation is not None:
                undo = set_attention(model, implementation)
                self._constructing.push(lambda kind, *_, undo=undo: undo() if kind is not None else None)
        if reference is None and self._ref_attention is not None:
            policys = self._attention or str(find_pretrained(self.model).config._attn_implementation)
            self._refuse_other_reference(policys, "`precompute_ref_log_probs=True`, `beta=0` and adapters need none")


def set_attention(model: nn.Module, implementation: Implementation) -> Callable[[], None]:
    """
    Let a loaded model run with another attention implementation.

    Args:
        model (`torch.nn.Module`):
            A [`~transformers.PreTrainedModel`] or a wrapper of one.
        implementation (`str` or `dict[str, str]`):
            A name, or a name for each part.

    Returns:
        `Callable`: undoes it.

    Raises:
        ValueError: If the model cannot be switched once it is loaded.

    Example:

    ```python
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix.trainers.attention_choice import set_attention

    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                                      num_attention_heads=2, num_key_value_heads=1))
    >>> undo = set_attention(model, "eager")
    >>> model.config._attn_implementation
    'eager'

    ```
    """
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


def _requested_implementation(config: Any) -> Implementation | None:
    """
    The implementation that a configuration asks for.

    Raises:
        ValueError: If `attn_implementation` and `model_init_kwargs` ask for different ones.
    """
    ours = parse_implementation(getattr(config, "attn_implementation", None))
    theirs = parse_implementation((getattr(config, "model_init_kwargs", None) or {}).get("attn_implementation"))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"`attn_implementation={ours!r}` and `model_init_kwargs={{'attn_implementation': {theirs!r}}}` disagree. "
            "Set one of them."
        )
    return ours if ours is not None else theirs


def _workload(model: str | nn.Module, config: Any) -> Workload:
    """Device, precision and model configuration of a run, known before weights are loaded."""
    if isinstance(model, str):
        given = config.model_init_kwargs or {}
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
    return Workload(Machine.of(config.device), autocast, model_config, bool(getattr(config, "padding_free", False)))


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
