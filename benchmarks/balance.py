"""
How much longer the slowest process works than the mean, on rows as drawn and dealt evenly.

    python benchmarks/balance.py DATA.jsonl.gz

A simulation: no step runs. Each process gets equally many rows of a step, drawn at random. The work of a process is
the cost of its packed tokens, `n + quadratic * n * n` for a row of `n`. Communication, differences between GPUs and
waits of the host are left out. The tokenizer is trained on the texts of the data.
"""

from __future__ import annotations

import argparse

import numpy as np

from trl_padfix.tools.data import load_rows
from trl_padfix.tools.stats import measure
from trl_padfix.tools.tiny import texts_of, train_tokenizer
from trl_padfix.trainers.batching.bin_packing import RowCosts
from trl_padfix.trainers.batching.row_order import Batches


PROCESSES, ROWS, DRAWS = (8, 64, 512), (8, 32), 50


def slowest_over_mean(costs: RowCosts, batches: Batches, order: np.ndarray) -> float:
    """The largest cost of a process over the mean of all, for the rows of one step."""
    parts = np.split(order, batches.processes)
    work = [costs.total(rows) + batches.quadratic * (costs.tokens[rows] ** 2.0).sum() for rows in parts]
    return max(work) / np.mean(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="rows with `chosen` and `rejected`, or of another trainer")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--hidden_size", type=int, default=896, help="of the model whose attention costs are counted")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--prefix_sharing", action="store_true")
    given = parser.parse_args()
    dataset = load_rows(given.data)
    lengths = measure(dataset, train_tokenizer(texts_of(dataset), given.vocab_size)).truncated(given.max_length)
    costs, draw = lengths.costs(given.prefix_sharing), np.random.default_rng(0)
    print(f"{len(costs)} rows, {given.vocab_size} tokens, {DRAWS} draws; slowest process over the mean")
    print("| processes x rows | as drawn | dealt evenly |\n|---|---|---|")
    for processes in PROCESSES:
        for rows in ROWS:
            batches = Batches(rows, processes, quadratic=1 / (12 * given.hidden_size))
            found = []
            for _ in range(DRAWS):
                order = draw.choice(len(costs), rows * processes, replace=rows * processes > len(costs))
                dealt = batches.permuted(order, costs, is_grouped=False)
                found.append([slowest_over_mean(costs, batches, o) for o in (order, dealt)])
            drawn, even = np.mean(found, axis=0)
            print(f"| {processes} x {rows} | {drawn:.2f} | {even:.2f} |")


if __name__ == "__main__":
    main()
