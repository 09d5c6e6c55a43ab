"""A checkpoint of another model is refused in words before it is loaded; TRL loads weights of the same names."""

import shutil

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.trainer_runs import build_model, lora
from transformers import LlamaConfig, LlamaForCausalLM

import trl_padfix
from trl_padfix.trainers.checkpoints.checkpoints import require_same_model


SAME = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def deeper():
    return build_model(num_hidden_layers=3)


def llama():
    ours = build_model().config
    return LlamaForCausalLM(
        LlamaConfig(**{name: getattr(ours, name) for name in (*SAME, "vocab_size", "num_hidden_layers")})
    )


def make(folder, package=trl_padfix, kind="SFT", **given):
    return make_trainer(
        package, kind, folder, save_strategy="steps", save_steps=1, max_steps=given.pop("max_steps", 1), **given
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a model, and of its adapters."""
    folder = tmp_path_factory.mktemp("saved")
    make(folder / "whole").train()
    make(folder / "adapters", peft_config=lora()).train()
    return lambda name: str(folder / name / "checkpoint-1")


@pytest.mark.parametrize("package", [trl, trl_padfix])
def test_the_same_model_goes_on(checkpoint, package, tmp_path):
    trainer = make(tmp_path, package, max_steps=2)
    assert trainer.train(resume_from_checkpoint=checkpoint("whole")).global_step == 2
    adapters = make(tmp_path / "adapters", package, max_steps=2, peft_config=lora())
    assert adapters.train(resume_from_checkpoint=checkpoint("adapters")).global_step == 2


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (deeper, "its num_hidden_layers is 2, and 3 here"),
        (llama, "its class is Qwen2ForCausalLM, and LlamaForCausalLM"),
    ],
)
@pytest.mark.parametrize("padding_free", [False, True])
def test_another_model_is_named(checkpoint, build, why, padding_free, tmp_path):
    trainer = make(tmp_path, model=build(), max_steps=2, padding_free=padding_free)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    with pytest.raises(ValueError, match=f"checkpoint-1` was saved from another model .*{why}.*Name the model"):
        trainer.train(resume_from_checkpoint=checkpoint("whole"))
    assert all(weight.equal(before[name]) for name, weight in trainer.model.named_parameters())


def test_in_trl_weights_are_loaded_before_it_fails(checkpoint, tmp_path):
    trainer = make(tmp_path, trl, model=deeper(), max_steps=2)
    before = trainer.model.get_input_embeddings().weight.clone()
    with pytest.raises(ValueError, match="parameter group"):
        trainer.train(resume_from_checkpoint=checkpoint("whole"))
    assert not trainer.model.get_input_embeddings().weight.equal(before)


def test_adapters_and_whole_models_are_not_taken_for_each_other(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"holds adapters, and the model that is trained has none.*--use_peft"):
        make(tmp_path, max_steps=2).train(resume_from_checkpoint=checkpoint("adapters"))
    with pytest.raises(ValueError, match=r"holds a whole model, and adapters are trained here.*model_name_or_path="):
        make(tmp_path, max_steps=2, peft_config=lora()).train(resume_from_checkpoint=checkpoint("whole"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"target_modules": ["q_proj", "k_proj"]},
            r"its target_modules is \['q_proj', 'v_proj'\], and \['k_proj', 'q_pro",
        ),
        ({"target_modules": ["q_proj", "v_proj"], "lora_alpha": 3, "use_rslora": True}, None),
    ],
)
def test_other_adapters_are_named(checkpoint, settings, why, tmp_path):
    """As many of them on other layers: TRL would train those with the optimizer's state of the others."""
    trainer = make(tmp_path, max_steps=2, peft_config=lora(**settings))
    if why is None:  # what may change between two trainings
        assert trainer.train(resume_from_checkpoint=checkpoint("adapters")).global_step == 2
        return
    with pytest.raises(ValueError, match=why):
        trainer.train(resume_from_checkpoint=checkpoint("adapters"))
    trl_trainer = make(tmp_path / "trl", trl, max_steps=2, peft_config=lora(**settings))
    assert trl_trainer.train(resume_from_checkpoint=checkpoint("adapters")).global_step == 2


def test_a_reward_model_does_not_go_on_as_a_language_model(checkpoint, tmp_path):
    make(tmp_path / "reward", kind="Reward").train()
    with pytest.raises(ValueError, match="its class is Qwen2ForSequenceClassification, and Qwen2ForCausalLM here"):
        make(tmp_path, kind="DPO", max_steps=2).train(resume_from_checkpoint=str(tmp_path / "reward" / "checkpoint-1"))


def test_what_is_the_same_model_is_not_refused(checkpoint, tmp_path):
    """A compiled model, a subclass, and adapters that somebody has put beside a model."""
    whole = tmp_path / "checkpoint-1"
    shutil.copytree(checkpoint("whole"), whole)
    shutil.copytree(checkpoint("adapters"), whole / "of a callback")
    model = build_model()
    for same in (model, torch.compile(model)):
        require_same_model(whole, same)
    model.__class__ = type("OfAUser", (type(model),), {})
    require_same_model(whole, model)
    with pytest.raises(ValueError, match="3 here"):  # the checks see through the wrapper
        require_same_model(whole, torch.compile(deeper()))
