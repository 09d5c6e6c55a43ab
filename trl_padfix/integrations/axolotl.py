"""
Plug-in of axolotl: padding removal by two lines of YAML.

    plugins: [trl_padfix.integrations.axolotl.PaddingRemovalPlugin]
    padfix_prefix_sharing: auto
"""

from __future__ import annotations

from typing import Any, Literal

from transformers import Trainer

from ..versions import require_stack
from .callback import PACKS, callback_from, settings_in


require_stack("axolotl")

from axolotl.integrations.base import BasePlugin  # noqa: E402
from pydantic import BaseModel, model_validator  # noqa: E402


__all__ = ["PaddingRemovalArgs", "PaddingRemovalPlugin"]


class PaddingRemovalArgs(BaseModel):
    """
    Keys of the YAML.

    Attributes:
        padfix_prefix_sharing (`bool` or `"auto"`): As `prefix_sharing` of [`PaddingRemovalCallback`].
        padfix_parity_check (`bool`): As `parity_check`.
        padfix_pool_last_token (`bool`): As `pool_last_token`.
        padfix_packed_multiple_of (`int` or `list[int]`): As `packed_multiple_of`.
        padfix_attn_implementation (`str`): As `attn_implementation`.
    """

    padfix_prefix_sharing: bool | Literal["auto"] = False
    padfix_parity_check: bool = True
    padfix_pool_last_token: bool = False
    padfix_packed_multiple_of: int | list[int] | None = None
    padfix_attn_implementation: str | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, data: Any) -> Any:
        """Raise a `ValueError` for unknown keys `padfix_...`, which axolotl would drop silently, and for packing."""
        settings_in(data)
        for key in ("sample_packing", "batch_flattening"):
            if data.get(key):
                raise ValueError(f"`{key}: true` {PACKS} Set `{key}: false`, or leave the plug-in out.")
        return data


class PaddingRemovalPlugin(BasePlugin):
    """Attaches to the models of axolotl's trainer, before DeepSpeed or FSDP wraps them."""

    def get_input_args(self) -> str:
        return f"{__name__}.{PaddingRemovalArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        callback_from(cfg, without="`plugins` without `trl_padfix`").attach(trainer)
