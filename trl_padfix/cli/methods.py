"""The training methods of the command line."""

__all__ = ["METHODS"]

METHODS = {
    "dpo": "DPO",
    "sft": "SFT",
    "reward": "Reward",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "distillation": "Distillation",
}
"""Commands, and the first part of the names of their trainers and configurations."""
