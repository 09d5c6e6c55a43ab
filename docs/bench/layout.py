"""
Time to build the layout of a large branching batch, and memory beside its index maps.

    python docs/bench/layout.py
    python docs/bench/layout.py --rows 512 --length 8000 --repeat 20

The batch is a tree: all rows share a prefix, groups of them share a longer one, and each row has its own end. One
thread; the fastest of several builds, because other work on the machine can only add time.
"""

import argparse
import time
import tracemalloc
from functools import partial

import torch

from trl_padfix import padding_free_layout, prefix_sharing_layout


def tree(rows: int, length: int, branches: int = 8) -> torch.Tensor:
    """Ids of rows that fork at 1/4 and 2/4 of their length into `branches`, and at 3/4 into single rows."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 150_000, (rows, length), generator=draw)
    quarter = length // 4
    ids[:, :quarter] = ids[0, :quarter]
    for begin, size in ((quarter, -(-rows // branches)), (2 * quarter, -(-rows // branches**2))):
        for first in range(0, rows, size):
            ids[first : first + size, begin : begin + quarter] = ids[first, begin : begin + quarter]
    return ids[torch.randperm(rows, generator=draw)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=8000)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = tree(options.rows, options.length)
    ragged = torch.ones_like(ids)
    ragged[:, -options.length // 50 :] = (torch.rand(options.rows, options.length // 50) < 0.5).sort(1, True)[0].long()
    full = torch.ones_like(ids)
    left = ragged.flip(1)
    rolled = ids.gather(1, (torch.arange(options.length) - left.argmax(1, keepdim=True)) % options.length)
    batches = {"full": (ids, full), "padded right": (ids, ragged), "padded left": (rolled, left)}
    for name, (batch, mask) in batches.items():
        builds = {
            "prefix sharing": partial(prefix_sharing_layout, batch, mask),
            "padding-free": partial(padding_free_layout, mask),
        }
        for kind, build in builds.items():
            seconds = []
            for _ in range(options.repeat):
                begin = time.perf_counter()
                layout = build()
                seconds.append(time.perf_counter() - begin)
            tracemalloc.start()
            build()
            peak = tracemalloc.get_traced_memory()[1]  # of numpy; torch allocates only the maps
            tracemalloc.stop()
            print(
                f"{name}, {kind}: best {1e3 * min(seconds):.1f} ms of {options.repeat}, {layout.real_tokens:,} real, "
                f"{layout.packed_tokens:,} distinct tokens, {peak / layout.real_tokens:.0f} bytes of numpy per token"
            )


if __name__ == "__main__":
    main()
