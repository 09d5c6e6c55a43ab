"""A training that the campaign kills, in one process or one of several."""

from __future__ import annotations

import json
import os

from campaign.kills import EPOCH, STEPS
from kit.budget_runs import build_data
from kit.methods import make_trainer
from kit.processes import on_gpus
from kit.trainer_runs import build_model

import trl_padfix


def main(run: str, resume: str, config: str) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    own = json.loads(config)
    data = build_data("DPO").select(range(4 * EPOCH))
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "max_length": 26}
    settings |= {"per_device_train_batch_size": 4 // processes, "padding_free": True, "prefix_sharing": True}
    settings |= {"use_cpu": not on_gpus(), "disable_dropout": False}
    given = settings | own | {"model": build_model(attention_dropout=0.1), "train_dataset": data}
    trainer = make_trainer(trl_padfix, "DPO", run, **given)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(run)
