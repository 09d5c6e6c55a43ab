"""Hints for unknown names of fields: the current name, or the closest one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


__all__ = ["hint"]

GONE = {
    "torch_dtype": "it is `dtype` now",
    "warmup_ratio": "`warmup_steps` takes a share below 1 too",
    "evaluation_strategy": "it is `eval_strategy` now",
    "max_seq_length": "it is `max_length` now",
    "max_length": "it is `max_completion_length` here",
    "rpo_alpha": "set `loss_type: [sigmoid, sft]` and `loss_weights`",
    "max_prompt_length": "removed from TRL: shorten the prompts of your data",
    "overwrite_output_dir": "leave it out: a run resumes from a checkpoint only with `resume_from_checkpoint`",
    "no_cuda": "it is `use_cpu` now",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "group_by_length": "it is `train_sampling_strategy: group_by_length` now",
    "use_liger": "it is `use_liger_kernel` now",
    "use_liger_loss": "it is `use_liger_kernel` now",
    "vllm_guided_decoding_regex": "it is `vllm_structured_outputs_regex` now",
    "generate_during_eval": "removed from TRL: DPO and SFT have `predict_with_generate` here",
}
"""Fields of earlier versions of TRL and transformers, and what to write today."""

NEEDLESS = {
    "base_model_attribute_name", "chars_per_token", "dataset_batch_size", "force_use_ref_model", "is_encoder_decoder",
    "label_pad_token_id", "max_target_length", "num_of_sequences", "padding_value", "use_logits_to_keep",
    "use_num_logits_to_keep", "vllm_device", "vllm_dtype", "vllm_enable_prefix_caching",
}  # fmt: skip
"""Fields of earlier versions of TRL that nothing replaces."""


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
    remark = GONE.get(name) or "removed from TRL: leave it out" * (name in NEEDLESS) or "".join(close)
    field = re.match(r"it is `(\w+)", remark)
    return f" ({remark})" if remark and (field is None or field[1] in known) else ""
