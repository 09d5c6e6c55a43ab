"""A training that the campaign kills."""

from __future__ import annotations

import json

from campaign.kills import EPOCH, STEPS
from kit.budget_runs import build_data
from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix


def main(run: str, resume: str, config: str) -> None:
    own = json.loads(config)
    data = build_data("DPO").select(range(4 * EPOCH))
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "max_length": 26}
    settings |= {"per_device_train_batch_size": 4, "padding_free": True, "prefix_sharing": True}
    settings |= {"disable_dropout": False}
    given = settings | own | {"model": build_model(attention_dropout=0.1), "train_dataset": data}
    trainer = make_trainer(trl_padfix, "DPO", run, **given)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(run)
