"""Arguments of the wrong type are refused before a model is loaded, with what Python would have made of them."""

import pytest
import trl
from datasets import Dataset
from kit.bad_inputs import build_bad_models
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer

import trl_padfix
from trl_padfix.trainers.field_types import check_field_types


DATA = Dataset.from_list([{"text": "w3 w4"}] * 4)


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO"])
def test_a_flag_in_words_is_refused(name, tmp_path):
    config = getattr(trl_padfix, f"{name}Config")
    with pytest.raises(TypeError, match=r"`padding_free='false'` is of type `str`.*takes 'false' for True"):
        config(str(tmp_path), use_cpu=True, bf16=False, padding_free="false")
    with pytest.raises(TypeError, match=r"Write `stop_on_nonfinite=True`"):
        config(str(tmp_path), use_cpu=True, bf16=False, stop_on_nonfinite="true")
    check_field_types(config(str(tmp_path), use_cpu=True, bf16=False, padding_free=False))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("padding_free", "false", "a flag is True or False"),
        ("logging_first_step", "False", "a flag is True or False"),
        ("model_init_kwargs", ["bfloat16"], "are a dictionary"),
    ],
)
@pytest.mark.parametrize("library", [trl, trl_padfix])
def test_also_where_it_is_set_later_and_in_a_configuration_of_trl(library, field, value, message, tmp_path):
    args = library.SFTConfig(str(tmp_path), **SETTINGS)
    setattr(args, field, value)
    with pytest.raises(TypeError, match=message):
        trl_padfix.SFTTrainer(model=build_model(), args=args, train_dataset=DATA, processing_class=build_tokenizer())


@pytest.mark.parametrize("given", ["gpt2", {"pad_token": 1}, 3])
def test_a_processing_class_is_a_tokenizer(given, tmp_path):
    args = trl_padfix.SFTConfig(str(tmp_path), **SETTINGS)
    with pytest.raises(TypeError, match=r"`processing_class` is a .* and a tokenizer or processor is needed"):
        trl_padfix.SFTTrainer(model=build_model(), args=args, train_dataset=DATA, processing_class=given)


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "GRPO"])
def test_a_model_folder_without_a_tokenizer_is_said_to_have_none(name, tmp_path_factory, tmp_path):
    folder = tmp_path_factory.getbasetemp() / "bad_models"
    if not folder.exists():
        build_bad_models(folder)
    row = {"text": "alpha", "prompt": "a", "chosen": "b", "rejected": "c"}
    row = {"prompt": "a", "completion": "b", "label": True} if name == "KTO" else row
    given = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if name == "GRPO" else {}
    with pytest.raises(ValueError, match=r"has no token but .*its files \(`tokenizer.json`\) are missing"):
        getattr(trl_padfix, f"{name}Trainer")(
            model=str(folder / "no_tokenizer"),
            args=getattr(trl_padfix, f"{name}Config")(str(tmp_path), **SETTINGS),
            train_dataset=Dataset.from_list([row] * 8),
            **given,
        )


@pytest.mark.parametrize(
    "kwargs", [{"num_beams": 0}, {"temperature": -1.0, "do_sample": True}, {"bad_words_ids": [[40]]}]
)
def test_generation_that_cannot_be_is_refused_before_the_first_step(kwargs, tmp_path):
    data = Dataset.from_list([{"prompt": "w3 w4", "completion": "w5"}] * 4)
    with pytest.raises(ValueError, match=r"(`generation_kwargs=.* cannot be generated with|num_beams|temperature)"):
        trl_padfix.SFTTrainer(
            model=build_model(),
            args=trl_padfix.SFTConfig(str(tmp_path), **SETTINGS, predict_with_generate=True, generation_kwargs=kwargs),
            train_dataset=data,
            eval_dataset=data,
            processing_class=build_tokenizer(),
        )
