"""An evaluation with generation, in one process or one of several."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from kit import trainer_runs
from kit.methods import make_trainer
from kit.trainer_runs import build_tokenizer

import trl_padfix


build_pairs = partial(trainer_runs.build_pairs, prompt=(2, 12), answer=(1, 6))


def main(out: str) -> dict[str, Any]:
    tokenizer = build_tokenizer()

    def compute_metrics(predicted):
        references = np.where(predicted.label_ids == -100, tokenizer.pad_token_id, predicted.label_ids)
        pairs = zip(tokenizer.batch_decode(predicted.predictions), tokenizer.batch_decode(references), strict=True)
        common = [len(set(a.split()) & set(b.split())) for a, b in pairs]
        return {"rows": len(common), "common": float(np.mean(common))}

    given = {"predict_with_generate": True, "generation_max_new_tokens": 6, "per_device_eval_batch_size": 2}
    given |= {"padding_free": True, "padding_side": "right", "processing_class": tokenizer}
    given |= {"train_dataset": build_pairs(8), "eval_dataset": build_pairs(5), "compute_metrics": compute_metrics}
    trainer = make_trainer(trl_padfix, "DPO", out, **given)
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}"] for name in ("rows", "common")} | {"processes": trainer.args.world_size}
