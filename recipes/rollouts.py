"""
Train on published rollouts of an agent: SFT on the good ones, or GRPO on recorded rewards.

Rollouts are JSON lines with `messages` (with tool calls and results), `task` and `reward`. These commands build a tiny
model and train it on the airline agent's rollouts in `recipes/data`, offline, on a CPU:

    python recipes/rollouts.py sft --use_cpu true --bf16 false --max_steps 10
    python recipes/rollouts.py grpo --use_cpu true --bf16 false --max_steps 3

On one core of a CPU (model not recorded) a step of SFT took 4 seconds, and one of GRPO 22; in bfloat16, the
default, 29 and 122.

Your rollouts, with a model whose chat template renders tools; any flag of the method's configuration works:

    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/rollouts.py sft \
        --rollouts rollouts.jsonl --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 5e-7
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import trl
from datasets import load_dataset
from transformers import AutoTokenizer, set_seed

import trl_padfix
from trl_padfix import build_tiny
from trl_padfix.cli.user_errors import explain_errors


@dataclass
class RolloutArguments:
    """Data and model of the training."""

    rollouts: str = field(
        default=str(Path(__file__).parent / "data/airline/rollouts.jsonl.gz"),
        metadata={"help": "JSON lines with `messages`, `task` and `reward`."},
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "The model to train; by default a tiny one that is built on the spot."}
    )
    tasks: int | None = field(
        default=None, metadata={"help": "Number of tasks to take, the first ones; all by default."}
    )
    good: float = field(default=1.0, metadata={"help": "SFT: train on rollouts with at least this reward."})


COMMON = dict(padding_free=True, prefix_sharing="auto", logging_steps=1, save_strategy="no", report_to="none")
DEFAULTS = {
    "sft": dict(
        COMMON,
        max_length=16384,
        group_by_prefix=True,
        expand_turns=True,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
    ),
    # A step takes all rollouts of a task. Without `beta`, long training drifts from the recorded policy.
    "grpo": dict(COMMON, num_generations=4, per_device_train_batch_size=4, beta=0.04, learning_rate=1e-5),
}


def main(method, arguments):
    parser = trl.TrlParser((RolloutArguments, getattr(trl_padfix, f"{method.upper()}Config")))
    parser.set_defaults_with_config(output_dir=f"runs/rollouts_{method}", **DEFAULTS[method])
    script, training = parser.parse_args_and_config(arguments)
    set_seed(training.seed)
    rollouts = load_dataset("json", data_files=script.rollouts, split="train")
    if script.tasks is not None:
        first = list(dict.fromkeys(rollouts["task"]))[: script.tasks]
        rollouts = rollouts.filter(lambda row: row["task"] in first)
    model = script.model_name_or_path or build_tiny("tiny", rollouts, Path(training.output_dir) / "initial_model")
    inputs = {"processing_class": AutoTokenizer.from_pretrained(model)}

    if method == "sft":
        inputs["train_dataset"] = rollouts.filter(lambda row: row["reward"] >= script.good)
    else:
        recorded = trl_padfix.RecordedRollouts(rollouts, **inputs)
        inputs |= {"train_dataset": recorded.prompts, "rollout_func": recorded, "reward_funcs": recorded.rewards}
    trainer = getattr(trl_padfix, f"{method.upper()}Trainer")(model, args=training, **inputs)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in DEFAULTS:
        sys.exit(f"rollouts.py: name a method first, one of {', '.join(DEFAULTS)}")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns that `rollout_func` is experimental
    with explain_errors("rollouts.py"):
        main(sys.argv[1], sys.argv[2:])
