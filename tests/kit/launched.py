"""
A method of `trl_padfix.cli.launch` in one process of several: what the tests of many processes launch.

`BROKEN_LAYOUT=1` takes tokens of other prefixes for shared ones: the negative control. `ODD_BATCH=1` gives processes
that share batches different ones. `READS_PADDING=1` adds to the loss what the model computes at padding. `GRAPHS` or
`PREFIXES` names a folder, into which each process writes what it has compiled, or how many shared prefixes of any
length its steps had.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from kit.trainer_runs import confusing_layout

from trl_padfix.cli import launch
from trl_padfix.core.call import layout_of as batches


@contextmanager
def graphs() -> Iterator[dict[str, Any]]:
    """The graphs that this process has compiled, at the end and halfway, their breaks, and the calls of layers."""
    from trl_padfix.core.attention.compiled import CompiledLayerPatch

    calls, twin, found = [], CompiledLayerPatch._twin, {}
    counters = torch._dynamo.utils.counters
    CompiledLayerPatch._twin = lambda patch: (calls.append(counters["stats"]["unique_graphs"]), twin(patch))[1]
    yield found
    found |= {"unique_graphs": counters["stats"]["unique_graphs"], "halfway": calls[len(calls) // 2]}
    found |= {"breaks": dict(counters["graph_break"]), "calls": len(calls)}


@contextmanager
def prefixes() -> Iterator[dict[str, int]]:
    """Shared prefixes of steps of micro-batches, summed over the steps."""
    from trl_padfix.core.layout import shared_prefixes
    from trl_padfix.trainers.batching.prefix_schedule import ChunkRunner

    shared_prefixes.MIN_SAVED_TOKENS, found, check = 1, {"prefixes": 0}, ChunkRunner.check

    def checked(runner):
        found["prefixes"] += len(runner.plan.prefixes) if runner.plan else 0
        check(runner)

    ChunkRunner.check = checked
    yield found


WATCHED = {"GRAPHS": graphs, "PREFIXES": prefixes}


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
    asked = next((name for name in WATCHED if name in os.environ), "")
    with WATCHED.get(asked, nullcontext)() as found:
        launch.main(method, list(args))
    if asked:
        path = Path(os.environ[asked], f"{asked.lower()}-{os.environ['RANK']}.json")
        path.write_text(json.dumps(found))
