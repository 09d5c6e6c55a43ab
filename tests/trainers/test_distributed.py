"""Launches that a trainer refuses before the first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix
from trl_padfix.trainers.distributed import check_launch, is_fsdp2, is_sharded


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
        with pytest.raises(trl_padfix.PaddingRemovalError, match=f"`tp_size={size}` gives .* does not divide {says}"):
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
