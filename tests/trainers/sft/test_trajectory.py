"""What SFT has of its own: means over steps, what TRL refuses, noise. `test_every_method.py` has its trajectories."""

import pytest
import trl
from kit.trainer_runs import (
    assert_mode_ran,
    assert_other,
    assert_same,
    run,
    watch_inputs,
)


# -- what TRL refuses


@pytest.mark.parametrize("refused", ["max_length", "a collator"])
def test_what_trl_refuses_runs(refused, make):
    inner = make(trl.SFTTrainer).data_collator
    given = {"data_collator": lambda rows: inner(rows)} if refused == "a collator" else {}
    config = {"padding_free": True} | ({} if refused == "max_length" else {"max_length": None})
    with pytest.raises(ValueError, match=r"padding[-_]free"):
        make(trl.SFTTrainer, config, **given)
    ours = run(make(config=config | {"max_length": 26}, **given), watch_inputs(""))
    assert_same(ours.trajectory(), make.theirs("short").trajectory())
    assert_mode_ran(ours, "padding-free")


# -- NEFTune


NOISE = {"neftune_noise_alpha": 5.0}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_neftune_draws_the_noise_of_the_padded_batch(kind, makers, monkeypatch):
    make, of_row = makers(kind), NOISE | {"padding_free": True}
    theirs, ours = make.train("short", make.method.theirs, **NOISE), make.train("short", **of_row)
    assert_same(ours.trajectory(), theirs.trajectory())
    stats = ours.trainer.padding.stats
    assert 0 < stats.packed_tokens == stats.real_tokens < stats.padded_tokens
    assert_other(make.theirs("short").trajectory(), theirs.trajectory())  # without noise
    monkeypatch.setattr("trl_padfix.core.call.arguments._neftune_embeddings", lambda *_: {})
    assert_other(make.train("short", **of_row).trajectory(), theirs.trajectory())  # with noise of the packed row
