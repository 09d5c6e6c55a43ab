"""Models that processes share, and launches that are not what was asked for."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix
from trl_padfix.trainers import distributed
from trl_padfix.trainers.distributed import is_fsdp2, is_sharded, warn_of_launch


def test_models_that_are_sharded_while_loaded_meet_in_every_forward(tmp_path):
    model = build_model()
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, model=model, padding_free=True)
    assert not is_sharded(trainer)
    model.config.distributed_config = SimpleNamespace(dp_size=2)
    assert is_sharded(trainer)
    assert is_fsdp2(trainer)
    model.config.distributed_config = SimpleNamespace(dp_size=1, tp_size=2)  # processes with the same rows
    assert not is_sharded(trainer)


@pytest.mark.parametrize(
    ("processes", "kind", "variables", "says"),
    [
        (1, "NO", {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "This run trains on one process."),
        (1, "NO", {"ACCELERATE_USE_CPU": "True"}, None),
        (1, "NO", {"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1", "RANK": "0"}, None),
        (2, "MULTI_CPU", {"ACCELERATE_USE_FSDP": "true"}, "FSDP was requested, but accelerate runs MULTI_CPU"),
        (2, "MULTI_CPU", {"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED was requested"),
        (2, "FSDP", {"ACCELERATE_USE_FSDP": "true"}, None),
        (1, "NO", {"RANK": "0", "WORLD_SIZE": "2"}, "each trains a model of its own. On CPUs pass `--use_cpu`"),
        (1, "NO", {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (2, "MULTI_CPU", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, None),
    ],
)
def test_a_launch_that_is_not_what_was_asked_for_is_said(processes, kind, variables, says, monkeypatch, caplog):
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    distributed.logger.warning_once.cache_clear()
    accelerator = SimpleNamespace(num_processes=processes, distributed_type=DistributedType(kind))
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        warn_of_launch(accelerator)
    if says is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert says in message
