"""
Tiny trainings on images by token budget, and the same by fixed batches; as a script, those of one process of several.

`accelerate launch tests/kit/vision_budget_runs.py FOLDER` trains SFT and DPO on rows with images and writes what they
logged; where parameters are sharded, TRL's DPO beside them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import PrinterCallback


if __name__ == "__main__":  # a script sees its own folder only
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.processes import leave_with
from kit.trainer_runs import SETTINGS
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
    settings = SETTINGS | {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "max_length": None} | config
    trainer = getattr(library, f"{kind}Trainer")(
        model=build_vlm(family, processor),
        args=getattr(library, f"{kind}Config")(output_dir=str(folder), **settings),
        processing_class=processor,
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


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


def main(folder: Path) -> None:
    config = {"per_device_train_batch_size": BATCH // int(os.environ["WORLD_SIZE"]), "eval_dataset": None}
    logged = {}
    if os.environ.get("ACCELERATE_USE_FSDP"):  # see `launched.py`
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        config |= {"use_cpu": False}
        trls = build_trainer(trl, "DPO", "llava", folder, train_dataset=pictured("DPO"), **config)
        trls.train()
        logged["TRL's DPO"] = {"history": trls.state.log_history}
    for kind, budget in LAUNCHED.items():
        given = {"train_dataset": pictured(kind), **config, **budget}
        trainer = build_trainer(trl_padfix, kind, "llava", folder / kind, **given)
        pieces, step = [], trainer.training_step

        def counted(model: Any, inputs: Any, *args: Any, step: Any = step, pieces: Any = pieces) -> Any:
            pieces.append(len(inputs["micro_batches"]))
            return step(model, inputs, *args)

        trainer.training_step = counted
        trainer.train()
        counts = trainer.accelerator.gather(torch.tensor(pieces)).view(-1, len(pieces)).tolist()
        logged[kind] = {"history": trainer.state.log_history, "micro_batches": counts}
    leave_with(logged, trainer.accelerator, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
