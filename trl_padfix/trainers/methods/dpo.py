"""DPO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl
import trl.trainer.dpo_trainer as trl_dpo

from ..base import PaddingFreeMixin
from ..data.collators import DataCollatorForPreference, DataCollatorForVisionPreference
from ..task import PairTask


__all__ = ["DPOTrainer"]


class DPOTask(PairTask):
    """Rows are pairs of completions."""

    generates_rows = False
    collators = {
        trl_dpo.DataCollatorForPreference: DataCollatorForPreference,
        trl_dpo.DataCollatorForVisionPreference: DataCollatorForVisionPreference,
    }
    sequences = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        return super().chunk_weight(chunk, batch, num_items) if self.rows_are_independent() else None

    def rows_are_independent(self) -> bool:
        # "aot" losses sort the rows of a forward; "sft" is a mean over their tokens.
        return not {"aot", "aot_unpaired", "sft"} & set(self.trainer.loss_types)

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        chosen, rejected = (mask.sum() for mask in batch["completion_mask"][:, 1:].chunk(2))
        both = {"entropy": chosen + rejected, "mean_token_accuracy": chosen}
        return both | {"logits/chosen": chosen, "logits/rejected": rejected}


class DPOTrainer(PaddingFreeMixin, trl.DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`] without padding.

    It has the arguments of TRL's trainer. With `padding_free=True` in its configuration the decoders of policy and
    reference compute real tokens only; with `prefix_sharing` they compute each prompt once. Batches are padded on
    the tokenizer's side, or on `padding_side`. Losses, metrics and gradients match TRL's, up to rounding.

    Logs `perf/tokens_per_second` (real tokens per second of wall time), `padfix/pad_fraction` (share of the padded
    batch that is padding) and `padfix/shared_fraction` (share of the real tokens that repeat a prefix)
    in addition to TRL's metrics.

    With `predict_with_generate=True` every evaluation also continues the prompts. As in
    [`~transformers.Seq2SeqTrainer`], `compute_metrics` then receives `predictions`, the generated tokens padded with
    the pad token, and `label_ids`, the tokens of the chosen completions padded with -100. Prompts, predictions and
    references are written to `generations/step_*.jsonl` in the output directory.

    Args:
        *args, **kwargs:
            As [`~trl.DPOTrainer`]. `args` may be this package's [`DPOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batches, if packed results of a model are wrong.
        ValueError, KeyError: TRL's, for missing columns, and no pad token.

    Example:

    ```python
    from trl_padfix import DPOConfig, DPOTrainer

    args = DPOConfig(output_dir="runs/dpo", padding_free=True, prefix_sharing="auto")
    trainer = DPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=pairs)
    trainer.train()  # columns of the data: prompt, chosen, rejected
    ```
    """

    task_class = DPOTask
