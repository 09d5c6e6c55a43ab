"""Reward models without padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import trl
import trl.trainer.reward_trainer as trl_reward
from datasets import Dataset

from ..core.model.find import find_pretrained
from .attention_choice import AttentionChoiceMixin
from .base import PaddingRemovalMixin
from .checks import check_vocabulary, require_columns, require_rows
from .data.batch_layouts import LayoutCollator
from .data.collators import DataCollatorForReward, empty_sequence
from .data.columns import empty_lists, rows_of_only
from .data.row_checks import sound_rows
from .steps.budget import BudgetMixin
from .steps.measures import RewardMeasure


__all__ = ["RewardTrainer"]


class RewardTrainer(AttentionChoiceMixin, BudgetMixin, PaddingRemovalMixin, trl.RewardTrainer):
    """
    TRL's [`~trl.RewardTrainer`] without padding.

    Takes what TRL's takes. With `padding_free=True` in its configuration the decoder computes real tokens only, with
    `prefix_sharing=True` the prompt of a pair once; batches are padded on the tokenizer's side, or on `padding_side`.
    Rewards, losses, metrics and gradients are those of the padded computation, but that `pool_last_token=True` scores
    the last token of each row also where it is the pad token.

    Logs `perf/tokens_per_second`, `padfix/pad_fraction` and `padfix/shared_fraction` beside TRL's metrics, as
    [`DPOTrainer`] does.

    Args:
        *args, **kwargs:
            As [`~trl.RewardTrainer`]. `args` may be this package's [`RewardConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For missing columns, empty rows, and a model with a language-modelling head.

    Example:

    ```python
    from trl_padfix import RewardConfig, RewardTrainer

    args = RewardConfig(output_dir="runs/reward", padding_free=True, prefix_sharing=True)
    trainer = RewardTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=pairs)
    trainer.train()  # columns of the data: chosen, rejected
    ```
    """

    _takes_layouts = True
    _collators = {trl_reward.DataCollatorForPreference: DataCollatorForReward}
    _takes_images = False

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        super()._check_before(config, given)
        model = given.get("model")
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None:
            raise ValueError(
                f"{type(model).__name__} scores every next token, and a reward model scores a whole sequence. Load "
                "it with `AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`, or pass its id."
            )

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        require_rows(dataset, dataset_name)
        require_columns(
            dataset,
            dataset_name,
            [{"chosen", "rejected"}, {"chosen_ids", "rejected_ids"}, {"chosen_input_ids", "rejected_input_ids"}],
            "A reward model needs `chosen` and `rejected` (and `prompt`, unless both begin with it)",
        )
        check_vocabulary(processing_class)
        dataset = sound_rows(dataset, dataset_name, ("prompt", "chosen", "rejected"))
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(prepared, Dataset):
            if len(prepared) == 0:
                raise ValueError(
                    f"No pair of the {dataset_name} dataset is left: all have a sequence of more than "
                    f"`max_length={args.max_length}` tokens, which TRL leaves out. Raise `max_length`."
                )
            for side in ("chosen", "rejected"):
                if len(rows := empty_lists(prepared, f"{side}_ids")):
                    raise ValueError(empty_sequence(side, f"pair {rows[0]} of the {dataset_name} dataset"))
        return prepared

    def _set_up_padding(self) -> None:
        super()._set_up_padding()
        side = getattr(self.data_collator, "padding_side", "right")
        if side == "right" or not self._handles or self._handles[0].pool_last_token:
            return
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **evaluated}.items():
            for column in ("chosen_ids", "rejected_ids") if isinstance(dataset, Dataset) else ():
                rows = rows_of_only(dataset, column, self.model.config.get_text_config().pad_token_id)
                if len(rows):
                    raise ValueError(
                        f"`{column}` of pair {rows[0]} of the {name} dataset is nothing but pad tokens: padded "
                        "left, the model would score its padding. Drop the pair, give the tokenizer a pad token of "
                        "its own, set `pool_last_token=True`, or pad right."
                    )

    def _packing_options(self) -> dict[str, Any]:
        wanted = getattr(self.args, "pool_last_token", False)
        return super()._packing_options() | ({"pool_last_token": True} if wanted else {})

    def _layout_collator(self, dataset: Any, is_training: bool) -> Any:
        collator = super()._layout_collator(dataset, is_training)
        if not isinstance(collator, LayoutCollator) or self._handles[0].pool_last_token:
            return collator
        return replace(collator, pools_by=find_pretrained(self.model).config.get_text_config().pad_token_id)

    def _wrap_model_for_loss(self, model: Any) -> Any:
        # TRL hands the whole batch to the model, whose layers pass margins on to their attention as they would a mask.
        return lambda margin=None, **inputs: model(**inputs)

    _rows_per_item = 2
    _extremes = {"min_reward": torch.min, "max_reward": torch.max}

    def _row_measure(self) -> type[RewardMeasure]:
        return RewardMeasure

    def _loss_items(self, batch: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)

    def _metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {}
