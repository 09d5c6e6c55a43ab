"""DPO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl
import trl.trainer.dpo_trainer as trl_dpo
from accelerate.logging import get_logger
from datasets import Dataset

from .attention_choice import AttentionChoiceMixin
from .base import PaddingRemovalMixin
from .checks import check_vocabulary, require_columns, require_eos, require_rows
from .data.collators import DataCollatorForPreference, empty_completion
from .data.columns import count_equal, empty_lists
from .data.row_checks import sound_rows
from .data.vision_collators import DataCollatorForVisionPreference
from .generation.evaluation import GeneratingMixin
from .steps.budget import BudgetMixin
from .steps.measures import PairMeasure
from .watch.exact_means import ExactEvalMixin


__all__ = ["DPOTrainer"]

logger = get_logger(__name__)


class DPOTrainer(
    AttentionChoiceMixin, GeneratingMixin, BudgetMixin, ExactEvalMixin, PaddingRemovalMixin, trl.DPOTrainer
):
    """
    TRL's [`~trl.DPOTrainer`] without padding.

    Takes what TRL's takes. With `padding_free=True` in its configuration the decoder of policy and reference computes
    real tokens only, with `prefix_sharing=True` also no prompt twice; batches are padded on the tokenizer's side, or
    on `padding_side`. Losses, metrics and gradients are those of the padded computation.

    Logs `perf/tokens_per_second` (real tokens per second of wall time), `padfix/pad_fraction` (share of the padded
    batch that was padding) and `padfix/shared_fraction` (share of the real tokens that were computed once for several
    rows) beside TRL's metrics. With `exact_eval_means=True` the metrics of an evaluation are means over all its pairs
    (or tokens), whatever the batch size; by default they are TRL's means over batches.

    With `predict_with_generate=True` every evaluation also continues the prompts. `compute_metrics` is then called
    with what [`~transformers.Seq2SeqTrainer`] hands over: `predictions` are the generated tokens, padded with the pad
    token, and `label_ids` those of the chosen answers, padded with -100. Prompts, predictions and references are
    written to `generations/step_*.jsonl` in the output directory.

    Args:
        *args, **kwargs:
            As [`~trl.DPOTrainer`]. `args` may be this package's [`DPOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For input that could not be trained on as meant: missing columns, empty completions, no pad token.

    Example:

    ```python
    from trl_padfix import DPOConfig, DPOTrainer

    args = DPOConfig(output_dir="runs/dpo", padding_free=True, prefix_sharing=True)
    trainer = DPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=pairs)
    trainer.train()  # columns of the data: prompt, chosen, rejected
    ```
    """

    _takes_layouts = True
    _collators = {
        trl_dpo.DataCollatorForPreference: DataCollatorForPreference,
        trl_dpo.DataCollatorForVisionPreference: DataCollatorForVisionPreference,
    }

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        require_rows(dataset, dataset_name)
        require_columns(
            dataset,
            dataset_name,
            [{"chosen", "rejected"}],
            "DPO needs `chosen` and `rejected` (and `prompt`, unless both begin with it)",
        )
        check_vocabulary(processing_class)
        dataset = sound_rows(dataset, dataset_name, ("prompt", "chosen", "rejected"))
        require_eos(dataset, processing_class)
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(prepared, Dataset):
            _report_pairs(prepared, len(dataset), args.max_length, dataset_name)
        return prepared

    _rows_per_item = 2

    def _compares_rows(self) -> bool:
        # These sort the rows of a forward, or weigh them by their tokens.
        return super()._compares_rows() or bool({"aot", "aot_unpaired", "sft"} & set(self.loss_types))

    def _row_measure(self) -> type[PairMeasure]:
        return PairMeasure

    def _loss_items(self, batch: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)

    def _metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        chosen, rejected = (mask.sum() for mask in batch["completion_mask"][:, 1:].chunk(2))
        both = {"entropy": chosen + rejected, "mean_token_accuracy": chosen}
        return both | {"logits/chosen": chosen, "logits/rejected": rejected}


def _report_pairs(prepared: Dataset, given: int, max_length: int | None, name: str) -> None:
    """Stop at pairs that cannot be scored; say how many teach nothing or were left out."""
    if len(prepared) == 0:
        raise ValueError(
            f"No pair of the {name} dataset is left: all {given} prompts fill `max_length={max_length}` by "
            "themselves, so every completion would be cut off. Raise `max_length`, or shorten the prompts."
        )
    for side in ("chosen", "rejected"):
        if len(rows := empty_lists(prepared, f"{side}_ids")):
            raise ValueError(empty_completion(side, f"pair {rows[0]} of the {name} dataset"))
    equal = count_equal(prepared, "chosen_ids", "rejected_ids")
    if equal:
        logger.warning(
            f"{equal} of {len(prepared)} pairs of the {name} dataset have equal completions: they teach nothing and "
            "cost a step's time. Drop them."
        )
    if len(prepared) < given:
        logger.warning(
            f"{given - len(prepared)} of {given} pairs of the {name} dataset were left out by TRL: their prompts fill "
            f"`max_length={max_length}` by themselves. Raise `max_length` to train on them."
        )
