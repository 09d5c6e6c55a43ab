"""Trainers with the callback, in one process of several: refused where it comes late, or the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.trainer_runs import SETTINGS, build_ids, build_model, build_tokenizer
from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainingArguments

from trl_padfix import PaddingRemovalCallback, PaddingRemovalError


def build_trainer(folder: Path, *callbacks: PaddingRemovalCallback) -> Trainer:
    settings = {k: v for k, v in SETTINGS.items() if k in TrainingArguments.__dataclass_fields__}
    args = TrainingArguments(str(folder), **settings | {"max_steps": 3, "use_cpu": False})
    data: dict[str, Any] = {
        "train_dataset": build_ids(16, begin="w3 w5 w7 w9 "),
        "data_collator": DataCollatorForSeq2Seq(build_tokenizer()),
    }
    trainer = Trainer(build_model(), args, callbacks=[*callbacks], **data)
    trainer.remove_callback(PrinterCallback)
    return trainer


def figures(trainer: Trainer) -> list[list[float]]:
    return [[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]


def main(folder: str) -> dict[str, Any]:
    late = build_trainer(Path(folder))
    late.add_callback(PaddingRemovalCallback())
    try:
        late.train()
        refused = ""
    except PaddingRemovalError as error:
        refused = str(error)
    theirs = build_trainer(Path(folder))
    theirs.train()
    callback = PaddingRemovalCallback(prefix_sharing=True)
    ours = build_trainer(Path(folder), callback)
    callback.attach(ours)
    ours.train()
    stats = callback.stats
    return {
        "refused": refused,
        "steps": late.state.global_step,
        "theirs": figures(theirs),
        "ours": figures(ours),
        "ok": [report.ok for report in callback.reports],
        "tokens": [stats.packed_tokens, stats.real_tokens, stats.padded_tokens],
    }
