"""
A step of distillation and of experimental trainers, TRL's and ours: forwards, backward and AdamW, no generation.

    python docs/bench/experiments.py orpo --data test.jsonl.gz
    python docs/bench/experiments.py cpo --data test.jsonl.gz
    python docs/bench/experiments.py tpo --data test.jsonl.gz
    python docs/bench/experiments.py sdpo --data test.jsonl.gz --rows 8
    python docs/bench/experiments.py distillation --data test.jsonl.gz --rows 16

The data are preference pairs as texts (HH-RLHF). `--rows` is the number of pairs in a step; for SDPO (of one prompt)
and for distillation it is the number of completions. Answers of the data replace generated completions; for SDPO they
are those of other prompts. TRL's and our trainers take turns on the same rows. If their losses differ, the command
fails.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from importlib import import_module
from typing import Any

import torch
import trl
from datasets import Dataset
from in_turns import report, timed_step
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_padfix
from trl_padfix.tools.bench.data import load_examples
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


MODES = {
    "TRL": {},
    "padding-free": {"padding_free": True},
    "prefix sharing": {"padding_free": True, "prefix_sharing": True},
}
ANSWER = "\n\nAssistant:"


def rows_of(name: str, pairs: Dataset) -> Dataset:
    """Convert pairs to the columns of the trainer."""
    rows = []
    for pair in pairs:
        prompt, answer = (pair["chosen"] + ANSWER).split(ANSWER, 1)[0] + ANSWER, pair["chosen"].rsplit(ANSWER, 1)[-1]
        if name in ("sdpo", "distillation"):
            prompt = pair["chosen"].removesuffix(answer)
        extra = {"tpo": {"reference": pair["chosen"]}, "sdpo": {"prompt": prompt}, "distillation": {"prompt": prompt}}
        rows.append({"answer": answer, **({} if name in ("sdpo", "distillation") else pair), **extra.get(name, {})})
    return Dataset.from_list(rows)


def build(name: str, mode: str, folder: str, rows: Dataset, count: int) -> Any:
    """Build a trainer that takes the answers of the data for its completions."""
    library = trl if mode == "TRL" else trl_padfix
    title = {"distillation": "Distillation"}.get(name, name.upper())
    module = library if name == "distillation" else import_module(f"{library.__name__}.experimental.{name}")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    settings = {"per_device_train_batch_size": count, "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    settings |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no"} | MODES[mode]
    kwargs: dict[str, Any] = {}
    if name in ("sdpo", "distillation"):
        settings |= {"max_completion_length": 512, "shuffle_dataset": False}
    else:
        settings |= {"max_length": 1024}
        rows = rows.remove_columns("answer")
    if name == "sdpo":
        settings |= {"num_generations": count, "max_prompt_length": 1024, "distillation_mode": "full_logits"}
        kwargs["reward_funcs"] = lambda completions, **columns: [float(len(c) % 2) for c in completions]
    if name == "distillation":
        kwargs["teacher_model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = getattr(module, f"{title}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=getattr(module, f"{title}Config")(f"{folder}/run", **settings),
        train_dataset=rows,
        processing_class=tokenizer,
        **kwargs,
    )
    answers = tokenizer(list(rows["answer"]))["input_ids"] if "answer" in rows.column_names else []
    served = [0]  # a list, because the inner function counts in it

    def answered(prompts: list[Any]) -> list[list[int]]:
        served[0] += len(prompts)
        return [answers[i % len(answers)][:512] for i in range(served[0] - len(prompts), served[0])]

    if name == "sdpo":
        trainer._generate = lambda prompts: (prompts, answered(prompts))
    elif name == "distillation":
        trainer._generate_single_turn = lambda prompts, *args, **kwargs: answered(prompts)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["orpo", "cpo", "tpo", "sdpo", "distillation"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    options = parser.parse_args()
    count = options.rows * (options.steps + options.warmup)
    pairs = load_examples(options.data)
    pairs = pairs.select(range(min(count, len(pairs))))
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[options.shape]
        tokenizer = train_tokenizer((text for row in pairs for text in row.values()), shape["vocab_size"])
        tokenizer.save_pretrained(folder)
        build_qwen2(tokenizer, **shape | {"vocab_size": len(tokenizer)}).save_pretrained(folder)
        rows = rows_of(options.trainer, pairs)
        trainers = {mode: build(options.trainer, mode, folder, rows, options.rows) for mode in MODES}
        loaders = {mode: iter(trainer.get_train_dataloader()) for mode, trainer in trainers.items()}
        optimizers = {mode: torch.optim.AdamW(t.model.parameters(), lr=1e-5) for mode, t in trainers.items()}
        steps = []
        for step in range(options.warmup + options.steps):
            losses = {}
            for mode, trainer in trainers.items():
                trainer.model.train()
                trainer.current_gradient_accumulation_steps = 1
                inputs = trainer._prepare_inputs(next(loaders[mode]))
                trainer._step = getattr(trainer, "_step", 0) + 1
                losses[mode] = partial(trainer.compute_loss, trainer.model, inputs)
            steps.append(timed_step(losses, optimizers, step))
        report(options.trainer, steps[options.warmup :], trainers["prefix sharing"].padding.stats)


if __name__ == "__main__":
    main()
