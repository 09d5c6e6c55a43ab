"""An evaluation with generation, also as a script: `accelerate launch tests/kit/generation_run.py OUT`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset


if __name__ == "__main__":  # a script sees its own folder only
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.trainer_runs import SETTINGS, build_model, build_tokenizer, words

from trl_padfix import DPOConfig, DPOTrainer


def build_pairs(count: int, seed: int = 0) -> Dataset:
    """Ragged pairs of words."""
    draw = random.Random(seed)
    return Dataset.from_list(
        [
            {"prompt": words(draw, 2, 12), "chosen": words(draw, 1, 6), "rejected": words(draw, 1, 6)}
            for _ in range(count)
        ]
    )


def main(out: str) -> None:
    tokenizer = build_tokenizer()

    def compute_metrics(predicted):
        references = np.where(predicted.label_ids == -100, tokenizer.pad_token_id, predicted.label_ids)
        pairs = zip(tokenizer.batch_decode(predicted.predictions), tokenizer.batch_decode(references), strict=True)
        common = [len(set(a.split()) & set(b.split())) for a, b in pairs]
        return {"rows": len(common), "common": float(np.mean(common))}

    config = DPOConfig(
        output_dir=out, predict_with_generate=True, generation_max_new_tokens=6, per_device_eval_batch_size=2,
        padding_free=True, padding_side="right", **SETTINGS,
    )  # fmt: skip
    trainer = DPOTrainer(
        build_model(), build_model(seed=1), args=config, train_dataset=build_pairs(8), eval_dataset=build_pairs(5),
        processing_class=tokenizer, compute_metrics=compute_metrics,
    )  # fmt: skip
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        found = {name: metrics[f"eval_{name}"] for name in ("rows", "common")}
        Path(out, "metrics.json").write_text(json.dumps(found | {"processes": trainer.args.world_size}))


if __name__ == "__main__":
    main(*sys.argv[1:])
