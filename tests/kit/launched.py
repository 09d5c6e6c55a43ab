"""
What the tests of many processes launch: `trl_padfix.cli.launch`, on a machine without a GPU.

accelerate shards models over the devices that it knows, and processes on CPU are none to it: with `use_cpu` they get
DDP, whatever was asked for. Where `ACCELERATE_TORCH_DEVICE` is `cpu` they pass for GPUs here, which talk through gloo.

`BROKEN_LAYOUT=1` takes tokens of other prefixes for shared ones: the negative control. `PLAIN_TRL=1` runs TRL's own
script instead. `GRAPHS=FOLDER` writes there what each process has compiled. `ODD_BATCH=1` gives processes that share
batches different ones. `TRUNKS=FOLDER` computes prefixes of any length once in a step, and writes there how many
of them each process has; `TOKENS=FOLDER` what each process computes of packed rows.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


if __name__ == "__main__":  # a script sees its own folder only
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.processes import leave
from kit.split_runs import counted
from kit.trainer_runs import confusing_layout

from trl_padfix.cli.launch import main
from trl_padfix.core.call import layout_of as batches


def write_graphs(folder: Path, calls: list[int]) -> None:
    """The graphs that this process has compiled, at the end and halfway, their breaks, and the calls of layers."""
    counters = torch._dynamo.utils.counters
    found = {
        "unique_graphs": counters["stats"]["unique_graphs"],
        "halfway": calls[len(calls) // 2],
        "breaks": dict(counters["graph_break"]),
        "calls": len(calls),
    }
    (folder / f"graphs-{os.environ['RANK']}.json").write_text(json.dumps(found))


def count_calls() -> list[int]:
    """A list that grows with every call of a compiled layer, by the graphs that there are."""
    from trl_padfix.core.attention.compiled import CompiledLayerPatch

    calls, twin = [], CompiledLayerPatch._twin
    counters = torch._dynamo.utils.counters
    CompiledLayerPatch._twin = lambda patch: (calls.append(counters["stats"]["unique_graphs"]), twin(patch))[1]
    return calls


def count_trunks() -> list[int]:
    """A list that grows with every step of micro-batches that share prefixes, by their number."""
    from trl_padfix.core.layout import pieces
    from trl_padfix.trainers.steps.once import MicroBatches

    pieces.FORWARD = 1
    counts, check = [], MicroBatches.check
    MicroBatches.check = lambda once: (once.planned and counts.append(len(once.planned.trunks)), check(once))[1]
    return counts


def count_from_another_id() -> None:
    """Give one process of two another first token in all of its batches."""
    from trl_padfix.trainers.base import PaddingFreeMixin

    loss = PaddingFreeMixin.compute_loss

    def compute_loss(trainer, model, inputs, *args, **kwargs):
        ids = inputs["input_ids"].clone()
        ids[:, 0] += trainer.accelerator.process_index
        return loss(trainer, model, {**inputs, "input_ids": ids}, *args, **kwargs)

    PaddingFreeMixin.compute_loss = compute_loss


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu":
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    if os.environ.get("BROKEN_LAYOUT"):
        batches.prefix_sharing_layout = confusing_layout
        batches.LayoutKey.misfits = lambda key, layout: torch.zeros(1, dtype=torch.bool)  # nor is it noticed
    if os.environ.get("ODD_BATCH"):
        count_from_another_id()
    method, *args = sys.argv[1:]
    if os.environ.get("PLAIN_TRL"):
        script = importlib.import_module(f"trl.scripts.{method}")
        parsed = script.make_parser().parse_args_and_config(args)
        group = torch.distributed.group.WORLD  # as in `trl_padfix.cli.launch.main`
        script.main(*parsed)
    elif os.environ.get("GRAPHS"):
        calls = count_calls()
        main(method, args)
        write_graphs(Path(os.environ["GRAPHS"]), calls)
    elif os.environ.get("TRUNKS"):
        counts = count_trunks()
        main(method, args)
        (Path(os.environ["TRUNKS"]) / f"trunks-{os.environ['RANK']}.json").write_text(json.dumps(sum(counts)))
    elif os.environ.get("TOKENS"):
        with counted() as counts:
            main(method, args)
        (Path(os.environ["TOKENS"]) / f"tokens-{os.environ['RANK']}.json").write_text(json.dumps(counts))
    else:
        main(method, args)
    leave()
