"""TRL's trainers, one step of `train()` each."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from conformance.adapter import Adapter, NotRun, arguments, trained
from conformance.arbiter import Pair, Row, Step
from conformance.words import tokenizer, words


class SFT(Adapter):
    """`SFTTrainer` on rows of token ids and labels."""

    packages = ("torch", "transformers", "trl")
    trainer, config = SFTTrainer, SFTConfig

    def __init__(self, name: str, attention: str | None = None, **fields: Any) -> None:
        self.name, self.fields, self.attention = name, fields, attention
        given = ", ".join(f"{k}={v!r}" for k, v in fields.items())
        self.setting = f"{self.config.__name__}({given})"

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = [row for batch in batches for row in batch]
        data = Dataset.from_list([{"input_ids": row.ids, "labels": row.labels} for row in rows])
        given: dict[str, Any] = {"max_length": None}
        if self.fields.get("packing"):
            if len(batches) > 1:
                raise NotRun("Which rows share a micro-batch is for the packer to choose.")
            given["max_length"] = sum(len(row.ids) for row in rows)  # all rows in one bin
            batches = [rows[:1]]
        args = self.config(**arguments(batches, **given | self.fields))
        return trained(
            lambda recorder: self.trainer(
                model, args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[recorder]
            )
        )

    def evaluate(self, model: PreTrainedModel, rows: list[Row]) -> float:
        if self.fields.get("packing"):
            raise NotRun("Packed rows are one row.")
        data = Dataset.from_list([{"input_ids": row.ids, "labels": row.labels} for row in rows])
        given = arguments([rows], max_length=None, per_device_eval_batch_size=len(rows), **self.fields)
        trainer = self.trainer(
            model, args=self.config(**given), train_dataset=data, eval_dataset=data, processing_class=tokenizer()
        )
        return trainer.evaluate()["eval_loss"]


class DPO(Adapter):
    """`DPOTrainer` on prompts and answers."""

    packages = ("torch", "transformers", "trl")
    trainer, config = DPOTrainer, DPOConfig

    def __init__(self, name: str, side: str, **fields: Any) -> None:
        self.name, self.side, self.fields = name, side, fields
        given = ", ".join(f"{k}={v!r}" for k, v in fields.items())
        self.setting = f'{self.config.__name__}({given}), tokenizer.padding_side="{side}"'

    def preference_step(
        self, model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], beta: float
    ) -> Step:
        data = Dataset.from_list([{name: words(ids) for name, ids in pair._asdict().items()} for pair in pairs])
        args = self.config(**arguments([pairs], beta=beta, max_length=None, **self.fields))
        return trained(
            lambda recorder: self.trainer(
                model, reference, args=args, train_dataset=data, processing_class=tokenizer(self.side),
                callbacks=[recorder],
            )
        )  # fmt: skip


ADAPTERS = [
    SFT("trl-sft-padded"),
    SFT("trl-sft-padding-free", padding_free=True),
    SFT("trl-sft-packing-bfd", packing=True),
    SFT("trl-sft-packing-wrapped", packing=True, packing_strategy="wrapped"),
    DPO("trl-dpo-left", "left"),
    DPO("trl-dpo-right", "right"),
]
