"""The reference of a model that was made in the script: a copy of it, where TRL looks for a name on the Hub."""

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.trainer_runs import build_model

import trl_padfix


KINDS = ["DPO", "KTO", "GRPO", "RLOO"]
NEEDED = {"GRPO": {"beta": 0.1}, "RLOO": {"beta": 0.1}}


def made_here():
    model = build_model()
    model.config._name_or_path = ""
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_a_model_without_a_name_is_a_copy_of_it(kind, tmp_path):
    more = {} if kind in NEEDED else {"ref_model": None}
    trainer = make_trainer(
        trl_padfix, kind, tmp_path, model=made_here(), padding_free=True, max_steps=1, **more, **NEEDED.get(kind, {})
    )
    policy, reference = dict(trainer.model.named_parameters()), dict(trainer.ref_model.named_parameters())
    assert policy.keys() == reference.keys()
    for name, weight in reference.items():
        assert weight is not policy[name]
        assert torch.equal(weight, policy[name])
    trainer.train()
    # Negative control: the policy is trained, so a reference that was the same object would still be equal.
    assert any(not torch.equal(weight, policy[name]) for name, weight in reference.items())
    assert len(trainer.padding.handles) == 2
    assert all(handle.stats.packed_tokens < handle.stats.padded_tokens for handle in trainer.padding.handles)


def test_without_this_package_the_same_call_fails(tmp_path):
    with pytest.raises(Exception, match="Repo id must"):
        make_trainer(trl, "DPO", tmp_path, model=made_here(), ref_model=None)


def test_a_tokenizer_must_be_given_with_such_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"was made in this script.*`processing_class`"):
        make_trainer(trl_padfix, "DPO", tmp_path, model=made_here(), ref_model=None, processing_class=None)


def test_a_misspelt_loss_is_found_before_the_first_step(tmp_path):
    for kind, wrong, meant in (("DPO", "sigmod", "sigmoid"), ("KTO", "ktoo", "kto"), ("GRPO", "dapoo", "dapo")):
        with pytest.raises(ValueError, match=f"{wrong}.*is '{meant}' meant"):
            make_trainer(trl_padfix, kind, tmp_path, loss_type=wrong)
