"""
GRPO where one completion of a generation batch is long: TRL's steps, padding-free ones, and with shared prefixes.

    python benchmarks/generation_batch.py --data test.jsonl.gz
    python benchmarks/generation_batch.py --data test.jsonl.gz --long 0 --repeat 5

TRL generates for `steps_per_generation` steps at once and pads their micro-batches to the longest completion of all
(trl#7179). Here prompts and completions have the lengths of the rows in `--data` (`prompt`, `completion`, as GSM8K
has), and one completion of each generation batch has `--long` tokens. Generation takes no time: completions are drawn
before. A step is the old log-probabilities, loss, backward and optimizer. The three trainers take turns; if their
losses or weights differ, the command fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

import trl_padfix
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


TRAINERS: dict[str, tuple[type, type, dict[str, bool]]] = {
    "TRL": (trl.GRPOTrainer, trl.GRPOConfig, {}),
    "padding-free": (trl_padfix.GRPOTrainer, trl_padfix.GRPOConfig, {"padding_free": True}),
    "prefix sharing": (
        trl_padfix.GRPOTrainer,
        trl_padfix.GRPOConfig,
        {"padding_free": True, "prefix_sharing": True},
    ),
}


def rollouts(
    tokenizer: PreTrainedTokenizerBase, lengths: list[int], long: int, vocab_size: int
) -> Callable[[list[str], Any], dict[str, Any]]:
    """TRL's `rollout_func`: random completions of the given lengths, of which one in a call has `long` tokens."""
    draw = random.Random(0)

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        sizes = [draw.choice(lengths) for _ in prompts]
        if long:
            sizes[draw.randrange(len(sizes))] = long
        completions = [[draw.randrange(3, vocab_size) for _ in range(size)] for size in sizes]
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return generate


def scores(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that differs within a group: without differences there is no gradient."""
    return [float(i % 7) for i in range(len(completions))]


def timed(trainer_class: type) -> type:
    """A trainer that keeps when its first step began."""

    class Timed(trainer_class):
        began = 0.0

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            self.began = self.began or time.perf_counter()
            return super().get_batch_samples(*args, **kwargs)

    Timed.__name__ = trainer_class.__name__
    return Timed


def train(
    name: str,
    batch: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    shape: dict[str, Any],
    generate: Any,
    settings: dict[str, Any],
) -> tuple[list[dict[str, float]], float]:
    """Train on one generation batch; returns the logs of the steps, and the seconds of all steps."""
    trainer_class, config_class, more = TRAINERS[name]
    with tempfile.TemporaryDirectory() as folder:
        model, args = build_qwen2(tokenizer, **shape), config_class(folder, **settings, **more)
        trainer = timed(trainer_class)(model, scores, args, batch, processing_class=tokenizer, rollout_func=generate)
        trainer.train()
        seconds = time.perf_counter() - trainer.began
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry], seconds


def check_equal(logs: dict[str, list[dict[str, float]]], steps: int) -> None:
    """End the program if losses or gradient norms of a trainer are not TRL's."""
    for name, entries in logs.items():
        apart = max(
            abs(entry[k] - theirs[k]) / max(abs(theirs[k]), 1e-3)
            for entry, theirs in zip(entries, logs["TRL"], strict=True)
            for k in ("loss", "grad_norm")
        )
        if apart > 1e-3 or len(entries) != steps:
            raise SystemExit(f"{name}: losses or gradient norms differ from TRL's by {apart:.0e}; no figures.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="rows with a prompt and a completion, as texts")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a generation batch")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--steps-per-generation", type=int, default=4)
    parser.add_argument("--long", type=int, default=512, help="tokens of one completion; 0 for none")
    parser.add_argument("--repeat", type=int, default=3, help="generation batches that are timed")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    rows = list(load_dataset("json", data_files=options.data, split="train"))
    texts = [text for row in rows for text in (row["prompt"], row["completion"])]
    tokenizer = train_tokenizer(texts, SHAPES[options.shape]["vocab_size"])
    lengths = [len(ids) for ids in tokenizer([row["completion"] for row in rows])["input_ids"]]
    shape = SHAPES[options.shape] | {"vocab_size": len(tokenizer)}
    steps = options.steps_per_generation
    settings: dict[str, Any] = dict(
        per_device_train_batch_size=options.prompts * options.generations // steps,
        steps_per_generation=steps, num_generations=options.generations, max_completion_length=max(options.long, 512),
        learning_rate=1e-5, shuffle_dataset=False, logging_steps=1, max_steps=steps, beta=0.0,
        bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in TRAINERS}
    shares: list[tuple[float, float]] = []
    for repeat in range(options.repeat + 1):
        begin = repeat * options.prompts
        batch = Dataset.from_dict({"prompt": [row["prompt"] for row in rows[begin : begin + options.prompts]]})
        logs: dict[str, list[dict[str, float]]] = {}
        for name in [*TRAINERS][:: 1 if repeat % 2 else -1]:
            generate = rollouts(tokenizer, lengths, options.long, len(tokenizer))
            logs[name], whole = train(name, batch, tokenizer, shape, generate, settings)
            if repeat:  # the first generation batch warms up, and checks parity
                seconds[name].append(whole / steps)
        check_equal(logs, steps)
        shares += [(e["padfix/pad_fraction"], e["padfix/shared_fraction"]) for e in logs["prefix sharing"]]
    pad, shared = (statistics.mean(column) for column in zip(*shares, strict=True))
    sizes = f"{options.prompts} prompts, {options.generations} completions each, {options.long} tokens in one"
    print(f"{sizes}; {steps} steps")
    print(f"1 / {1 - pad:.2f} / {(1 - pad) * (1 - shared):.2f} padded / real / distinct tokens")
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds["TRL"], times, strict=True)]
        print(
            f"{name}: {statistics.median(times):.2f} s a step, {statistics.median(ratios):.1f}x "
            f"({min(ratios):.1f} to {max(ratios):.1f})"
        )
    versions = f"trl_padfix {trl_padfix.__version__}, TRL {trl.__version__}, torch {torch.__version__}"
    print(f"medians of {options.repeat}; {versions}")


if __name__ == "__main__":
    main()
