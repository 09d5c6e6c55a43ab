"""
Host time of building a layout, in microseconds per thousand real tokens: `python benchmarks/layout_time.py`.

Pairs of rows share a prompt, and all rows share a system prompt. The median of 20 builds counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from trl_padfix import padding_free_layout, prefix_sharing_layout


PAIRS = (4, 16, 64)
"""Numbers of pairs in a batch."""

SYSTEM, PROMPT, ANSWER = 64, (20, 200), (20, 300)
"""Tokens of the system prompt, of the prompts and of the answers."""


def pairs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of `count` chosen rows and as many rejected ones, padded on the right."""
    torch.manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(1, 30_000, (length,))

    system = draw(SYSTEM)
    prompts = [draw(int(torch.randint(*PROMPT, ()))) for _ in range(count)]
    rows = [torch.cat([system, p, draw(int(torch.randint(*ANSWER, ())))]) for p in prompts * 2]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, (ids > 0).long()


def microseconds(build: Callable[[], object], tokens: int) -> float:
    """Median time of a build per thousand tokens."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        build()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e9 / tokens


def main() -> None:
    for count in PAIRS:
        ids, mask = pairs(count)
        tokens = int(mask.sum())
        free = microseconds(lambda mask=mask: padding_free_layout(mask), tokens)
        shared = microseconds(lambda ids=ids, mask=mask: prefix_sharing_layout(ids, mask), tokens)
        print(f"{count:3} pairs, {tokens:6} tokens: padding-free {free:5.0f}, sharing {shared:5.0f} microseconds")


if __name__ == "__main__":
    main()
