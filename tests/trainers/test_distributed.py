"""Models that processes share."""

from __future__ import annotations

from types import SimpleNamespace

from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix
from trl_padfix.trainers.distributed import is_fsdp2, is_sharded


def test_models_that_are_sharded_while_loaded_meet_in_every_forward(tmp_path):
    model = build_model()
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, model=model, padding_free=True)
    assert not is_sharded(trainer)
    model.config.distributed_config = SimpleNamespace(dp_size=2)
    assert is_sharded(trainer)
    assert is_fsdp2(trainer)
    model.config.distributed_config = SimpleNamespace(dp_size=1, tp_size=2)  # processes with the same rows
    assert not is_sharded(trainer)
