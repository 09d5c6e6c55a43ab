"""
An epoch on the shipped rollouts with a row for each turn: padding-free, and with `group_by_prefix` and sharing.

    python docs/bench/epoch.py
    python docs/bench/epoch.py --rollouts 12 --batch-size 8

Both are trainings by `SFTTrainer` (AdamW, float32) of the same random model on the same rows. Seconds are those of
`Trainer.train`, from the first step to the last. TRL's padded epoch would take too long: `trl-padfix bench` measures
some of its steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from transformers import TrainerCallback

from trl_padfix import SFTConfig, SFTTrainer
from trl_padfix.tools.data import load_rows, texts_of
from trl_padfix.tools.tiny import BENCH_SHAPES, build_qwen2, train_tokenizer


ROLLOUTS = Path(__file__).parents[2] / "recipes/data/airline/rollouts.jsonl.gz"
MODES = {
    "padding-free": {},
    "sharing, group_by_prefix": {"prefix_sharing": True, "group_by_prefix": True},
}


class Progress(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"\r{state.global_step} of {state.max_steps}", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(ROLLOUTS))
    parser.add_argument("--rollouts", type=int, help="of the data, by default all")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shape", choices=BENCH_SHAPES, default="tiny")
    options = parser.parse_args()
    rows = load_rows(options.data).select_columns("messages")
    rows = rows.select(range(options.rollouts or len(rows)))
    shape = BENCH_SHAPES[options.shape]
    tokenizer = train_tokenizer(texts_of(rows), min(shape["vocab_size"], 8192))
    seconds = {}
    for mode, settings in MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = SFTTrainer(
                build_qwen2(tokenizer, **shape | {"vocab_size": max(shape["vocab_size"], len(tokenizer))}),
                SFTConfig(
                    folder,
                    padding_free=True,
                    expand_turns=True,
                    max_length=16384,
                    per_device_train_batch_size=options.batch_size,
                    num_train_epochs=1,
                    use_cpu=True,
                    bf16=False,
                    gradient_checkpointing=False,
                    disable_tqdm=True,
                    save_strategy="no",
                    report_to="none",
                    **settings,
                ),
                train_dataset=rows,
                processing_class=tokenizer,
                callbacks=[Progress()],
            )
            metrics = trainer.train().metrics
        seconds[mode] = metrics["train_runtime"]
        print(f"\r{mode}: {trainer.state.global_step} steps, loss {metrics['train_loss']:.4f}")
    slow, fast = seconds.values()
    print(json.dumps(seconds | {"speed-up": round(slow / fast, 2)}))


if __name__ == "__main__":
    main()
