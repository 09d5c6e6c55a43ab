"""Hints for unknown names of fields (the current name, or the closest one), and the fields that need another one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


__all__ = ["NEEDS", "hint"]

RENAMED = {
    "batch_size": "per_device_train_batch_size", "dataset": "dataset_name", "epochs": "num_train_epochs",
    "cliprange": "epsilon", "evaluation_strategy": "eval_strategy", "kl_coef": "beta", "no_cuda": "use_cpu",
    "max_new_tokens": "max_completion_length", "max_seq_length": "max_length", "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length", "rloo_k": "num_generations", "torch_dtype": "dtype",
    "lr": "learning_rate", "use_liger": "use_liger_kernel", "use_liger_loss": "use_liger_kernel",
    "model": "model_name_or_path", "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}  # fmt: skip
"""Fields of earlier versions of TRL and transformers, and of other programs, that have another name now."""

GONE = {
    "warmup_ratio": "`warmup_steps` takes a share below 1 too",
    "max_length": "it is `max_completion_length` here",
    "max_completion_length": "it is `max_length` here, of prompt and completion",
    "rpo_alpha": "set `loss_type: [sigmoid, sft]` and `loss_weights`",
    "max_prompt_length": "removed from TRL: shorten the prompts of your data",
    "ref_model_init_kwargs": "removed from TRL: `model_init_kwargs` also loads the reference model",
    "reference_free": "removed from TRL: the experimental CPO trainer has no reference model",
    "overwrite_output_dir": "leave it out: a run resumes from a checkpoint only with `resume_from_checkpoint`",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "use_lora": "it is `use_peft` here",
    "group_by_length": "it is `train_sampling_strategy: group_by_length` now",
    "generate_during_eval": "removed from TRL: DPO and SFT have `predict_with_generate` here",
}
"""Fields of earlier versions of TRL and transformers, and what to write today."""

NEEDS = {
    "prefix_sharing": ("padding_free", "prefixes are shared in the packed row, which `padding_free` makes"),
    "packed_multiple_of": ("padding_free", "it sets the length of packed rows"),
    "max_tokens_per_batch": ("padding_free", "it counts the tokens of packed rows"),
    "pool_last_token": ("padding_free", "a padded model pools by token ids"),
    "group_by_prefix": (
        "prefix_sharing",
        "else each row computes its prefix, even next to rows that share it ('auto' works, too)",
    ),
}
"""Fields that are an error without another one, with that field and the reason."""


def hint(name: str, known: Iterable[str]) -> str:
    """
    What to write in place of a name, in parentheses; empty if nothing is known.

    Example:

    ```python
    >>> from trl_padfix.field_names import hint

    >>> hint("padding_fre", ["padding_free", "padding_side"]), hint("nonsense", ["padding_free"])
    (' (did you mean `padding_free`?)', '')

    ```
    """
    known = {*known}
    close = [f"did you mean `{other}`?" for other in difflib.get_close_matches(name, known, n=1, cutoff=0.75)]
    gone = {old: f"it is `{new}` now" for old, new in RENAMED.items()} | GONE
    gone |= {f"no_{other}": f"write `{other}: false`" for other in known}
    remark = gone.get(name) or "".join(close)
    field = re.match(r"it is `(\w+)", remark)
    return f" ({remark})" if remark and (field is None or field[1] in known) else ""
