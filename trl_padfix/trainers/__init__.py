"""TRL's trainers without padding: one mixin over TRL's classes, a module for each trainer."""

from .dpo import DPOTrainer
from .grpo import GRPOTrainer
from .kto import KTOTrainer
from .reward import RewardTrainer
from .rloo import RLOOTrainer


__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer"]
