"""
Compiled decoder layers of two processes that share every row, against the padded forward of one process.

[`main`] prints a line of JSON: the largest differences, and the graphs that were compiled.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from kit.observe import entered_tokens
from kit.split_runs import break_it
from zoo.gpu_models import build, step

from trl_padfix import remove_padding, split_rows
from trl_padfix.core.attention.compiled import compile_layers


__all__: list[str] = []


def batch_of(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of a long and a short pair that begin alike: no two batches have a shape in common."""
    draw = torch.Generator().manual_seed(n)
    ids = torch.randint(1, 96, (4, 24 + 5 * n), generator=draw)
    ids[2:, :9] = ids[:2, :9]
    lengths = torch.tensor([[24 + 5 * n], [12 + n], [20 + 4 * n], [11]])
    return ids, (torch.arange(ids.shape[1]) < lengths).long()


def run(backend: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    padded, model = build().train(), build().train()
    entered = entered_tokens(model)
    split_rows(handle := remove_padding(model, prefix_sharing=True))
    uncompiled = compile_layers(handle, backend=backend)
    losses, gradients = [], []
    for ids, mask in map(batch_of, range(5)):
        handle.stats.reset()
        want, got = step(padded, ids, mask), step(model, ids, mask)
        dist.all_reduce(got[1])
        losses.append(float(((got[0] - want[0]) * mask[:, 1:]).abs().max()))
        gradients.append(float((got[1] / dist.get_world_size() - want[1]).norm() / want[1].norm()))
    counters = torch._dynamo.utils.counters
    return {
        "uncompiled": uncompiled,
        "log-probabilities": max(losses),
        "gradients": max(gradients),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "tokens": (entered[0], handle.stats.packed_tokens),  # of the last batch
    }


def main(backend: str) -> None:
    dist.init_process_group("gloo")
    break_it(os.environ.get("BROKEN", ""))
    found = run(backend)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
