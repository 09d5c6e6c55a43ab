"""
Time that processes wait for each other: measured in DPO steps, and simulated from token counts of branching rows.

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 docs/bench/waiting.py harmless-base-test.jsonl.gz
    python docs/bench/waiting.py --simulate

Measured: the CPU time of each process's main thread in a step, which excludes waiting. Simulated: the time of a
process is its number of distinct tokens, and it waits for the process with the most in each step (`DDP`) or forward
(`FSDP`).
"""

import sys
import tempfile
import time

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather

from trl_padfix import DPOConfig, DPOTrainer
from trl_padfix.tools.bench.data import load_examples
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer
from trl_padfix.trainers.batching.bin_packing import halve_largest, pack_by_budget
from trl_padfix.trainers.batching.prefix_groups import group_rows, sort_by_prefix
from trl_padfix.trainers.batching.step_plan import StepPlan
from trl_padfix.trainers.batching.token_costs import RowCosts, prefix_costs, truncated_tokens


STEPS, PAIRS, BUDGET = 10, 8, 3597  # BUDGET: tokens of the largest of a thousand such batches


class Timed(DPOTrainer):
    """Records the CPU time of each step."""

    def training_step(self, *args, **kwargs):
        begin = time.thread_time()
        loss = super().training_step(*args, **kwargs)
        self.seconds.append(time.thread_time() - begin)
        return loss


def measure(data, tokenizer, **more) -> tuple[float, float]:
    """Fraction of the time that processes wait, and the time of all steps, each that of its slowest process."""
    args = DPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=PAIRS, padding_free=True,
        prefix_sharing=True, parity_check=False, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        report_to="none", save_strategy="no", logging_steps=STEPS, **more,
    )  # fmt: skip
    policy, reference = (build_qwen2(tokenizer, **SHAPES["small"], seed=seed) for seed in (0, 1))
    trainer = Timed(policy, reference, args, train_dataset=data, processing_class=tokenizer)
    trainer.seconds = []
    trainer.train()
    work = gather(torch.tensor(trainer.seconds[1:], device=args.device).unsqueeze(0))  # the first step warms up
    longest = work.max(0).values.sum().item()
    return 1 - work.mean(0).sum().item() / longest, longest


def main(path: str) -> None:
    torch.set_num_threads(1)
    processes = PartialState().num_processes
    pairs = load_examples(path)
    tokenizer = train_tokenizer((row[side] for row in pairs for side in ("chosen", "rejected")), 8192)
    data = pairs.shuffle(seed=1).select(range(processes * PAIRS * STEPS))
    budget = {"max_tokens_per_batch": BUDGET}
    kinds = {"fixed batches": {}, "token budget": budget, "budget and groups": budget | {"group_by_prefix": True}}
    for name, more in kinds.items():
        waiting, longest = measure(data, tokenizer, **more)
        PartialState().print(f"{name}: {waiting:.1%} waiting, {longest:.1f} s for {STEPS - 1} steps")


def rollouts(tasks: int, draw: np.random.Generator) -> RowCosts:
    """A row for each turn of 4 rollouts per task, about 80 tokens a turn, after one system prompt of 600 tokens."""

    def tokens() -> np.ndarray:
        return draw.integers(0, 30_000, 1 + int(draw.lognormal(np.log(80), 0.6)))

    rows, system = [], draw.integers(0, 30_000, 600)
    for _ in range(tasks):
        task = np.concatenate([system, tokens()])
        for _ in range(4):
            row = task
            for _ in range(draw.integers(4, 13)):
                row = np.concatenate([row, tokens()])
                rows.append(row)
    each = np.array([len(row) for row in rows])
    return prefix_costs(each, each, *sort_by_prefix(rows))


def pairs_of_prompts(prompts: int, draw: np.random.Generator) -> RowCosts:
    """Token counts of three pairs for each prompt."""
    number = np.repeat(np.arange(prompts), 3)
    prompt, chosen, rejected = (
        draw.lognormal(mean, 0.9, count).astype(int).clip(2, 900)
        for mean, count in ((4.6, prompts), (4.2, 3 * prompts), (4.2, 3 * prompts))
    )
    begins = prompt[number]
    each, _ = truncated_tokens(np.stack([begins + chosen, begins + rejected]), begins, max_length=1024)
    common = np.where(np.arange(len(number)) % 3, begins, 0)
    return prefix_costs(each - begins, begins, np.arange(len(number)), common)


def simulate(costs: RowCosts, processes: int, budget: int, grouped: bool, steps: int = 8) -> tuple[float, float]:
    """Fraction of the time that processes wait if they synchronise in each step, and if in each forward."""
    plan = StepPlan(len(costs), micro_batch=8, accumulation_steps=4, processes=processes)
    order = np.random.default_rng(0).permutation(len(costs))
    order = group_rows(order, costs, 32 * processes) if grouped else order
    shares = [share.rows for share in plan.rows_per_process(order[: steps * 32 * processes], costs)]
    computed, longest, forwards = 0, 0, 0
    for begin in range(0, len(shares), processes):
        local_costs = [costs[rows] for rows in shares[begin : begin + processes]]
        partitions = [pack_by_budget(local, budget) for local in local_costs]
        most = max(map(len, partitions))
        # As in a training step: the largest micro-batches are halved until all processes have equally many.
        partitions = [[rows for _, rows in halve_largest(batches, most)] for batches in partitions]
        totals = [list(map(c.total, batches)) for c, batches in zip(local_costs, partitions, strict=True)]
        loads = np.array(totals)  # (processes, micro-batches)
        computed += loads.sum()
        longest += processes * loads.sum(1).max()
        forwards += processes * loads.max(0).sum()
    return 1 - computed / longest, 1 - computed / forwards


def simulate_all() -> None:
    draw = np.random.default_rng(0)
    for name, costs in {"rollouts": rollouts(600, draw), "pairs of prompts": pairs_of_prompts(8000, draw)}.items():
        for processes in (2, 8, 64):
            for grouped in (False, True):
                step, forward = simulate(costs, processes, 8192, grouped)
                how = "group_by_prefix" if grouped else "as they come"
                print(f"{name}, {processes} processes, {how}: {step:.1%} waiting (DDP), {forward:.1%} (FSDP)")


if __name__ == "__main__":
    if sys.argv[1:] == ["--simulate"]:
        simulate_all()
    else:
        main(sys.argv[1])
