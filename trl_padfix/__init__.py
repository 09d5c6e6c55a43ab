"""Padding-free and prefix-sharing training for TRL: change the import, keep the script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import compat


__version__ = "0.1.0.dev0"

# Where each public name lives. Modules are imported when a name of theirs is first asked for: `import trl_padfix`
# costs nothing, and TRL is imported only by whoever wants a trainer.
_MODULES = {
    "layout": ["Layout", "pack", "packed_layout", "padding_free_layout", "prefix_sharing_layout", "unpack"],
    "attention": ["PaddingRemovalError"],
    "decoder": ["PaddingRemoval", "PaddingStats", "remove_padding"],
    "parity": ["ParityError", "ParityReport", "check_parity"],
    "generation": ["generate", "left_align"],
    "collators": ["DataCollatorForLanguageModeling", "DataCollatorForPreference", "DataCollatorForReward"],
    "vision_collators": ["DataCollatorForVisionLanguageModeling", "DataCollatorForVisionPreference"],
    "config": ["DPOConfig", "GRPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"],
    "trainers.dpo": ["DPOTrainer"],
    "trainers.grpo": ["GRPOTrainer"],
    "trainers.kto": ["DataCollatorForUnpairedPreference", "KTOTrainer"],
    "trainers.reward": ["RewardTrainer"],
    "trainers.rloo": ["RLOOTrainer"],
    "trainers.sft": ["SFTTrainer"],
}
_NEEDS_TRL = {"collators", "config", "trainers", "vision_collators"}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])

if TYPE_CHECKING:
    from .attention import PaddingRemovalError
    from .collators import DataCollatorForLanguageModeling, DataCollatorForPreference, DataCollatorForReward
    from .config import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
    from .decoder import PaddingRemoval, PaddingStats, remove_padding
    from .generation import generate, left_align
    from .layout import Layout, pack, packed_layout, padding_free_layout, prefix_sharing_layout, unpack
    from .parity import ParityError, ParityReport, check_parity
    from .trainers.dpo import DPOTrainer
    from .trainers.grpo import GRPOTrainer
    from .trainers.kto import DataCollatorForUnpairedPreference, KTOTrainer
    from .trainers.reward import RewardTrainer
    from .trainers.rloo import RLOOTrainer
    from .trainers.sft import SFTTrainer
    from .vision_collators import DataCollatorForVisionLanguageModeling, DataCollatorForVisionPreference


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name] != "layout":
        compat.require("transformers", name)
    if _HOME[name].split(".")[0] in _NEEDS_TRL:
        compat.require("trl", name)
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
