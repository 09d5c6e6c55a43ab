"""
The attention that the models of a trainer run with: what is asked for is what runs, and gives the same numbers.

Which attention function a model called is recorded by the config that its attention modules hold.
"""

import logging
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.online_runs import save_policy
from kit.trainer_runs import MODES, assert_same, build_model, lora, run
from peft import get_peft_model
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2 import modeling_qwen2
from zoo.vision_families import build_vision

import trl_padfix
from trl_padfix import DPOConfig
from trl_padfix.core.anatomy import restore_attention, set_attention
from trl_padfix.trainers.parts.attention_choice import _attention_dtype, load_model_config


ON_CPU = {"use_cpu": True, "bf16": False, "report_to": []}
SHORT = {"max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "max_length": 26}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def make(tmp_path_factory, saved):
    def make_one(kind: str = "DPO", config: dict[str, Any] | None = None, **given):
        given |= {"max_steps": 2} if kind == "GRPO" else SHORT
        given.setdefault("model", saved)
        if kind == "DPO":
            given.setdefault("ref_model", None)
        return make_trainer(trl_padfix, kind, tmp_path_factory.mktemp("run"), **given | (config or {}))

    return make_one


@pytest.fixture
def ran(monkeypatch):
    """The names of the attention functions that were called, by the id of the config of who called them."""
    called = defaultdict(set)

    def recording(name, function):
        def attend(module, *args, **kwargs):
            called[id(module.config)].add(name)
            return function(module, *args, **kwargs)

        return attend

    mapping = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    for name in ("sdpa", "flash_attention_2"):
        monkeypatch.setitem(mapping, name, recording(name, mapping[name]))
    eager = recording("eager", modeling_qwen2.eager_attention_forward)
    monkeypatch.setattr(modeling_qwen2, "eager_attention_forward", eager)
    return lambda model: called[id(model.config)]


@pytest.fixture
def flash():
    """FlashAttention 2 runs on this CPU, as far as transformers and the package can tell."""
    with flash_attention_stand_in():
        yield


def finished(trainer, *names: str) -> torch.Tensor:
    """The trajectory of a training."""
    return run(trainer, lambda trainer, batches: None).trajectory(*names)


# The same numbers


def test_policy_and_reference_on_different_attention_give_the_numbers_of_equal_ones(make, ran, flash, monkeypatch):
    by_default = finished(make("DPO", MODES["padded"]), "rewards/margins")
    choice = {"attn_implementation": "flash_attention_2", "ref_attn_implementation": "eager"}
    trainer = make("DPO", MODES["padded"] | choice)
    assert_same(finished(trainer, "rewards/margins"), by_default)
    assert ran(trainer.model) == {"flash_attention_2"}
    assert ran(trainer.ref_model) == {"eager"}
    eager = modeling_qwen2.eager_attention_forward
    monkeypatch.setattr(
        modeling_qwen2, "eager_attention_forward", lambda *a, scaling, **k: eager(*a, scaling=2 * scaling, **k)
    )
    with pytest.raises(AssertionError):  # the control: a reference with sharper attention
        assert_same(finished(make("DPO", {"ref_attn_implementation": "eager"}), "rewards/margins"), by_default)


# Where it can be asked for


def test_every_place_is_as_good(make):
    name = {"attn_implementation": "eager"}
    of_parts = {"model_init_kwargs": {"attn_implementation": {"": "eager", "no_such_part": "sdpa"}}}  # as TRL takes it
    for config in (name, {"model_init_kwargs": name}, {"model_init_kwargs": name} | name, of_parts):
        trainer = make("DPO", config | {"padding_free": True})
        assert trainer.model.config._attn_implementation == trainer.ref_model.config._attn_implementation == "eager"
        assert trainer.args.model_init_kwargs == config.get("model_init_kwargs")


def test_auto_chooses_the_fastest_and_says_so_once(make, caplog):
    with caplog.at_level(logging.INFO, logger="trl_padfix"):
        trainer = make("DPO", {"attn_implementation": "auto", "padding_free": True})
        trainer.train()
    (said,) = [r.getMessage() for r in caplog.records if "auto" in r.getMessage()]
    assert "`attn_implementation='auto'` is 'sdpa'" in said
    assert trainer.ref_model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not hasattr(trl, "DistillationTrainer"), reason="this TRL has no stable distillation")
def test_a_teacher_that_is_loaded_by_its_name_runs_with_what_it_is_asked_to(saved, tmp_path):
    given = {"teacher_model": saved, "teacher_attn_implementation": "eager"}
    trainer = make_trainer(trl_padfix, "Distillation", tmp_path, **given)
    assert trainer.teacher_model.config._attn_implementation == "eager"
    assert trainer.model.config._attn_implementation == "sdpa"


# Models that are loaded already


def test_a_loaded_model_is_switched_and_a_loaded_reference_is_left_alone(make, ran):
    model, ref_model = build_model(), build_model(seed=1)
    trainer = make("DPO", {"attn_implementation": "eager", "padding_free": True}, model=model, ref_model=ref_model)
    ours = finished(trainer, "rewards/margins")
    assert (ran(model), ran(ref_model)) == ({"eager"}, {"sdpa"})
    given = {"model": build_model(), "ref_model": build_model(seed=1)}
    assert_same(ours, finished(make("DPO", {"padding_free": True}, **given), "rewards/margins"))


def test_a_model_that_cannot_be_switched_is_an_error(make, monkeypatch):
    model = build_model()
    monkeypatch.setattr(PreTrainedModel, "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match=r"cannot be switched to `attn_implementation='eager'`.*runs with 'sdpa'"):
        make("DPO", {"attn_implementation": "eager"}, model=model, ref_model=build_model())


# Refused before weights are loaded


OF_REFERENCE = {"ref_attn_implementation": "eager"}
LORA = {"peft_config": lora(task_type="CAUSAL_LM")}
SHARED = "`ref_attn_implementation='eager'` is for a reference.*"
BEFORE_WEIGHTS = [
    ({"attn_implementation": {"text_config": "sdpa"}}, "names .'text_config'.*parts of a Qwen2Config are: none"),
    (
        {"attn_implementation": "eager", "model_init_kwargs": {"attn_implementation": "sdpa"}},
        "`attn_implementation='eager'` and `model_init_kwargs.*'sdpa'.* disagree",
    ),
]
BY_TRANSFORMERS = [
    ({"attn_implementation": "flash_attention_2"}, "(?i)flash.?att"),
    ({"ref_attn_implementation": "flash_attention_3"}, "(?i)flash.?att"),
    ({"attn_implementation": "flex_attention", "padding_free": True}, "would need a block mask per layout"),
]
WITHOUT_WEIGHTS = [
    ("DPO", OF_REFERENCE | LORA, f"{SHARED}adapter"),
    ("DPO", OF_REFERENCE | {"precompute_ref_log_probs": True}, f"{SHARED}precompute_ref_log_probs=True"),
    ("GRPO", OF_REFERENCE | {"beta": 0.0}, f"{SHARED}`beta=0`"),
]


def test_what_cannot_run_is_refused_before_weights_are_loaded(make, monkeypatch):
    loaded = []
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *args, **kwargs: loaded.append(args))
    for config, message in BEFORE_WEIGHTS:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            make("DPO", config)
    assert not loaded
    monkeypatch.undo()
    for config, message in BY_TRANSFORMERS:
        with pytest.raises((ImportError, ValueError, trl_padfix.PaddingRemovalError), match=message):
            make("DPO", config)


def test_a_reference_without_weights_of_its_own_takes_no_other_attention(make, saved):
    for kind, config, message in WITHOUT_WEIGHTS:
        with pytest.raises(ValueError, match=message):
            make(kind, config)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(saved), LORA["peft_config"])
    with pytest.raises(ValueError, match=f"{SHARED}policy with its adapter switched off"):
        make("DPO", OF_REFERENCE, model=adapted)


# Vision models


def test_the_parts_of_a_vision_model_are_switched_apart():
    model = build_vision("qwen2_5_vl").model
    parts = SimpleNamespace(text=model.config.text_config, vision=model.config.vision_config)
    before = set_attention(model, {"text_config": "eager"})
    assert (parts.text._attn_implementation, parts.vision._attn_implementation) == ("eager", "sdpa")
    set_attention(model, {"text_config": "eager", "vision_config": "eager"})
    assert parts.vision._attn_implementation == "eager"
    restore_attention(before)
    assert parts.text._attn_implementation == "sdpa"


def test_what_runs_is_judged_in_the_precision_that_attention_is_computed_in(saved, tmp_path):
    for config, dtype in (
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"model_init_kwargs": {"dtype": "auto"}}, torch.float32),
        ({"model_init_kwargs": {"dtype": torch.float16}}, torch.float16),
    ):
        config = DPOConfig(output_dir=str(tmp_path), **ON_CPU | config)
        assert _attention_dtype(saved, load_model_config(saved, config), config, "") == dtype
