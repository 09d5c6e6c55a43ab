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
from typing import Any

from ..core.errors import PaddingRemovalError
from ..core.handle import PrefixSharing
from ..core.remove import remove_padding
from ..core.switch import is_off
from ..trainers.messages import say
from ..versions import require_stack
from .callback import in_words


require_stack("verl")

from verl.utils.device import get_device_name, get_vendor  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402


__all__ = ["VARIABLE", "prefix_sharing"]

STRATEGIES = ("fsdp", "fsdp2")
VARIABLE = "TRL_PADFIX_PREFIX_SHARING"
# Settings that errors name, each with the text that replaces it here.
WORDS = {"`padding_free=False`": f"no `external_lib={__name__}`", "`prefix_sharing=False`": f"`{VARIABLE}=0`"}


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


def _engine(engine_class: type[Any], strategy: str) -> type[Any]:
    """A subclass of an engine of verl that removes padding from the models whose config names this module."""

    class PaddingRemovalEngine(engine_class):
        def __init__(self, model_config: Any, *args: Any, **kwargs: Any):
            if _is_named_by(model_config) and strategy not in STRATEGIES:
                raise PaddingRemovalError(
                    f"`external_lib={__name__}` removes padding from the models of verl's strategies {STRATEGIES}, "
                    f"and '{strategy}' builds its own: nothing would be removed. Use one of these, or leave it out."
                )
            super().__init__(model_config, *args, **kwargs)

        def _build_fsdp_module(self, module: Any) -> Any:
            """Attach before FSDP wraps the model."""
            if not _is_named_by(self.model_config):
                return super()._build_fsdp_module(module)
            if self.use_remove_padding:
                raise PaddingRemovalError(
                    f"`external_lib={__name__}` removes padding in the model, and with `use_remove_padding=true` verl "
                    "removes it before. Set `use_remove_padding=false`, too."
                )
            with in_words(WORDS):
                handle = remove_padding(module, prefix_sharing=prefix_sharing())
            if self.rank == 0 and not is_off():
                say(
                    f"trl_padfix removes padding from {type(handle.anatomy.pretrained).__name__} in verl's "
                    f"{engine_class.__name__} (prefix sharing: {handle.prefix_sharing})."
                )
            return super()._build_fsdp_module(module)

    return PaddingRemovalEngine


def _register() -> None:
    """
    Register a subclass of each engine of verl, for the vendor of this device.

    verl's own engines are registered for all vendors, and verl prefers an engine of the device's vendor.
    """
    device = os.environ.get("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or get_vendor()
    for model_type, strategies in EngineRegistry._engines.items():
        for strategy in list(strategies):
            try:
                engine_class = EngineRegistry.get_engine_cls(model_type, strategy)
            except ValueError:  # none for this device
                continue
            EngineRegistry.register(model_type, strategy, device, vendor)(_engine(engine_class, strategy))


prefix_sharing()  # raises its error at import, not in the first worker that builds a model
_register()
