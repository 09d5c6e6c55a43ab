"""A script of a user, which the campaign kills: `killed_run.py FOLDER RESUME CONFIG`."""

from __future__ import annotations

import json
import os
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from kit.budget_runs import build_branching, build_data
from kit.campaign.kills import EPOCH, STEPS
from kit.processes import leave
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer
from transformers import PrinterCallback

from trl_padfix import DPOConfig, DPOTrainer


def main(run: str, resume: str, config: dict) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    cpu = {}
    if os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu":  # see `kit/launched.py`
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        cpu = {"use_cpu": False}
    rows: Dataset = build_branching("dpo", prompts=4) if config.get("group_by_prefix") else build_data("dpo")
    data = rows.select(range(4 * EPOCH))
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "max_length": 26}
    settings |= {"per_device_train_batch_size": 4 // processes, "padding_free": True, "prefix_sharing": True}
    model = build_model(attention_dropout=0.1)
    trainer = DPOTrainer(
        model=model,
        ref_model=build_model(seed=1),
        args=DPOConfig(run, **SETTINGS | settings | config | cpu, disable_dropout=False),
        train_dataset=data,
        processing_class=build_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(run)
    trainer.accelerator.wait_for_everyone()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
