"""
A tiny training in which one process has an error that the other does not have. [`main`] runs it in one process of
several: what each process raised is in `FOLDER/errors-RANK.json`. With one of [`PLACES`], the loss of process 1
raises an error there, on a part of a batch.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

from kit.budget_runs import make
from kit.processes import on_gpus
from kit.trainer_runs import build_model

import trl_padfix
from trl_padfix.core.parity import check
from trl_padfix.core.parity.report import Distance, ParityReport


__all__ = ["PLACES", "main"]

RANK = int(os.environ.get("RANK", 0))
PACKED = {"padding_free": True, "prefix_sharing": True}

FAULTS = {
    "first batch": mock.patch.object(ParityReport, "ok", False),
    "longest row": mock.patch.object(check, "_compare_longest", return_value=Distance(1, 1, 0, 0)),
    "": contextlib.nullcontext(),
}
PLACES = ("before the forward", "before a gather", "without padding", "nowhere")
"""Where the loss of process 1 raises an error."""


class OfWholeBatches(trl_padfix.SFTTrainer):
    """A trainer whose loss gathers, and raises an error on a part of a batch of process 1."""

    place = ""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        is_part = RANK == 1 and len(inputs["input_ids"]) < self.args.per_device_train_batch_size
        assert not (is_part and self.place == "before the forward")
        given = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        outputs = model(**given, use_cache=False)  # one forward: processes that shard a model meet in each
        is_packed = not outputs.logits[inputs["attention_mask"] == 0].any()
        assert not (is_part and (self.place == "before a gather" or (self.place == "without padding" and is_packed)))
        assert self.accelerator.gather(outputs.loss.detach()[None])[RANK] == outputs.loss  # of this process
        return outputs.loss


def train(folder: Path, fault: str) -> str:
    """The error of this process in a training, as text; the parity check of process 1 finds a `fault`."""
    trainer = make(trl_padfix, "DPO", folder, max_steps=2, per_device_train_batch_size=4, parity_check=True, **PACKED)
    broken = FAULTS[fault if RANK == 1 else ""]
    try:
        with broken:
            trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train_on_whole_batches(folder: Path, place: str) -> None:
    model, trains = build_model(tie_word_embeddings=False), {"max_steps": 2, "use_cpu": not on_gpus(), **PACKED}
    trainer = make(trl_padfix, "SFT", folder, trainer_class=OfWholeBatches, model=model, **trains)
    trainer.place = place
    trainer.train()
    assert trainer.state.global_step == 2


def main(path: str, place: str = "") -> None:
    folder = Path(path)
    if place:
        train_on_whole_batches(folder / "run", place)
        return
    # An error first: afterwards the collectives of both processes still match.
    errors = {fault: train(folder / "run", fault) for fault in FAULTS}
    (folder / f"errors-{RANK}.json").write_text(json.dumps(errors))
