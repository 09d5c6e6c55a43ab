"""Launches that a trainer refuses before the first step."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix
from trl_padfix.trainers import distributed
from trl_padfix.trainers.distributed import check_launch, is_fsdp2, is_sharded, warn_of_launch


def test_models_that_are_sharded_while_loaded_meet_in_every_forward(tmp_path):
    model = build_model()
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, model=model, padding_free=True)
    assert not is_sharded(trainer)
    model.config.distributed_config = SimpleNamespace(dp_size=2)
    assert is_sharded(trainer)
    assert is_fsdp2(trainer)
    model.config.distributed_config = SimpleNamespace(dp_size=1, tp_size=2)  # processes with the same rows
    assert not is_sharded(trainer)


def test_heads_that_tensor_parallelism_would_cut_are_refused():
    model = build_model()
    model._tp_size = 2
    model._tp_plan = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    trainer = SimpleNamespace(model=model, args=SimpleNamespace(n_gpu=1), accelerator=None)
    check_launch(trainer)
    for size, says in ((4, "`num_key_value_heads=2`"), (3, "`num_attention_heads=4`")):
        model._tp_size = size
        with pytest.raises(trl_padfix.PaddingRemovalError, match=f"`tp_size={size}` splits .* does not divide {says}"):
            check_launch(trainer)


@pytest.mark.parametrize(("sizes", "is_refused"), [({"pp_size": 2}, True), ({"fsdp_size": 2, "pp_size": 1}, False)])
def test_a_pipeline_of_stages_is_refused(sizes, is_refused, tmp_path):
    model = build_model()
    model.config.distributed_config = SimpleNamespace(**sizes)
    given = {"model": model, "padding_free": True, "parity_check": False}
    if not is_refused:
        make_trainer(trl_padfix, "SFT", tmp_path, **given)
        return
    with pytest.raises(trl_padfix.PaddingRemovalError, match=r"`pp_size=2` of the model's `distributed_config`"):
        make_trainer(trl_padfix, "SFT", tmp_path, **given)


@pytest.mark.parametrize(
    ("processes", "kind", "variables", "says"),
    [
        (1, "NO", {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "This run trains on one process."),
        (1, "NO", {"ACCELERATE_USE_CPU": "True"}, None),
        (1, "NO", {"ACCELERATE_USE_CPU": "False", "MASTER_ADDR": "127.0.0.1", "RANK": "0"}, None),
        (2, "MULTI_CPU", {"ACCELERATE_USE_FSDP": "true"}, "FSDP was requested, but accelerate runs MULTI_CPU"),
        (2, "MULTI_CPU", {"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED was requested"),
        (2, "FSDP", {"ACCELERATE_USE_FSDP": "true"}, None),
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
