"""Trainers of SFT, and the runs of TRL, computed once for each configuration."""

from functools import cache

import pytest
import torch
import trl
from kit.sft_cases import train
from kit.sft_runs import TEMPLATE, build_rows
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer

from trl_padfix import SFTConfig, SFTTrainer


@pytest.fixture(scope="package")
def make(tmp_path_factory):
    def make_trainer(trainer_class=SFTTrainer, config=None, **given):
        config_class = SFTConfig if issubclass(trainer_class, SFTTrainer) else trl.SFTConfig
        settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "max_length": 26}
        settings["output_dir"] = str(tmp_path_factory.mktemp("run"))
        defaults = {
            "model": build_model,
            "train_dataset": build_rows,
            "eval_dataset": lambda: build_rows(8, 1),
            "processing_class": lambda: build_tokenizer(chat_template=TEMPLATE),
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", config_class(**SETTINGS | settings | (config or {})))
        torch.manual_seed(0)  # some versions of TRL draw adapters and virtual tokens without a seed
        return trainer_class(**given)

    return make_trainer


@pytest.fixture(scope="package")
def trl_run(make):
    return cache(lambda case: train(make, case, trl.SFTTrainer))
