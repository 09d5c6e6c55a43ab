"""The training methods of the command line, and the groups of our options in their `--help`."""

__all__ = ["METHODS", "OPTION_GROUPS"]

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

OPTION_GROUPS = {
    "for everyone": (),
    "memory": ("max_tokens_per_batch",),
    "evaluation": ("exact_eval_means", "predict_with_generate", "generation_max_new_tokens"),
    "lengths of packed rows": ("packed_multiple_of",),
}  # fmt: skip
"""Groups of the fields that this package adds; all other fields belong to the first group."""
