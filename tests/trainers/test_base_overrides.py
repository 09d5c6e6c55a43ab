"""What our trainers override of TRL's can be called as TRL calls it."""

import inspect
import pydoc
from dataclasses import fields

import pytest
import trl

import trl_padfix
from trl_padfix.trainers.settings import EvaluationConfig


ONLINE = ["GRPOTrainer", "RLOOTrainer", *(["DistillationTrainer"] if hasattr(trl, "DistillationTrainer") else [])]
TRAINERS = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", *ONLINE]


def overridden(name: str) -> list[str]:
    ours, theirs = getattr(trl_padfix, name), getattr(trl, name)
    own = [c for c in ours.__mro__ if c.__module__.startswith("trl_padfix.")]
    methods = {method for c in own for method, value in vars(c).items() if inspect.isfunction(value)}
    return sorted(method for method in methods if hasattr(theirs, method) and method != "__init__")


@pytest.mark.parametrize("name", TRAINERS)
def test_overridden_methods_take_the_arguments_of_trls(name):
    methods = overridden(name)
    assert {"compute_loss", "log", "evaluate"} <= set(methods)
    for method in methods:
        ours = inspect.signature(getattr(getattr(trl_padfix, name), method))
        theirs = inspect.signature(getattr(getattr(trl, name), method))
        parameters = list(theirs.parameters)
        ours.bind(*parameters)
        first = [p for p, q in theirs.parameters.items() if q.default is q.empty]
        ours.bind(*first, **{p: None for p in parameters if p not in first})


EVERY = {
    *("compute_loss", "training_step", "prediction_step", "evaluation_loop", "evaluate", "train", "log"),
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "_get_train_sampler"),
    *("_get_num_items_in_batch", "_track_num_input_tokens", "floating_point_ops", "_prepare_inputs"),
    *("_maybe_log_save_evaluate", "get_batch_samples"),
    *("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "create_model_card", "_save"),
}
GENERATING = {"_tokenize_prompts", "_generate_single_turn"}
OWN = {
    "DPOTrainer": {"_prepare_dataset", "_precompute_ref_logps"},
    "KTOTrainer": {"_prepare_dataset", "_precompute_ref_logps"},
    "RewardTrainer": {"_prepare_dataset"},
    "SFTTrainer": {"_prepare_dataset"},
    "GRPOTrainer": GENERATING | {"_get_per_token_logps_and_entropies"},
    "RLOOTrainer": GENERATING | {"_get_per_token_logps_and_entropies"},
    "DistillationTrainer": GENERATING | {"_get_last_hidden_state"},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_what_is_overridden_is_in_trl_and_nothing_else_has_a_name_of_its_own_there(name):
    assert set(overridden(name)) == EVERY | OWN[name]


EVERY_FIELD = {
    *("padding_free", "prefix_sharing", "parity_check", "strict", "attn_implementation"),
    *("packed_multiple_of", "max_tokens_per_batch"),
}
OF_DATA = {"padding_side", "loss_reduction", "group_by_prefix", "group_by_prefix_buffer"}
OF_EVALUATION = {*EvaluationConfig.__dataclass_fields__}
OWN_FIELDS = {
    "DPOTrainer": {"ref_attn_implementation"} | OF_DATA | OF_EVALUATION,
    "KTOTrainer": {"ref_attn_implementation"} | OF_DATA,
    "RewardTrainer": {"pool_last_token"} | OF_DATA,
    "SFTTrainer": {"expand_turns"} | OF_DATA | OF_EVALUATION,
    "GRPOTrainer": {"ref_attn_implementation"},
    "RLOOTrainer": {"ref_attn_implementation"},
    "DistillationTrainer": {"teacher_attn_implementation"},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_configurations_are_trls_with_our_fields(name):
    config = name.replace("Trainer", "Config")
    ours, theirs = getattr(trl_padfix, config), getattr(trl, config)
    assert issubclass(ours, theirs)
    defaults = [{f.name: f.default for f in fields(config)} for config in (ours, theirs)]
    assert defaults[0].items() >= defaults[1].items()
    added = set(ours.__dataclass_fields__) - set(theirs.__dataclass_fields__) | {"padding_free"}
    added -= {"activation_checkpointing", "activation_checkpointing_kwargs"}  # names of later versions
    assert added == EVERY_FIELD | OWN_FIELDS[name]


@pytest.mark.parametrize("name", TRAINERS)
def test_signatures_show_the_parameters_of_trl(name):
    ours, theirs = getattr(trl_padfix, name), getattr(trl, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert "train_dataset" in inspect.signature(ours).parameters
    assert f" |  {name}(model: " in pydoc.render_doc(ours, renderer=pydoc.plaintext)


def test_a_subclass_with_its_own_parameters_shows_them():
    class Own(trl_padfix.DPOTrainer):
        def __init__(self, folder: str, **kwargs):
            super().__init__(**kwargs)

    class Plain(Own):
        pass

    assert list(inspect.signature(Own).parameters) == list(inspect.signature(Plain).parameters) == ["folder", "kwargs"]
