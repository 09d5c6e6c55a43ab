"""
Time of the host for the prefix trees of rollouts: TRL's trie of Python dictionaries against our sorted bytes.

    python benchmarks/rollout_rows.py
    python benchmarks/rollout_rows.py --samples 64 --tokens 5100 --group 8 --repeat 5

Samples of a group share a third of their tokens. Both build the same packed rows, which is asserted; medians in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

from trl_padfix.experimental import rollout_rows


def drawn_samples(count: int, tokens: int, group: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    samples = []
    for i in range(count):
        if i % group == 0:
            prompt = draw.integers(0, 50_000, tokens // 3)
        ids = np.concatenate([prompt, draw.integers(0, 50_000, tokens - len(prompt))])
        mask = np.arange(tokens) >= len(prompt)
        sample = {"input_ids": ids, "completion_mask": mask.astype(int), "old_log_probs": np.zeros(tokens, np.float32)}
        samples.append(sample | {"advantage": 1.0, "group_id": i // group, "metrics": {}})
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"samples": 64, "tokens": 5100, "group": 8, "repeat": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    samples = drawn_samples(given.samples, given.tokens, given.group)
    seconds: dict[type, list[float]] = {TokenBudgetBatcher: [], rollout_rows.TokenBudgetBatcher: []}
    for _ in range(given.repeat):
        found = []
        for batcher, times in seconds.items():
            begin = time.perf_counter()
            dropped: dict[str, list[float]] = {"batch/dropped_oversize_total": []}
            batches = batcher(samples, 1, given.tokens * given.group, dropped)
            found.append([row.pack() for rows in batches for row in rows])
            times.append(time.perf_counter() - begin)
        theirs, ours = found
        for expected, row in zip(theirs, ours, strict=True):
            assert all(torch.equal(expected[name], row[name]) for name in expected if torch.is_tensor(expected[name]))
    trl, sorted_bytes = (statistics.median(times) for times in seconds.values())
    print(
        f"{given.samples * given.tokens:,} tokens in {given.samples} samples, {len(theirs)} rows: TRL {trl:.2f} s, "
        f"ours {sorted_bytes:.3f} s ({trl / sorted_bytes:.0f}x)"
    )


if __name__ == "__main__":
    main()
