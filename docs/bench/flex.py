"""
Cost of FlexAttention for a packed batch: the block mask of a layout, and whether its backward runs.

    python docs/bench/flex.py
    python docs/bench/flex.py --tokens 4096 16384 --rows 32

Every batch has its own layout, so it needs its own mask. Torch builds the mask from a function of a query and a key,
evaluated on all pairs of tokens. One thread; one process per measurement, so that its peak resident memory is that of
the measurement.
"""

import argparse
import multiprocessing
import resource
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trl_padfix import Layout, padding_free_layout, prefix_sharing_layout


def pairs(tokens: int, rows: int) -> Layout:
    """Rows in pairs that share a prompt of 3/4 of their length, with about `tokens` distinct tokens in all."""
    # A pair of rows of length n has n + n / 4 = 5n / 4 distinct tokens.
    length = tokens * 4 // (5 * rows // 2)
    ids = torch.randint(0, 150_000, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[1::2, : length * 3 // 4] = ids[::2, : length * 3 // 4]
    return prefix_sharing_layout(ids, torch.ones_like(ids))


def documents(tokens: int, rows: int) -> Layout:
    """Rows of one length without shared prefixes."""
    return padding_free_layout(torch.ones(rows, tokens // rows, dtype=torch.int64))


def visible(layout: Layout):
    """Function that tells whether a query attends to a key: on the path of its segment, and not after the query."""
    lengths, T = torch.tensor(layout.query_lengths), layout.packed_tokens
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    keys = torch.arange(T) if layout.key_index is None else layout.key_index
    on_path = torch.zeros(len(lengths), T, dtype=torch.bool)
    on_path[torch.arange(len(lengths)).repeat_interleave(torch.tensor(layout.key_lengths)), keys] = True
    positions = layout.positions
    return lambda b, h, q, k: on_path[segment[q], k] & (positions[k] <= positions[q])


def measure(kind: str, tokens: int, rows: int, results: "multiprocessing.Queue") -> None:
    torch.set_num_threads(1)
    layout = {"documents": documents, "paths": pairs}[kind](tokens, rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    T = layout.packed_tokens
    mask = create_block_mask(visible(layout), None, None, T, T, device="cpu")
    seconds = time.perf_counter() - begin
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    begin = time.perf_counter()
    {"documents": documents, "paths": pairs}[kind](tokens, rows)
    layout_seconds = time.perf_counter() - begin
    results.put((T, seconds, layout_seconds, more / 2**10, 1 - float(mask.sparsity()) / 100))


def backward() -> str:
    """Error of the backward of compiled FlexAttention on a CPU, or "runs"."""
    states = [torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3)]
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu")
    try:
        torch.compile(flex_attention)(*states, block_mask=mask).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return "runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for kind in ("documents", "paths"):
        for tokens in options.tokens:
            results = context.Queue()
            process = context.Process(target=measure, args=(kind, tokens, options.rows, results))
            process.start()
            process.join()
            if process.exitcode:
                print(f"{kind}, {tokens:,} tokens: ended with exit code {process.exitcode}")
                continue
            T, seconds, layout_seconds, more, computed = results.get()
            print(
                f"{kind}, {T:,} tokens: block mask {seconds:.2f} s and {more:,.0f} MiB "
                f"({more * 2**20 / T**2:.0f} bytes for each pair of tokens), layout {1e3 * layout_seconds:.1f} ms; "
                f"{computed:.0%} of the blocks are computed"
            )
    print(f"backward of compiled FlexAttention on a CPU: {backward()}")


if __name__ == "__main__":
    main()
