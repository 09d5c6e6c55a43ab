"""Trainers of DPO, and the runs that several tests look at: TRL's are computed once for each configuration."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import trl
from kit.dpo_runs import CASES, MODES, STEPS, build_pairs, make_case, run
from kit.models import build
from kit.trainer_runs import SETTINGS, build_tokenizer
from transformers import PrinterCallback

from trl_padfix import DPOConfig, DPOTrainer


@pytest.fixture(scope="package")
def make(tmp_path_factory):
    """Makes trainers that differ from one another only in what is given."""

    def make_trainer(
        trainer_class: type = DPOTrainer,
        config: dict[str, Any] | None = None,
        *,
        architecture: str = "qwen2",
        attention: str = "sdpa",
        config_class: Callable | None = None,
        **given,
    ) -> trl.DPOTrainer:
        if config_class is None:
            config_class = DPOConfig if issubclass(trainer_class, DPOTrainer) else trl.DPOConfig
        settings = SETTINGS | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "max_length": 26}
        settings |= {"max_steps": STEPS, "output_dir": str(tmp_path_factory.mktemp("run"))}
        defaults = {
            "model": lambda: build(architecture, attention),
            "ref_model": lambda: build(architecture, attention, seed=1),
            "train_dataset": lambda: build_pairs(40),
            # One batch: TRL's metrics are means over batches, ours over pairs.
            "eval_dataset": lambda: build_pairs(8, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        trainer = trainer_class(args=config_class(**settings | (config or {})), **given)
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make_trainer


@pytest.fixture(scope="package")
def trl_run(make):
    """The run of TRL's own trainer for one of `CASES`, computed once."""
    return cache(lambda name: run(make_case(make, CASES[name], trl.DPOTrainer)))


@pytest.fixture(scope="package")
def our_run(make):
    """The run of ours in one of `MODES` that several tests look at, computed once."""
    return cache(lambda mode: run(make_case(make, CASES["sigmoid"], **MODES[mode])))
