"""Launches that a trainer refuses before the first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix


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
