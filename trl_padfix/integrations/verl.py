"""
The plug-in of verl: `external_lib` names this module, and the models of its FSDP engine compute no padding.

    actor_rollout_ref.model.external_lib=trl_padfix.integrations.verl actor_rollout_ref.model.use_remove_padding=false
    critic.model.external_lib=trl_padfix.integrations.verl critic.model.use_remove_padding=false

It serves actor and reference, critic, and the model of verl's SFT trainer, each where its own `model` names it; verl
leaves a reward model to an inference server. The workers share prefixes with `TRL_PADFIX_PREFIX_SHARING=1` (or `auto`)
in their environment. There is no entry point, which verl would load for everybody who has both packages.
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
    What the environment says of `prefix_sharing`.

    Raises:
        ValueError: For another value than 0, 1, false, true and auto.
    """
    said = os.environ.get(VARIABLE, "0").strip().lower()
    values: dict[str, PrefixSharing] = {"": False, "0": False, "false": False, "1": True, "true": True, "auto": "auto"}
    if said not in values:
        raise ValueError(f"`{VARIABLE}` is 0, 1 or auto, got {said!r}.")
    return values[said]


def _named_by(model_config: Any) -> bool:
    named = model_config.external_lib
    return __name__ in (named if isinstance(named, (list, tuple)) else [named])


def _with_known_engines(new: Any) -> Any:
    @wraps(new)
    def new_engine(model_type: str, backend: str, **given: Any) -> Any:
        if _named_by(given["model_config"]) and backend not in STRATEGIES:
            raise PaddingRemovalError(
                f"`external_lib={__name__}` removes padding from the models of verl's strategies {STRATEGIES}, and "
                f"'{backend}' builds its own: nothing would be removed. Use one of these, or leave it out."
            )
        return new(model_type, backend, **given)

    return new_engine


def _without_padding(build: Any) -> Any:
    @wraps(build)
    def build_fsdp_module(self: Any, module: Any) -> Any:
        if _named_by(self.model_config):
            if self.use_remove_padding:
                raise PaddingRemovalError(
                    f"`external_lib={__name__}` removes padding in the model, and `use_remove_padding=true` leaves it "
                    "none. Set `use_remove_padding=false` beside it."
                )
            refuse_whole_rows(remove_padding(module, prefix_sharing=prefix_sharing()))
        return build(self, module)

    return build_fsdp_module


prefix_sharing()
EngineRegistry.new = _with_known_engines(EngineRegistry.new)
FSDPEngine._build_fsdp_module = _without_padding(FSDPEngine._build_fsdp_module)
