"""Arguments of the wrong type are refused before a model is loaded, with what Python would have made of them."""

import pytest
import trl
from kit.bad_inputs import build_bad_models
from kit.methods import make_trainer
from kit.trainer_runs import SETTINGS

import trl_padfix
from trl_padfix.trainers.settings import check_field_types


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO"])
def test_a_flag_in_words_is_refused(name, tmp_path):
    config = getattr(trl_padfix, f"{name}Config")
    with pytest.raises(TypeError, match=r"`padding_free='false'` is of type `str`; a flag is True or False"):
        config(str(tmp_path), use_cpu=True, bf16=False, padding_free="false")
    check_field_types(config(str(tmp_path), use_cpu=True, bf16=False, padding_free=False))


@pytest.mark.parametrize("library", [trl, trl_padfix])
def test_also_where_it_is_set_later_and_in_a_configuration_of_trl(library, tmp_path):
    args = library.SFTConfig(str(tmp_path), **SETTINGS)
    args.padding_free = "false"
    with pytest.raises(TypeError, match="a flag is True or False"):
        make_trainer(trl_padfix, "SFT", tmp_path, args=args)


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "GRPO"])
def test_a_model_folder_without_a_tokenizer_is_said_to_have_none(name, tmp_path_factory, tmp_path):
    folder = tmp_path_factory.getbasetemp() / "bad_models"
    if not folder.exists():
        build_bad_models(folder)
    with pytest.raises(ValueError, match=r"has no token but .*its files \(`tokenizer.json`\) are missing"):
        make_trainer(trl_padfix, name, tmp_path, model=str(folder / "no_tokenizer"), processing_class=None)
