"""
Micro-batches whose prefixes are computed once, by two processes that share every row, against one forward of one.

[`main`] prints a line of JSON for each model: the largest difference of a log-probability and of a gradient (the mean
over processes, relative to the parameter's or to 1 % of the largest one), and the tokens that entered the layers.
`BROKEN` is `exit`, or `prefixes`: the negative controls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from kit.observe import entered_tokens
from kit.split_runs import average, break_it, difference, take_gradients, tell
from torch import nn
from torch.nn.functional import pad
from zoo.families import build as build_family
from zoo.models import batch, build

from trl_padfix import remove_padding, split_rows
from trl_padfix.core.call.prefix_states import PrefixStates
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.trainers.batching.prefix_schedule import ChunkRunner


__all__: list[str] = []

PARTS = ([[4], [0], [5, 1], [2], [3, 6]], [[0, 2], [1, 3], [4, 5], [6]], [[0, 0], [0], [4]], [[0, 0], [0, 1], [1]])
"""Rows of micro-batches: depth first, nested, and micro-batches that compute nothing of their own."""

FEW = ([1, 14, 2], [14, 1, 3])
"""Columns of the last of [`PARTS`], all of them and these: tokens that two processes cannot share."""


def logps_of(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of each token in place of the next one, so that a row of one token has a value, too."""
    logps = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    return logps.gather(2, ids[:, :, None]).squeeze(2) * mask


def make(name: str) -> nn.Module:
    if name == "qwen3_5_text":
        return build_family(name)
    return build(name, "eager" if name == "gpt_oss" else "sdpa")


def steps() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Micro-batches of ids and masks."""
    ids, mask = batch("mixed")
    steps = [[(ids[part], mask[part]) for part in parts] for parts in PARTS]
    ids, mask = batch("right")
    return steps + [[(ids[part, :n], mask[part, :n]) for part, n in zip(PARTS[-1], few, strict=True)] for few in FEW]


def differences(name: str) -> Iterator[dict[str, Any]]:
    for batches in steps():
        for budget in (10**6, 12):  # prefixes are kept, or computed again
            model = make(name).train()
            want = [logps_of(model, *rows) for rows in batches]
            sum((logps.sum(1) / 5).sin().sum() for logps in want).backward()
            expected, got = take_gradients(model), []
            plan = planning.plan_shared_prefixes(batches, budget)
            assert plan is not None
            with remove_padding(model, prefix_sharing=True) as handle, attach_runner_patch(model):
                split_rows(handle)
                entered = entered_tokens(model)
                runner = ChunkRunner(len(batches), plan)
                with within(runner=runner):
                    for i, rows in enumerate(batches):
                        runner.start(i, *rows)
                        got.append(logps_of(model, *rows))
                        (got[-1].sum(1) / 5).sin().sum().backward()
                    runner.check()
            average(found := take_gradients(model))
            width = max(ids.shape[1] for ids, _ in batches)
            columns = zip(*batches, strict=True)
            joined = (torch.cat([pad(x, (0, width - x.shape[1])) for x in column]) for column in columns)
            again = sum(prefix.tokens for prefix in plan.prefixes.values() if prefix.recompute)
            yield {
                "values": max((a - b).abs().max().item() for a, b in zip(got, want, strict=True)),
                "gradients": difference(found, expected),
                "entered": sum(entered),
                "distinct": prefix_sharing_layout(*joined).packed_tokens + again,
                "filler": handle.stats.filler_tokens,
            }


def main(*names: str) -> None:
    dist.init_process_group("gloo")
    planning.MIN_SAVED_TOKENS = 1  # every shared prefix has a forward of its own
    broken = os.environ.get("BROKEN", "")
    break_it(broken)
    if broken == "prefixes":  # values are those of other tokens
        prepend = PrefixStates.prepend_kv

        def wrong(self: PrefixStates, module: Any, key: torch.Tensor, value: torch.Tensor) -> Any:
            key, values = prepend(self, module, key, value)
            return key, values.roll(1, 2) if self.reads else values

        PrefixStates.prepend_kv = wrong  # type: ignore[method-assign]
    for name in names:
        for case in differences(name):
            tell(case | {"case": name}, "entered")
