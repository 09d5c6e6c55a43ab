"""
What a step on packed rows holds, sends and takes, where several processes compute each row.

    torchrun --nproc-per-node 2 benchmarks/split_rows.py --attention heads --rows 4 --tokens 1024
    python benchmarks/split_rows.py --rows 4 --tokens 1024  # one process, for comparison
    python benchmarks/split_rows.py --compare --hidden 256 --steps 5  # one process, and two, on a core each

A tiny Qwen2 on a CPU, the loss of SFT. Kept for backward: each storage once, without weights, counted by hooks. Sent:
counted at the collective, beside the formula of docs/many_gpus.md. Seconds are the median of the steps, each process
on a core of its own where there are as many; the share of communication is that of as many steps more, in which
processes meet before each exchange, so that no waiting for the other one's attention is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import distributed
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head

from trl_padfix import remove_padding, split_rows
from trl_padfix.core.parallel import collectives


class Traffic:
    """Bytes that this process gives to others, and the time that it takes."""

    def __init__(self) -> None:
        self.sent, self.seconds, self.meets, self._exchange = 0, 0.0, False, collectives.distributed.all_to_all_single
        collectives.distributed.all_to_all_single = self  # type: ignore[assignment]

    def __call__(self, out: Any, flat: torch.Tensor, receive: list[int], send: list[int], group: Any) -> None:
        if self.meets:
            distributed.barrier(group)
        start = time.perf_counter()
        self._exchange(out, flat, receive, send, group=group)
        self.seconds += time.perf_counter() - start
        self.sent += (sum(send) - send[distributed.get_rank(group)]) * flat.element_size()


class Kept:
    """Bytes of the storages that backward is to find again, weights left out."""

    def __init__(self, model: Any):
        self.weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        self.storages: dict[int, int] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return x


def formula(args: argparse.Namespace, tokens: int, n: int) -> float:
    """Bytes that attention sends in a forward and its backward, on average over the processes."""
    N, K, D = args.heads, args.kv_heads, args.hidden // args.heads
    if args.attention == "keys":
        numbers = 2 * K * D * tokens * (n - 1) / n
    else:
        copies = next((c for c in range(1, N // K + 1) if N % (K * c) == 0 and K * c % n == 0), N // K)
        numbers = 2 * (N + K * copies) * D * tokens * (n - 1) / n**2
    return 4 * args.layers * numbers * (3 if args.checkpointing else 2)


def compare() -> None:
    """A step of one process on one core, and of two on one core each."""
    given = [arg for arg in sys.argv[1:] if arg != "--compare"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher, how in (([], []), (two, ["--attention", "heads"]), (two, ["--attention", "keys"])):
        command = [sys.executable, *launcher, __file__, *given, *how]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=["heads", "keys"], default="heads")
    for name, default in {"rows": 4, "tokens": 1024, "shared": 0, "layers": 2, "hidden": 128, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--limit-mib", type=float, help="what a process may keep for backward")
    parser.add_argument("--compare", action="store_true", help="one process on a core, and two on one core each")
    args = parser.parse_args()
    if args.compare:
        return compare()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    n = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=1 << 20,
    )
    model: Any = Qwen2ForCausalLM(config).train()
    add_fused_lm_head(model)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = remove_padding(model, prefix_sharing=args.shared > 0)
    if n > 1:
        distributed.init_process_group("gloo")
        split_rows(handle, attention=args.attention)
    ids = torch.randint(1, 2048, (args.rows, args.tokens))
    ids[:, : args.shared] = ids[:1, : args.shared]
    mask = torch.ones_like(ids)
    mask[:, -1] = torch.arange(args.rows) == 0  # rows of two lengths, so that there is something to remove
    traffic, seconds, exchanging = Traffic(), [], []
    for step in range(args.steps * (2 if n > 1 else 1)):
        traffic.meets = step >= args.steps
        traffic.sent, traffic.seconds, kept = 0, 0.0, Kept(model)
        handle.stats.reset()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x):
            loss = model(ids, attention_mask=mask, labels=ids, fused_lm_head=True).loss
        loss.backward()
        model.zero_grad()
        (exchanging if traffic.meets else seconds).append(
            traffic.seconds if traffic.meets else time.perf_counter() - start
        )
    tokens, mib = handle.stats.packed_tokens, sum(kept.storages.values()) / 2**20
    found = {
        "processes": n,
        "attention": args.attention if n > 1 else None,
        "packed_tokens": tokens,
        "kept_mib": round(mib, 2),
        "fits": None if args.limit_mib is None else mib <= args.limit_mib,
        "sent_mib": round(traffic.sent / 2**20, 3),
        "formula_mib": round(formula(args, tokens, n) / 2**20, 3),
        "seconds": round(statistics.median(seconds), 3),
        "share_of_communication": round(statistics.median(exchanging) / statistics.median(seconds), 3) if n > 1 else 0,
        "loss": round(loss.item(), 5),
    }
    every: list[Any] = [None] * n
    if n > 1:
        distributed.all_gather_object(every, found)
    if int(os.environ.get("RANK", "0")) == 0:
        most = max(every, key=lambda one: one["kept_mib"]) if n > 1 else found
        print(json.dumps(most))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
