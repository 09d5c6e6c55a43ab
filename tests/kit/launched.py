"""
A method of `trl_padfix.cli.launch` in one process of several: what the tests of many processes launch.

`BROKEN_LAYOUT=1` takes tokens of other prefixes for shared ones: the negative control. `ODD_BATCH=1` gives processes
that share batches different ones. `READS_PADDING=1` adds to the loss what the model computes at padding. `PREFIXES`
names a folder, into which each process writes how many shared prefixes of any length its steps had.
"""

import json
import os
from pathlib import Path

from kit.trainer_runs import confusing_layout

from trl_padfix.cli import launch
from trl_padfix.core.call import layout_of as batches


def count_prefixes() -> dict[str, int]:
    """Count the shared prefixes of all steps from now on."""
    from trl_padfix.core.layout import shared_prefixes
    from trl_padfix.trainers.batching.part_runner import PartRunner

    shared_prefixes.MIN_SAVED_TOKENS, found, check = 1, {"prefixes": 0}, PartRunner.check

    def checked(runner):
        found["prefixes"] += len(runner.parts.plan.prefixes) if runner.parts.plan else 0
        check(runner)

    PartRunner.check = checked
    return found


def count_from_another_id() -> None:
    """Give one process of two another first token in all of its batches."""
    from trl_padfix.trainers.base import PaddingFreeMixin

    loss = PaddingFreeMixin.compute_loss

    def compute_loss(trainer, model, inputs, *args, **kwargs):
        ids = inputs["input_ids"].clone()
        ids[:, 0] += trainer.accelerator.process_index
        return loss(trainer, model, {**inputs, "input_ids": ids}, *args, **kwargs)

    PaddingFreeMixin.compute_loss = compute_loss


def read_padding() -> None:
    """Add the logits at all positions to the loss, those at padding too."""
    from trl_padfix.trainers.base import PaddingFreeMixin

    loss = PaddingFreeMixin.compute_loss

    def compute_loss(trainer, model, inputs, *args, **kwargs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
        found = loss(trainer, model, inputs, *args, **kwargs)
        added = logits.square().mean()
        return (found[0] + added, *found[1:]) if isinstance(found, tuple) else found + added

    PaddingFreeMixin.compute_loss = compute_loss


def main(method: str, *args: str) -> None:
    if os.environ.get("BROKEN_LAYOUT"):
        batches.prefix_sharing_layout = confusing_layout
    if os.environ.get("ODD_BATCH"):
        count_from_another_id()
    if os.environ.get("READS_PADDING"):
        read_padding()
    folder = os.environ.get("PREFIXES")
    found = count_prefixes() if folder else {}
    launch.main(method, list(args))
    if folder:
        Path(folder, f"prefixes-{os.environ['RANK']}.json").write_text(json.dumps(found))
