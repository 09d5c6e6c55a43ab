"""
Tiny trainings on images by token budget, and the same by fixed batches. [`main`] trains SFT and DPO
in one process of several; where parameters are sharded, TRL's DPO beside them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import trl
from kit.processes import on_gpus
from kit.trainer_runs import make_trainer
from kit.vision_runs import build_captions, build_pairs, build_processor, build_vlm

import trl_padfix


DATA = {"DPO": build_pairs, "SFT": build_captions, "KTO": build_captions}
IMAGES, ROWS, BATCH, STEPS = (2, 0, 1), 12, 6, 3
"""Images of the rows, by turns; rows of the dataset and of a step; steps, of an epoch and a half."""

ELSEWHERE = ("perf/", "padfix/", "total_flos", "train_", "runtime", "_time", "_per_second", "epoch", "step")
"""What depends on the clock or on the padding."""

LAUNCHED = {
    "DPO": {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 79},
    "SFT": {"padding_free": True, "max_tokens_per_batch": 64},
}
"""Budgets with which two processes have other numbers of micro-batches in some step."""


def build_trainer(library: Any, kind: str, family: str, folder: Any, **config: Any) -> Any:
    """A trainer of TRL's or of ours on ragged examples with two images, one and none."""
    processor = build_processor(family)
    given = {"train_dataset": DATA[kind](ROWS, IMAGES), "eval_dataset": DATA[kind](4, IMAGES, seed=1)}
    given |= {"ref_model": build_vlm(family, processor, seed=1)} if kind != "SFT" else {}
    given |= {name: config.pop(name) for name in ("train_dataset", "eval_dataset") if name in config}
    settings = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "max_length": None} | config
    given |= {"model": build_vlm(family, processor), "processing_class": processor}
    return make_trainer(library, kind, folder, settings, **given)


def figures(history: list[dict[str, float]]) -> torch.Tensor:
    """All that is logged of steps and evaluations, but for the clock and the padding."""
    logs = [log for log in history if "loss" in log or "eval_loss" in log]
    names = sorted({n for log in logs for n in log if not any(part in n for part in ELSEWHERE)})
    assert {"loss", "grad_norm"} <= set(names)
    assert len(names) > 5
    return torch.tensor([[log.get(name, 0.0) for name in names] for log in logs], dtype=torch.float64)


def pictured(kind: str) -> Any:
    """Rows of which each has an image."""
    return DATA[kind](ROWS, (2, 1, 1, 3))


def main(folder: str) -> dict[str, Any]:
    config = {"per_device_train_batch_size": BATCH // int(os.environ["WORLD_SIZE"]), "eval_dataset": None}
    logged: dict[str, Any] = {}
    if on_gpus():
        os.environ |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,CLIPEncoderLayer"}
        os.environ |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # the buffers of the tower would be lost
        config |= {"use_cpu": False}
        trls = build_trainer(trl, "DPO", "llava", folder, train_dataset=pictured("DPO"), **config)
        trls.train()
        logged["TRL's DPO"] = {"history": trls.state.log_history}
    for kind, budget in LAUNCHED.items():
        given = {"train_dataset": pictured(kind), **config, **budget}
        trainer = build_trainer(trl_padfix, kind, "llava", f"{folder}/{kind}", **given)
        pieces, step = [], trainer.training_step

        def counted(model: Any, inputs: Any, *args: Any, step: Any = step, pieces: Any = pieces) -> Any:
            pieces.append(len(inputs["micro_batches"]))
            return step(model, inputs, *args)

        trainer.training_step = counted
        trainer.train()
        counts = trainer.accelerator.gather(torch.tensor(pieces)).view(-1, len(pieces)).tolist()
        logged[kind] = {"history": trainer.state.log_history, "micro_batches": counts}
    return logged
