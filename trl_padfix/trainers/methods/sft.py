"""SFT without padding."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import trl
import trl.trainer.sft_trainer as trl_sft
from transformers import TrainingArguments

from ...core.model.older import silence_packing_warning
from ..base import PaddingFreeMixin, arguments_by_name
from ..data.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForVisionLanguageModeling,
    SidedCollator,
    pad_right,
)
from ..data.turns import expand_datasets
from ..settings import Settings
from ..task import Task


__all__ = ["SFTTrainer"]


class SFTTask(Task):
    """Rows are texts, conversations, or prompts with completions."""

    generates_rows = False
    collators = {
        trl_sft.DataCollatorForLanguageModeling: DataCollatorForLanguageModeling,
        trl_sft.DataCollatorForVisionLanguageModeling: DataCollatorForVisionLanguageModeling,
    }
    sequences = (("input_ids",),)

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        side = self.trainer.padding.settings.padding_side
        if side is not None and config.packing and config.packing_strategy != "wrapped":
            raise ValueError(
                f"`packing=True` leaves nothing to pad on the {side}: batches are rows of whole sequences, one after "
                "the other. Leave `padding_side` out, or set `packing=False`."
            )

    def packs_rows(self) -> bool:
        collator, args = self.trainer.data_collator, self.trainer.args
        is_trls = isinstance(collator, trl_sft.DataCollatorForLanguageModeling)
        return (is_trls and collator.padding_free) or bool(args.eval_packing)

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        layout = ["attention_mask"] if "attention_mask" in inputs else ["position_ids", "cu_seq_lens_q"]
        return [{name: inputs[name] for name in ("input_ids", *layout) if name in inputs}]

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        if "labels" not in batch or self.trainer.label_smoother is not None:
            return None
        if num_items is not None:  # TRL divides by it, so the losses of chunks add up
            return 1.0
        trained, total = self.num_loss_items(chunk), self.num_loss_items(batch)
        return trained / total.clamp(min=1)  # type: ignore[operator, union-attr]

    def rows_are_independent(self) -> bool:
        trainer = self.trainer
        counts_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        return counts_tokens and trainer.args.average_tokens_across_devices

    def num_loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        # A virtual token predicts the first token of a row.
        first = int(not any(handle.anatomy.has_virtual_tokens for handle in self.trainer.padding.handles))
        return (batch["labels"][:, first:] != -100).sum() if "labels" in batch else None

    def metrics_inputs(self, inputs: dict[str, Any], logits: Any, labels: Any) -> tuple[Any, Any]:
        # A `compute_metrics` for TRL gets right-padded rows.
        collator = self.trainer.data_collator
        pads_left = isinstance(collator, SidedCollator) and collator.padding_side == "left"
        if not pads_left or "attention_mask" not in inputs or not isinstance(logits, torch.Tensor):
            return logits, labels
        mask = inputs["attention_mask"].to(logits.device)
        # Roll each row to the left by its number of pad tokens, `mask.argmax(1)`.
        columns = (torch.arange(mask.shape[1], device=mask.device) + mask.argmax(1, keepdim=True)) % mask.shape[1]
        inputs.update(pad_right(inputs))  # in place: with `include_for_metrics` Trainer passes them on, too
        return logits.take_along_dim(columns[..., None], dim=1), inputs["labels"].to(logits.device)


class SFTTrainer(PaddingFreeMixin, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] without padding, like [`DPOTrainer`].

    With `padding_free=True` the decoder computes real tokens only, also with `max_length`, with your own collator and
    in evaluation. It keeps the sequences of a row of `packing=True` apart with any attention implementation, in memory
    that grows linearly with the row. With `prefix_sharing` it computes shared prefixes of rows (a system prompt)
    once.

    With `expand_turns=True` each turn of the assistant in a conversation becomes a row of its own; see
    [`expand_turns`].
    With `predict_with_generate=True` the references are the completions, or the last messages of the assistant.

    Args:
        *args, **kwargs:
            As [`~trl.SFTTrainer`]. `args` may be this package's [`SFTConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`].
        ValueError, KeyError: TRL's, for missing columns, no chat template, and no pad token.

    Example:

    ```python
    from trl_padfix import SFTConfig, SFTTrainer

    args = SFTConfig(output_dir="runs/sft", padding_free=True)
    trainer = SFTTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=dialogues)
    trainer.train()  # columns of the data: messages, text, or prompt and completion
    ```
    """

    task_class = SFTTask

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = arguments_by_name(self._init_owners(), args, kwargs)
            settings = Settings.of(given.get("args"), **self.fixed_settings)
            if settings.expand_turns:
                given |= {f"{n}_dataset": expand_datasets(given.get(f"{n}_dataset"), n) for n in ("train", "eval")}
                args, kwargs = (), given
            with silence_packing_warning() if settings.padding_free else nullcontext():
                super().__init__(*args, **kwargs)
