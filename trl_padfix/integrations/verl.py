"""
Plug-in of verl: where `external_lib` names this module, models of verl's FSDP engine compute no padding.

    actor_rollout_ref.model.external_lib=trl_padfix.integrations.verl actor_rollout_ref.model.use_remove_padding=false
    critic.model.external_lib=trl_padfix.integrations.verl critic.model.use_remove_padding=false

It works for actor and reference, critic, and the model of verl's SFT trainer, each if its own `model` config names it;
verl runs a reward model in an inference server. Set `TRL_PADFIX_PREFIX_SHARING=1` (or `auto`) in the environment of
the workers to share prefixes. There is no entry point, because verl would load it for every user with both packages.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from ..core.call.layout_of import PrefixSharing
from ..core.errors import PaddingRemovalError
from ..core.remove import remove_padding
from ..trainers.distributed import refuse_whole_rows
from ..versions import require_stack


require_stack("verl")

from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine  # noqa: E402


__all__ = ["VARIABLE", "prefix_sharing"]

STRATEGIES = ("fsdp", "fsdp2")
VARIABLE = "TRL_PADFIX_PREFIX_SHARING"


def prefix_sharing() -> PrefixSharing:
    """
    The value of `prefix_sharing` in the environment.

    Raises:
        ValueError: For another value than 0, 1, false, true and auto.
    """
    text = os.environ.get(VARIABLE, "0").strip().lower()
    values: dict[str, PrefixSharing] = {"": False, "0": False, "false": False, "1": True, "true": True, "auto": "auto"}
    if text not in values:
        raise ValueError(f"`{VARIABLE}` is 0, 1 or auto, got {text!r}.")
    return values[text]


def _is_named_by(model_config: Any) -> bool:
    names = model_config.external_lib
    return __name__ in (names if isinstance(names, (list, tuple)) else [names])


def _refusing_other_strategies(new: Any) -> Any:
    """Wraps `EngineRegistry.new`: an error for engines whose models are not built by `_build_fsdp_module`."""

    @wraps(new)
    def new_engine(model_type: str, backend: str, **kwargs: Any) -> Any:
        if _is_named_by(kwargs["model_config"]) and backend not in STRATEGIES:
            raise PaddingRemovalError(
                f"`external_lib={__name__}` removes padding from the models of verl's strategies {STRATEGIES}, and "
                f"'{backend}' builds its own: nothing would be removed. Use one of these, or leave it out."
            )
        return new(model_type, backend, **kwargs)

    return new_engine


def _without_padding(build: Any) -> Any:
    """Wraps `FSDPEngine._build_fsdp_module`: attaches to the model before FSDP wraps it."""

    @wraps(build)
    def build_fsdp_module(self: Any, module: Any) -> Any:
        if _is_named_by(self.model_config):
            if self.use_remove_padding:
                raise PaddingRemovalError(
                    f"`external_lib={__name__}` removes padding in the model, and with `use_remove_padding=true` verl "
                    "removes it before. Set `use_remove_padding=false` beside it."
                )
            refuse_whole_rows(remove_padding(module, prefix_sharing=prefix_sharing()))
        return build(self, module)

    return build_fsdp_module


prefix_sharing()  # raises its error at import, not in the first worker that builds a model
EngineRegistry.new = _refusing_other_strategies(EngineRegistry.new)
FSDPEngine._build_fsdp_module = _without_padding(FSDPEngine._build_fsdp_module)
