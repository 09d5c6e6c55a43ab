"""
How long processes wait for each other in a DPO step, with fixed batches and with `max_tokens_per_batch`, measured.

    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 docs/bench/waiting.py harmless-base-test.jsonl.gz

Each process takes the time of its own thread in every step: waiting for the others is not in it, computing is.
"""

import sys
import tempfile
import time

import torch
from accelerate import PartialState
from accelerate.utils import gather

from trl_padfix import DPOConfig, DPOTrainer
from trl_padfix.tools.bench import load_pairs
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


STEPS, PAIRS, BUDGET = 10, 8, 3597  # the budget: what the largest of a thousand such batches holds


class Timed(DPOTrainer):
    """Notes what each step costs this process."""

    def training_step(self, *args, **kwargs):
        begin = time.thread_time()
        loss = super().training_step(*args, **kwargs)
        self.seconds.append(time.thread_time() - begin)
        return loss


def measure(data, tokenizer, **more) -> tuple[float, float]:
    """Share of the time that processes wait, and the time of all steps, each as long as its longest process."""
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
    pairs = load_pairs(path)
    tokenizer = train_tokenizer((row[side] for row in pairs for side in ("chosen", "rejected")), 8192)
    data = pairs.shuffle(seed=1).select(range(processes * PAIRS * STEPS))
    for name, more in {"fixed batches": {}, "token budget": {"max_tokens_per_batch": BUDGET}}.items():
        waiting, longest = measure(data, tokenizer, **more)
        PartialState().print(f"{name}: {waiting:.1%} waiting, {longest:.1f} s for {STEPS - 1} steps")


if __name__ == "__main__":
    main(sys.argv[1])
