"""
Time and memory of a step under a token budget: shared prefixes once per step, or again in each micro-batch.

    python docs/bench/once.py --repeat 5

Two steps: GRPO's loss on 32 completions of 128 tokens to one prompt of 1,024, and a row for each turn of 8 tasks x
4 rollouts x 4 turns after a system prompt. Each is computed in one forward, and with budgets that are a fraction of
its distinct tokens. All ways take turns, because the speed of a machine changes. Memory is what graphs save for
backward.
"""

import argparse
import contextlib
import statistics
import time
import weakref

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix import PaddingStats, remove_padding
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.core.layout.shared_prefixes import plan_shared_prefixes
from trl_padfix.trainers.batching.bin_packing import pack_by_budget, pack_depth_first
from trl_padfix.trainers.batching.prefix_groups import sort_by_prefix
from trl_padfix.trainers.batching.prefix_schedule import MicroBatchRunner
from trl_padfix.trainers.batching.token_costs import prefix_costs


VOCABULARY = 1000
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.05,
}  # fmt: skip


def group(prompt: int = 1024, completions: int = 32, length: int = 128) -> tuple[list[torch.Tensor], list[int]]:
    """Rows, and the column in each at which its scored tokens begin."""
    draw = torch.Generator().manual_seed(0)
    root = torch.randint(1, VOCABULARY, (prompt,), generator=draw)
    first = torch.arange(1, completions + 1)
    rest = torch.randint(1, VOCABULARY, (completions, length - 1), generator=draw)
    return [torch.cat([root, f[None], r]) for f, r in zip(first, rest, strict=True)], [prompt] * completions


def turns(system: int = 200, tasks: int = 8, rollouts: int = 4, turns: int = 4, turn: int = 20) -> tuple:
    """Rows and columns as of [`group`], with a row for each turn."""
    draw = torch.Generator().manual_seed(0)

    def text(n: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (n,), generator=draw)

    root, rows, begins = text(system), [], []
    for _ in range(tasks):
        task = torch.cat([root, text(turn)])
        for _ in range(rollouts):
            row = task
            for _ in range(turns):
                begins.append(len(row))
                row = torch.cat([row, text(turn)])
                rows.append(row)
    return rows, begins


class Kept:
    """Peak of the bytes that graphs save for backward: each storage once, without parameters."""

    def __init__(self, model: torch.nn.Module):
        self.now = self.peak = 0
        self.counts = {p.untyped_storage().data_ptr(): 1 for p in model.parameters()}

    def _release(self, place: int, size: int) -> None:
        self.counts[place] -= 1
        if not self.counts[place]:
            del self.counts[place]
            self.now -= size

    @contextlib.contextmanager
    def metered(self):
        class Held:
            def __init__(self, x: torch.Tensor):
                self.x = x

        def pack(x: torch.Tensor) -> Held:
            held, place, size = Held(x), x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
            if place not in self.counts:
                self.counts[place] = 0
                self.now += size
                self.peak = max(self.peak, self.now)
            self.counts[place] += 1
            weakref.finalize(held, self._release, place, size).atexit = False
            return held

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.x):
            yield


def loss_of(model, ids, mask, begins, rows, old) -> torch.Tensor:
    """GRPO's loss of some rows: clipped ratios, averaged per row. The LM head scores the completions only."""
    hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    scored = (torch.arange(ids.shape[1]) >= begins[:, None]) & mask.bool()
    row, column = scored[:, 1:].nonzero(as_tuple=True)
    scores = torch.nn.functional.linear(hidden[row, column], model.get_input_embeddings().weight)
    logps = scores.log_softmax(-1).gather(1, ids[row, column + 1, None]).squeeze(1)
    ratio, advantage = (logps - old).exp(), torch.sin(rows.float())[row]
    each = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (each / scored[:, 1:].sum(1)[row]).sum()


def step(model, data, parts, budget, once):
    """Compute a step in the micro-batches `parts`; returns its seconds."""
    begin = time.perf_counter()
    rows, begins = data
    batches = []
    for part in parts:
        ids = pad_sequence([rows[r] for r in part], batch_first=True)
        lengths = torch.tensor([len(rows[r]) for r in part])
        batches.append((ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()))
    planned = plan_shared_prefixes(batches, budget) if once else None
    run = MicroBatchRunner(len(batches), planned, batches) if planned is not None else None
    with within(runner=run):
        for i, (part, (ids, mask)) in enumerate(zip(parts, batches, strict=True)):
            if run is not None:
                run.start(i)
            numbers = torch.tensor(part)
            loss_of(model, ids, mask, torch.tensor(begins)[numbers], numbers, -6.0).backward()
    return time.perf_counter() - begin


def gradient(model) -> torch.Tensor:
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


def ways_of(rows: list[torch.Tensor], shares: tuple[int, ...]) -> dict[tuple[str, int], tuple[list, int, bool]]:
    """Arguments of [`step`] by the way to compute, and by the share of the distinct tokens that is the budget."""
    each = np.array([len(row) for row in rows])
    costs = prefix_costs(each, each, *sort_by_prefix([row.numpy() for row in rows]))
    distinct = costs.total()
    ways = {("one forward", 1): ([list(range(len(each)))], distinct, False)}
    for share in shares:
        budget = distinct // share
        ways["anew", share] = pack_by_budget(costs, budget), budget, False
        ways["once", share] = pack_depth_first(costs, budget), budget, True
    return ways


def measure(name: str, model, stats: PaddingStats, data: tuple, shares: tuple[int, ...], repeat: int) -> None:
    ways = ways_of(data[0], shares)
    one_forward = ("one forward", 1)
    kept, computed, gradients = {}, {}, {}
    for way, arguments in ways.items():
        meter, before = Kept(model), stats.packed_tokens
        with meter.metered():
            step(model, data, *arguments)
        kept[way], computed[way] = meter.peak / 2**20, stats.packed_tokens - before
        gradients[way] = gradient(model)
    seconds = {way: [] for way in ways}
    for _ in range(repeat):
        for way, arguments in ways.items():
            seconds[way].append(step(model, data, *arguments))
            model.zero_grad()
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    expected = gradients[one_forward]
    for way, second in medians.items():
        how, share = way
        anew = medians.get(("anew", share))
        off = float((gradients[way] - expected).abs().max() / expected.abs().max())
        print(
            f"{name:17} {how:11} 1/{share:<2} {len(ways[way][0]):3} micro-batches, "
            f"{computed[way]:6} tokens of {ways[one_forward][1]}, {second:6.2f} s "
            f"({second / medians[one_forward]:4.2f} of one forward{f', {anew / second:4.2f}x' if anew else ''}), "
            f"keeps {kept[way]:6.1f} MiB ({kept[way] / kept[one_forward]:4.2f}), gradient off {off:.0e}",
            flush=True,
        )


def main(repeat: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, attn_implementation="sdpa")).train().model
    with remove_padding(model, prefix_sharing=True) as handle, attach_runner_patch(model):
        measure("1,024 + 32 x 128", model, handle.stats, group(), (2, 4, 8), repeat)
        measure("8 x 4 x 4 turns", model, handle.stats, turns(), (10,), repeat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each way; their median is printed")
    main(parser.parse_args().repeat)
