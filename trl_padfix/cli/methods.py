"""The training methods of the command line."""

__all__ = ["METHODS", "SCRIPTS"]

METHODS = {
    "dpo": "DPO",
    "sft": "SFT",
    "reward": "Reward",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "distillation": "Distillation",
    "async-grpo": "AsyncGRPO",
}
"""Commands, and the first part of the names of their trainers and configurations."""

SCRIPTS = {"async-grpo": "grpo"}
"""Commands without a script in TRL, and the method whose script they run with their own trainer."""
