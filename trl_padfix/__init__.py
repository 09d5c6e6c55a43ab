"""Drop-in TRL trainers that skip padding and compute shared prompts once."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import __version__
from .versions import INSTEAD, newer_trl, require


# The module of each public name. A module is imported at the first access to one of its names: `import trl_padfix`
# takes no time, and only names of trainers import TRL.
_MODULES = {
    "core.layout.layout": ["Layout", "pack", "unpack"],
    "core.layout.build": ["packed_layout", "padding_free_layout", "prefix_sharing_layout"],
    "core.errors": ["PaddingRemovalError"],
    "core.handle": ["PaddingRemoval", "PaddingStats"],
    "core.remove": ["remove_padding"],
    "core.split_rows": ["split_rows"],
    "core.parity.check": ["check_parity"],
    "core.parity.report": ["ParityError", "ParityReport"],
    "core.generation": ["generate", "left_align"],
    "trainers.data.collators": [
        "DataCollatorForLanguageModeling",
        "DataCollatorForPreference",
        "DataCollatorForReward",
        "DataCollatorForVisionLanguageModeling",
        "DataCollatorForVisionPreference",
    ],
    "trainers.config": ["DPOConfig", "GRPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"],
    "trainers.methods.any_trainer": ["padding_free_trainer"],
    "trainers.methods.distillation_config": ["DistillationConfig"],
    "trainers.methods.distillation": ["DistillationTrainer"],
    "trainers.methods.dpo": ["DPOTrainer"],
    "trainers.dry_run": ["dry_run"],
    "trainers.methods.grpo": ["GRPOTrainer"],
    "trainers.methods.kto": ["DataCollatorForUnpairedPreference", "KTOTrainer"],
    "trainers.methods.reward": ["RewardTrainer"],
    "trainers.methods.rloo": ["RLOOTrainer"],
    "trainers.methods.sft": ["SFTTrainer"],
    "trainers.data.rollouts": ["RecordedRollouts"],
    "trainers.data.turns": ["expand_turns"],
    "integrations.callback": ["PaddingRemovalCallback"],
    "tools.tiny": ["build_tiny"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from .core.errors import PaddingRemovalError
    from .core.generation import generate, left_align
    from .core.handle import PaddingRemoval, PaddingStats
    from .core.layout.build import packed_layout, padding_free_layout, prefix_sharing_layout
    from .core.layout.layout import Layout, pack, unpack
    from .core.parity.check import check_parity
    from .core.parity.report import ParityError, ParityReport
    from .core.remove import remove_padding
    from .core.split_rows import split_rows
    from .integrations.callback import PaddingRemovalCallback
    from .tools.tiny import build_tiny
    from .trainers.config import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
    from .trainers.data.collators import (
        DataCollatorForLanguageModeling,
        DataCollatorForPreference,
        DataCollatorForReward,
        DataCollatorForVisionLanguageModeling,
        DataCollatorForVisionPreference,
    )
    from .trainers.data.rollouts import RecordedRollouts
    from .trainers.data.turns import expand_turns
    from .trainers.dry_run import dry_run
    from .trainers.methods.any_trainer import padding_free_trainer
    from .trainers.methods.distillation import DistillationTrainer
    from .trainers.methods.distillation_config import DistillationConfig
    from .trainers.methods.dpo import DPOTrainer
    from .trainers.methods.grpo import GRPOTrainer
    from .trainers.methods.kto import DataCollatorForUnpairedPreference, KTOTrainer
    from .trainers.methods.reward import RewardTrainer
    from .trainers.methods.rloo import RLOOTrainer
    from .trainers.methods.sft import SFTTrainer

    __all__ = sorted([*_HOME, "__version__"])  # when it runs, `__getattr__` makes it


def _of_trl(name: str) -> Any:
    """What TRL's scripts import in one line with a trainer: `ModelConfig`, `TrlParser`, `get_peft_config`, ..."""
    missing = AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    # Python asks for `__path__` and for our own modules too (`from trl_padfix import core`): no reason to import TRL.
    if name.startswith("_") or find_spec(f"{__name__}.{name}") or not find_spec("trl"):
        raise missing
    trl = importlib.import_module("trl")
    is_class = name.endswith(("Trainer", "Config")) and name not in trl.__all__
    modules = {path.name.replace("_", ""): path.name for path in Path(trl.__path__[0]).glob("experimental/*")}
    if is_class and (module := modules.get(name.removesuffix("Trainer").removesuffix("Config").lower())):
        raise ImportError(f"`{name}` is experimental in TRL: `from trl_padfix.experimental.{module} import {name}`.")
    if is_class:
        close = get_close_matches(name, [*_HOME, *trl.__all__], n=1, cutoff=0.92)
        own = (
            "For a trainer class of your own there is `trl_padfix.padding_free_trainer(CLASS)`, and for any training "
            "loop `trl_padfix.remove_padding(model)`."
        )
        raise ImportError(
            f"Neither trl_padfix nor TRL {trl.__version__} has `{name}`."
            f"{f' Did you mean `{close[0]}`?' if close else ''}"
            f"{f' {own}' if name.endswith('Trainer') else ''}"
        )
    if name not in trl.__all__ or isinstance(found := getattr(trl, name), ModuleType):
        raise missing
    if name.endswith("Trainer"):  # TRL's trainer would silently train padded
        raise ImportError(
            f"`trl.{name}` has no counterpart in trl_padfix. Import it from TRL, and train without padding with "
            f"`trl_padfix.padding_free_trainer({name})`."
        )
    return found


def _require(name: str) -> None:
    """Check the versions that a public name needs."""
    if not _HOME[name].startswith("core.layout."):  # layouts need torch only
        require("transformers", name)
    if _HOME[name].startswith("trainers."):
        require("trl", name)


def _importable() -> list[str]:
    """The public names that the installed versions support: `from trl_padfix import *` imports these."""
    names = ["__version__"]
    for name in _HOME:
        with suppress(ImportError):
            _require(name)
            names.append(name)
    return sorted(names)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _importable()
    if name not in _HOME:
        return _of_trl(name)
    _require(name)
    try:
        found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    except (ImportError, AttributeError) as error:
        # A name that moved in a later TRL is missing deep inside; this says so at the import of the user.
        if not (_HOME[name].startswith("trainers.") and (newer := newer_trl())):
            raise
        raise ImportError(f"`trl_padfix.{name}` could not be imported: {error}. {newer} {INSTEAD}") from error
    return found


def __dir__() -> list[str]:
    return _importable()
