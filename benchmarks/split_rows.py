"""
Memory, communication and time of a step under context parallelism: several processes compute each packed row.

    torchrun --nproc-per-node 2 benchmarks/split_rows.py --rows 4 --tokens 1024
    python benchmarks/split_rows.py --rows 4 --tokens 1024  # one process, for comparison
    python benchmarks/split_rows.py --compare --hidden 256 --steps 5  # one process, and two, on a core each
    torchrun --nproc-per-node 4 benchmarks/split_rows.py --rows 4 --tokens 32768 --shared 24576 --hidden 32 \\
        --steps 1 --loss dpo --save gradients.pt  # without torchrun it saves the same gradients

A tiny Qwen2 on a CPU, with the loss of SFT, or of DPO without a reference. `kept_mib`: storages saved for backward,
without weights. `sent_mib`: counted at the collective, beside its formula. `seconds`: median of the steps, each
process on its own core if there are enough. `share_of_communication`: measured in as many further steps, with a
barrier before each exchange, so that the time does not include waiting for the attention of other processes.
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
from trl_padfix.tools.bench.steps import saved_storages


class Traffic:
    """Replaces the all-to-all: counts the bytes that this process sends to others, and their time."""

    def __init__(self) -> None:
        self.sent, self.seconds, self.has_barrier = 0, 0.0, False
        self._exchange = collectives.distributed.all_to_all_single
        collectives.distributed.all_to_all_single = self  # type: ignore[assignment]

    def __call__(self, out: Any, flat: torch.Tensor, receive: list[int], send: list[int], group: Any) -> None:
        if self.has_barrier:
            distributed.barrier(group)
        start = time.perf_counter()
        self._exchange(out, flat, receive, send, group=group)
        self.seconds += time.perf_counter() - start
        self.sent += (sum(send) - send[distributed.get_rank(group)]) * flat.element_size()


def formula(args: argparse.Namespace, tokens: int, n: int) -> float:
    """Bytes that attention sends in a step: mean over the processes, recomputed forwards included."""
    N, K, D = args.heads, args.kv_heads, args.hidden // args.heads
    # KV heads are repeated until the processes divide them, as in `trl_padfix.core.parallel.attention`.
    copies = next((c for c in range(1, N // K + 1) if N % (K * c) == 0 and K * c % n == 0), N // K)
    numbers = 2 * (N + K * copies) * D * tokens * (n - 1) / n**2
    # 4 bytes of a float32; forward and backward, and the forward again under checkpointing.
    return 4 * args.layers * numbers * (3 if args.checkpointing else 2)


def dpo_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """The first half of the rows is chosen, the second rejected; the reference is uniform."""
    chosen, rejected = log_probs.sum(1).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def compare() -> None:
    """Run a step of one process on one core, and of two processes on one core each."""
    arguments = [arg for arg in sys.argv[1:] if arg != "--compare"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher in ([], two):
        command = [sys.executable, *launcher, __file__, *arguments]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 4, "tokens": 1024, "shared": 0, "layers": 2, "hidden": 128, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--short", type=int, nargs=2, default=(0, 0), metavar=("N", "TOKENS"), help="N shorter rows")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--loss", choices=["sft", "dpo"], default="sft")
    parser.add_argument("--save", help="file for the loss, and the gradient of each parameter")
    parser.add_argument("--limit-mib", type=float, help="most that a process may save for backward")
    parser.add_argument("--compare", action="store_true", help="one process on a core, and two on one core each")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, max_position_embeddings=1 << 20,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config).train()
    add_fused_lm_head(model)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_batch(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Rows of two lengths, so that there is padding, some of them with a shared prefix; and the shorter ones."""
    ids = torch.randint(1, 2048, (args.rows + args.short[0], args.tokens))
    ids[: args.rows, : args.shared] = ids[:1, : args.shared]
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    mask[args.rows :, args.short[1] :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def use_one_core() -> None:
    """Compute on one core, if there are enough another one in each process."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    torch.set_num_threads(1)


def main() -> None:
    args = parse_arguments()
    if args.compare:
        return compare()
    use_one_core()
    logging.set_verbosity_error()
    n, is_main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    model, batch = build_model(args), build_batch(args)
    handle = remove_padding(model, prefix_sharing=args.shared > 0)
    if n > 1:
        distributed.init_process_group("gloo")
        split_rows(handle)
    traffic, seconds, exchanging = Traffic(), [], []
    for step in range(args.steps * (2 if n > 1 else 1)):
        traffic.has_barrier = step >= args.steps
        traffic.sent, traffic.seconds = 0, 0.0
        handle.stats.reset()
        start = time.perf_counter()
        with saved_storages([*model.parameters(), *model.buffers()]) as saved:
            output = model(**batch, fused_lm_head=True)
            loss = output.loss if args.loss == "sft" else dpo_loss(output.log_probs)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        if traffic.has_barrier:
            exchanging.append(traffic.seconds)
        else:
            seconds.append(time.perf_counter() - start)
    if n > 1:
        for gradient in gradients.values():  # as DDP and FSDP2 do
            distributed.all_reduce(gradient)
            gradient /= n
    if args.save and is_main:
        torch.save({"loss": loss.detach(), "gradients": gradients}, args.save)
    tokens, mib = handle.stats.packed_tokens, sum(storage.nbytes() for storage in saved.values()) / 2**20
    figures = {
        "processes": n,
        "packed_tokens": tokens,
        "kept_mib": round(mib, 2),
        "fits": None if args.limit_mib is None else mib <= args.limit_mib,
        "sent_mib": round(traffic.sent / 2**20, 3),
        "formula_mib": round(formula(args, tokens, n) / 2**20, 3),
        "seconds": round(statistics.median(seconds), 3),
        "share_of_communication": round(statistics.median(exchanging) / statistics.median(seconds), 3) if n > 1 else 0,
        "loss": round(loss.item(), 5),
    }
    all_figures: list[Any] = [figures]
    if n > 1:
        all_figures = [None] * n
        distributed.all_gather_object(all_figures, figures)
    if is_main:
        print(json.dumps(max(all_figures, key=lambda f: f["kept_mib"])))
    sys.stdout.flush()
    os._exit(0)  # without the threads of gloo, which can hang at exit


if __name__ == "__main__":
    main()
