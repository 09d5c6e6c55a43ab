"""
Train TRL's `DPOTrainer` and this package's from one seed, and compare what they learn on held-out pairs.

    python recipes/smollm2.py smollm2
    python benchmarks/learning.py --model smollm2 --data test.jsonl.gz --json learning.json
    python benchmarks/learning.py --model smollm2 --data test.jsonl.gz --bf16 --steps 60 --eval-steps 20

Four trainings of one model on the same pairs: TRL; `trl_padfix` with `padding_free` and `prefix_sharing`; TRL with
more padding in each batch, which changes nothing but rounding; and, as a negative control, `trl_padfix` with another
seed, which draws the pairs in another order. Each runs in a process of its own, in float32 or with `--bf16` and
gradient checkpointing (TRL's defaults). `CONFIG` has the few settings that differ from TRL's defaults.

Two curves are equal if they lie no further apart than TRL's two, or in float32 much closer together than two seeds.
CPU seconds are those of the steps, without evaluation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from bench import commit
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

import trl_padfix


ROOT = Path(__file__).resolve().parents[1]
CONFIG = dict(
    eval_strategy="steps",
    eval_on_start=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
OURS = dict(padding_free=True, prefix_sharing=True)
TRAININGS = {
    "trl": (trl, 0, {}),
    "trl_padfix": (trl_padfix, 0, OURS),
    "trl, more padding": (trl, 0, dict(pad_to_multiple_of=64)),
    "another seed": (trl_padfix, 1, OURS),
}
"""Library, seed and further settings of each training."""

CURVES = ("eval_loss", "eval_rewards/margins", "eval_rewards/accuracies")
STEPS = ("loss", "grad_norm")


class StepClock(TrainerCallback):
    """CPU seconds of training steps; prints progress."""

    def __init__(self, name: str):
        self.name, self.seconds = name, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = time.process_time()

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self.seconds += time.process_time() - self.begin
        if state.global_step % 10 == 0:
            print(f"{self.name}, step {state.global_step}: {self.seconds:.0f} s", file=sys.stderr, flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        figures = {name: metrics[name] for name in CURVES}
        print(f"{self.name}, step {state.global_step}: {figures}", file=sys.stderr, flush=True)


def read_pairs(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Pairs whose rows fit into `max_length`, shuffled: those to train on, and the held-out ones."""
    pairs = load_dataset("json", data_files=options.data, split="train")
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def fits(pair: dict[str, str]) -> bool:
        rows = [pair.get("prompt", "") + pair[answer] for answer in ("chosen", "rejected")]
        return max(map(len, tokenizer(rows)["input_ids"])) < options.max_length

    pairs = pairs.filter(fits).shuffle(seed=0)
    if len(pairs) < 2 * options.held_out:
        raise ValueError(f"{len(pairs)} pairs fit into {options.max_length} tokens: too few to hold out half of them.")
    held_out = range(options.held_out)
    return pairs.select(range(options.held_out, len(pairs))), pairs.select(held_out)


def train(task: tuple[str, argparse.Namespace]) -> dict[str, Any]:
    """One training: its figures at each evaluation and of each step, and its CPU seconds."""
    name, options = task
    library, seed, settings = TRAININGS[name]
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    pairs, held_out = read_pairs(options)
    clock = StepClock(name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = library.DPOTrainer(
            options.model,
            args=library.DPOConfig(
                output_dir=folder,
                max_length=options.max_length,
                max_steps=options.steps,
                eval_steps=options.eval_steps,
                learning_rate=options.learning_rate,
                per_device_train_batch_size=options.pairs,
                per_device_eval_batch_size=options.pairs,
                seed=seed,
                bf16=options.bf16,
                gradient_checkpointing=options.bf16,
                **CONFIG,
                **settings,
            ),
            train_dataset=pairs,
            eval_dataset=held_out,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = trainer.state.log_history
    evaluations, steps = [log for log in logs if "eval_loss" in log], [log for log in logs if "loss" in log]
    return {
        "name": name,
        "seed": seed,
        "cpu_seconds": round(clock.seconds, 1),
        "evaluations": [{key: log[key] for key in ("step", *CURVES)} for log in evaluations],
        "steps": {key: [log[key] for log in steps] for key in STEPS},
    }


def distances(trainings: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Largest absolute distance of each curve from TRL's."""
    found: dict[str, dict[str, float]] = {}
    theirs = trainings["trl"]
    for name in trainings.keys() - {"trl"}:
        pairs = list(zip(trainings[name]["evaluations"], theirs["evaluations"], strict=True))
        found[name] = {key: max(abs(ours[key] - own[key]) for ours, own in pairs) for key in CURVES}
        for key in STEPS:
            columns = zip(trainings[name]["steps"][key], theirs["steps"][key], strict=True)
            found[name][key] = max(abs(ours - own) for ours, own in columns)
    return found


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Settings, machine, versions and commit."""
    libraries = {"torch": torch, "transformers": transformers, "trl": trl, "trl_padfix": trl_padfix}
    data, model = Path(options.data), Path(options.model)
    return {
        "settings": {k: v for k, v in vars(options).items() if k not in ("json", "only")}
        | CONFIG
        | {"data": data.name, "model": model.name},
        "device": platform.processor() or platform.machine(),
        "versions": {name: module.__version__ for name, module in libraries.items()}
        | {"python": platform.python_version()},
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder or Hub id of a model")
    add("--data", default=str(ROOT / "recipes/data/gsm8k/pairs.jsonl.gz"), help="JSON lines of preference pairs")
    add("--steps", type=int, default=200)
    add("--pairs", type=int, default=2, help="pairs of a step")
    add("--max-length", type=int, default=96, help="longer pairs are left out")
    add("--held-out", type=int, default=24, help="pairs to evaluate on")
    add("--eval-steps", type=int, default=50)
    add("--bf16", action="store_true", help="TRL's defaults: bf16 and gradient checkpointing")
    add("--learning-rate", type=float, default=5e-6)
    add("--threads", type=int, default=1)
    add("--processes", type=int, default=1, help="trainings at a time")
    add("--only", choices=TRAININGS, help="one training alone")
    add("--json", help="write the figures to this file")
    options = parser.parse_args()
    about = describe(options)
    tasks = [(name, options) for name in TRAININGS if options.only in (None, name)]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        trainings = {found["name"]: found for found in pool.imap(train, tasks, chunksize=1)}
    about["distances"] = distances(trainings) if "trl" in trainings else {}
    for name, found in about["distances"].items():
        print(f"{name}, largest distance from trl: " + ", ".join(f"{key} {x:.2g}" for key, x in found.items()))
    for name, found in trainings.items():
        first, *_, last = found["evaluations"]
        print(f"{name}: {found['cpu_seconds']:.0f} CPU seconds; {first} -> {last}")
    if options.json:
        Path(options.json).write_text(json.dumps({**about, "trainings": list(trainings.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
