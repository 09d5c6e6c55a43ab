"""With none of our fields set no code of ours checks, moves, refuses or writes: every function that runs is listed."""

import sys
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from kit.experimental_runs import build
from kit.methods import DEFAULTS, make_trainer
from kit.online_runs import save_policy
from kit.rows import build_prompts, build_rows
from kit.trainer_runs import SETTINGS, build_pairs, build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorForSeq2Seq

import trl_padfix


KINDS = ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation"]
OURS = str(Path(trl_padfix.__file__).parent)

LISTED = {
    # Imports; the configuration, and whether a field of ours is set.
    "__init__.py", "experimental/__init__.py", "versions.py", "trainers/settings.py", "trainers/field_types.py",
    "trainers/config.py",
    "core/switch.py", "check_prefix_sharing", "check_multiple", "check_padding_side",
    # Methods that pass on to TRL's.
    "hook.__set_name__.<locals>.passing", "_show_parameters.<locals>.shown", "observe_loss.<locals>.in_step",
    "PaddingFreeMixin.compute_loss",
    # `trainer.padding`; the arguments by name, so that a trainer says where an unknown one belongs.
    "PaddingFreeMixin.__init__", "SFTTrainer.__init__", "arguments_by_name",
    "PaddingFreeMixin._init_owners", "Padding.__init__",
    "OfTrainer.__init__", "OfTrainer.trainer", "entered", "PaddingSide.__init__", "PaddingSide.acts",
    "PaddingSide._padding_side", "Task.knows", "tokenizer_of", "Part.__init__", "Part.check", "Part.around_init",
    # What an earlier trainer has attached to the model is detached.
    "PaddingFreeMixin._attach", "PaddingFreeMixin._attach_to_models", "PaddingFreeMixin._follow_models", "take_over",
    "patches_on", "_places_on", "models_of", "named_models_of", "PaddingFreeMixin._loading",
    "PaddingFreeMixin.get_train_dataloader", "PaddingFreeMixin.get_eval_dataloader",
    # Whether the trainer computes now: for attachments, of which there are none.
    "Padding.in_use", "Padding.pause_or_resume",
    # Which checkpoint is resumed; `training_args.bin` opens without this package.
    "PaddingFreeMixin.train", "checkpoint_to_resume", "PaddingFreeMixin._save", "temporarily_set",
}  # fmt: skip
"""Files and functions of ours that may run."""


def entered(run):
    """The functions of ours that `run` enters, by file and name, and its result."""
    found = set()

    def profile(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(OURS) and "<" not in frame.f_code.co_qualname.partition("<locals>")[2]:
            found.add((path.removeprefix(f"{OURS}/"), frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return found, result


def unlisted(found):
    return {(file, name) for file, name in found if file not in LISTED and name not in LISTED and "<" not in name[:1]}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="`co_qualname`")
@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_is_listed(kind, tmp_path):
    def run(**fields):
        given = {"eval_dataset": DEFAULTS[kind]["eval_dataset"](), "max_steps": 1, "save_strategy": "steps"}
        trainer = make_trainer(trl_padfix, kind, tmp_path, **given, save_steps=1, **fields)
        trainer.train()
        trainer.evaluate()

    make_trainer(trl_padfix, kind, tmp_path)  # imports
    found, _ = entered(run)
    assert not unlisted(found)
    assert ("trainers/base.py", "PaddingFreeMixin.__init__") in found
    found, _ = entered(lambda: run(padding_free=True))  # the control
    assert len(unlisted(found)) > 100


@pytest.mark.skipif(sys.version_info < (3, 11), reason="`co_qualname`")
def test_what_runs_of_an_experimental_trainer_is_listed(tmp_path):
    policy = save_policy(tmp_path / "policy")
    build("ORPO", "trl_padfix", tmp_path, policy)
    found, _ = entered(lambda: build("ORPO", "trl_padfix", tmp_path, policy).train())
    assert not unlisted(found)


def test_a_configuration_of_trl_is_said_to_leave_the_steps_to_trl(tmp_path, caplog):
    for library, times in ((trl_padfix, 0), (trl, 1)):
        make_trainer(trl_padfix, "DPO", tmp_path, args=library.DPOConfig(**SETTINGS, output_dir=str(tmp_path)))
        assert caplog.text.count("`args` is a `trl.DPOConfig`, so TRL's code computes every step") == times


# -- what was judged by its name


def numbers(name, data):
    return data.add_column(name, [[90000 + i] for i in range(len(data))])


def collate(rows):
    ids = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows]
    return DataCollatorForSeq2Seq(build_tokenizer())(ids)


TOKENS = Dataset.from_list([{"input_ids": [3 + i, 4, 5 + i, 6][: 2 + i % 3]} for i in range(8)])
KEPT = {
    "numbers for rewards": lambda: {"train_dataset": numbers("labels", build_prompts(24))},
    "numbers of a stream": lambda: {"train_dataset": numbers("doc_ids", build_rows(8)).to_iterable_dataset()},
    "numbers for a collator": lambda: {"train_dataset": numbers("user_ids", TOKENS), "data_collator": collate},
    "labels in words": lambda: {"train_dataset": TOKENS.add_column("labels", ["a"] * 8), "data_collator": collate},
}


@pytest.mark.parametrize("case", KEPT)
def test_what_a_model_does_not_get_changes_no_figure(case, tmp_path):
    kind = "GRPO" if case == "numbers for rewards" else "SFT"

    def grad_norm(library, **fields):
        given = KEPT[case]() | {"remove_unused_columns": kind == "GRPO", "max_steps": 1}
        trainer = make_trainer(library, kind, tmp_path, **given, **fields)
        trainer.train()
        return trainer.state.log_history[0]["grad_norm"]

    theirs = grad_norm(trl)
    assert grad_norm(trl_padfix) == theirs
    for fields in ({"padding_free": True}, {"padding_free": True, "max_tokens_per_batch": 320}):
        assert grad_norm(trl_padfix, **fields) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("fields", [{}, {"padding_free": True}])
def test_images_that_are_none_or_not_read_are_no_images(fields, tmp_path):
    found = {
        "GRPO": build_prompts(24).add_column("images", [[]] * 24),
        "Reward": build_pairs(8).add_column("image", ["a.png"] * 8),
    }
    for kind, data in found.items():
        trainer = make_trainer(trl_padfix, kind, tmp_path, train_dataset=data, max_steps=1, **fields)
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.parametrize("fields", [{}, {"padding_free": True}])
def test_an_evaluation_without_rows_is_what_trl_returns(fields, tmp_path):
    found = []
    for library, own in ((trl, {}), (trl_padfix, fields)):
        trainer = make_trainer(library, "SFT", tmp_path, **own)
        empty = trainer.train_dataset.select([])
        found.append({name for name in trainer.evaluate(empty) if "padfix" not in name and "perf/" not in name})
    assert found[0] == found[1]


def test_states_that_run_over_padding_keep_the_side_of_trl(tmp_path):
    """A tokenizer that pads left, and a model that is not exact on that side: TRL pads right, and so do we."""

    def losses(library, **config):
        torch.manual_seed(0)
        shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", attention_hidden_size=32, **shape))
        tokenizer = build_tokenizer(padding_side="left")
        model.resize_token_embeddings(len(tokenizer))
        args = library.SFTConfig(
            str(tmp_path), **SETTINGS | dict(max_steps=2, per_device_train_batch_size=4, logging_steps=1) | config
        )
        trainer = library.SFTTrainer(model, args, train_dataset=build_rows(8), processing_class=tokenizer)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    theirs = losses(trl)
    assert losses(trl_padfix) == theirs
    assert losses(trl_padfix, padding_side="left") != theirs


@pytest.mark.parametrize("fields", [{}, {"padding_free": True}], ids=["nothing set", "padding-free"])
def test_a_reference_precomputed_in_init_leaves_the_collator_of_the_user(fields, tmp_path):
    """TRL calls the collator for it before its `__init__` ends."""
    collate, given = None, {"precompute_ref_log_probs": True, "train_dataset": build_pairs(8)}

    def own(rows):
        return collate(rows)

    found = []
    for library, more in ((trl, {}), (trl_padfix, fields)):
        collate = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=39)
        trainer = make_trainer(library, "DPO", tmp_path, data_collator=own, max_steps=2, **given, **more)
        assert trainer.data_collator is own
        trainer.train()
        found.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    if not fields:
        plain = make_trainer(trl_padfix, "DPO", tmp_path, **given)
        assert type(plain.data_collator).__module__.startswith("trl.")
