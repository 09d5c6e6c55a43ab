"""
Memory of a training step of some size: TRL, padding-free, sharing, sharing under a budget.

    python benchmarks/capacity.py --method dpo --size 16
    python benchmarks/capacity.py --method grpo --size 9230 --variant sharing

A size N is, with `grpo`, the tokens of each row of a group of 8 (7/8 of them the common prompt); with `dpo`, the pairs
(prompts of 64 to 448 tokens, answers of 32 to 224); with `sft`, the tokens of the longest of 8 rows, beside 7 of 256.

The peak is the largest sum of live allocations of the step, with weights, gradients, AdamW's state and the reference:
float32 on a CPU, without gradient checkpointing.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import bench
import torch
import transformers
import trl
from datasets import Dataset

import trl_padfix
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


VARIANTS = ("trl", "padding-free", "sharing", "budget")

METHODS = ("grpo", "dpo", "sft")

GROUP = 8


# -- a step


def tokens(count: int, draw: torch.Generator) -> list[int]:
    return torch.randint(3, 256, (count,), generator=draw).tolist()


def make_batch(method: str, size: int, trainer: Any) -> dict[str, Any]:
    """The batch of a size, as TRL's collator (for GRPO: its generation) makes it."""
    draw = torch.Generator().manual_seed(0)
    if method == "grpo":
        completion = size // 8
        prompt = torch.tensor([tokens(size - completion, draw)] * GROUP)
        answers = torch.tensor([tokens(completion, draw) for _ in range(GROUP)])
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": answers,
            "completion_mask": torch.ones_like(answers),
            "advantages": torch.rand(GROUP, generator=draw) + 0.5,
            "num_items_in_batch": torch.tensor(answers.numel()),
        }
    if method == "dpo":
        lengths = [64 + 128 * (i % 4) for i in range(size)]  # 4 pairs after 4 pairs, so that bytes are linear in pairs
        rows = [
            {
                "prompt_ids": tokens(n, draw),
                "chosen_ids": tokens(n // 2, draw),
                "rejected_ids": tokens(256 - n // 2, draw),
            }
            for n in lengths
        ]
    else:
        ids = [tokens(length, draw) for length in [size] + [256] * (GROUP - 1)]
        rows = [{"input_ids": row, "labels": row} for row in ids]
    return trainer.data_collator(rows)


def offline(trainer_class: Any) -> Any:
    """The trainer without preparation of data, and without generation."""
    return type(
        trainer_class.__name__,
        (trainer_class,),
        {
            "_prepare_dataset": lambda self, dataset, *args, **kwargs: dataset,
            "_prepare_inputs": lambda self, batch: batch,
        },
    )


def build_trainer(method: str, variant: str, budget: int, rows: int, shape: str) -> Any:
    library = trl if variant == "trl" else trl_padfix
    name = method.upper()
    settings: dict[str, Any] = {}
    if variant != "trl":
        settings |= dict(padding_free=True, parity_check=False, prefix_sharing=variant != "padding-free")
    if variant == "budget":
        settings["max_tokens_per_batch"] = budget
    if method == "grpo":
        settings |= dict(num_generations=GROUP, beta=0.0, max_completion_length=8)
    else:
        settings["max_length"] = None
    config = getattr(library, f"{name}Config")(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **settings,
    )
    tokenizer = train_tokenizer([""], 300)
    data = {
        "grpo": {"prompt": [""]},
        "dpo": {"prompt_ids": [[3]], "chosen_ids": [[3]], "rejected_ids": [[3]]},
        "sft": {"input_ids": [[3]], "labels": [[3]]},
    }[method]
    make_model = lambda seed: build_qwen2(tokenizer, **SHAPES[shape], seed=seed, attn_implementation="sdpa")  # noqa: E731
    more: dict[str, Any] = {
        "grpo": {"reward_funcs": lambda completions, **_: [0.0]},
        "dpo": {"ref_model": make_model(1)},
    }
    trainer = offline(getattr(library, f"{name}Trainer"))(
        model=make_model(0),
        args=config,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        **more.get(method, {}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0, weight_decay=0.0)
    return trainer


def peak_gib(method: str, variant: str, size: int, shape: str) -> float:
    """GiB of a step at its peak."""
    # A budget of one row, and for DPO the page's: a part cannot be smaller than a row.
    budget = {"grpo": size, "dpo": 4096, "sft": size}[method]
    trainer = build_trainer(method, variant, budget, size if method == "dpo" else GROUP, shape)
    batch = make_batch(method, size, trainer)
    weights = list(trainer.model.parameters())
    permanent = 4 * sum(p.numel() * p.element_size() for p in weights)  # with gradients and two moments of AdamW
    if method == "dpo":
        permanent += sum(p.numel() * p.element_size() for p in trainer.ref_model.parameters())
    for p in weights:  # they are permanent, and no allocation of the step
        p.grad = torch.zeros_like(p)
    with (
        bench.head_as_on_gpu(),
        bench.profiled(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        trainer.training_step(trainer.model, batch, None)
    return (permanent + max(bench.live_bytes(profile))) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="grpo")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--variant", choices=VARIANTS, help="only this one")
    parser.add_argument("--size", type=int, required=True)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for variant in [options.variant] if options.variant else VARIANTS:
        gib = peak_gib(options.method, variant, options.size, options.shape)
        print(f"{variant:12} peak {gib:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
