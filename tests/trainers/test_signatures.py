"""Methods with the parameters of TRL's are inherited as TRL's are."""

import inspect

import pytest
import trl
from transformers import Trainer

import trl_padfix


@pytest.mark.parametrize(
    "base",
    [trl_padfix.DPOTrainer, trl_padfix.GRPOTrainer, trl_padfix.KTOTrainer, trl_padfix.padding_free_trainer(Trainer)],
)
def test_what_is_set_on_a_class_holds_for_its_subclasses(base, monkeypatch):
    class Own(base):
        pass

    class Deeper(Own):
        pass

    def theirs(self, *args, **kwargs):
        return "theirs"

    for name in ("compute_loss", "training_step", "evaluate", "log"):
        monkeypatch.setattr(base, name, theirs)
        assert getattr(Own, name) is getattr(Deeper, name) is theirs
    assert Own.train is Deeper.train is base.train


def test_a_class_between_ours_and_trls_shows_its_parameters():
    wider = type("Wider", (trl.DPOTrainer,), {"evaluate": lambda self, more=1: None})
    own = type("Own", (trl_padfix.DPOTrainer, wider), {})
    assert "more" in inspect.signature(own.evaluate).parameters
    assert "more" not in inspect.signature(trl_padfix.DPOTrainer.evaluate).parameters
