"""Causes and messages: what a configuration or a trainer refuses before the first step, and what to do about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import accelerate
import pytest
import trl
from datasets import Dataset, IterableDataset
from kit.dpo_cases import build_pairs
from kit.methods import make_trainer
from kit.sft_cases import NEWEST
from kit.trainer_runs import build_model, is_bare

import trl_padfix
from trl_padfix import DPOConfig, PaddingRemovalError
from trl_padfix.trainers.settings import check_field_types


ON_CPU = {"use_cpu": True, "bf16": False, "report_to": []}
FREE = {"padding_free": True}
GROUPED = FREE | {"prefix_sharing": True, "group_by_prefix": True}
GENERATING = {"predict_with_generate": True}
TURNS = "trains on that turn; .* Leave `{}` out"


# -- configurations

PACKED_ONLY = {"prefix_sharing": True, "packed_multiple_of": 64, "max_tokens_per_batch": 4096, "pool_last_token": True}
LENGTHS = "`max_tokens_per_batch={}` is not a {} of `packed_multiple_of={}`: .* lengthened to {}"
BUDGET = "max_tokens_per_batch"
KINDS = ("DPO", "SFT", "Reward", "KTO", "GRPO", "RLOO")
CONFIGURATIONS: list[tuple[str, dict[str, Any], str]] = [
    *(("DPO", {"padding_side": x}, f"`padding_side` must be 'left', .* got {x!r}") for x in ("middle", "LEFT", "", 1)),
    *(("DPO", FREE | {"prefix_sharing": x}, f"True, False or 'auto', got {x!r}") for x in ("always", None, 1)),
    ("DPO", {"parity_check": "short"}, "`parity_check='short'` is of type `str`; a flag is True or False"),
    *(("Reward", {n: PACKED_ONLY[n]}, rf"`{n}='?\w+'?` needs `padding_free=True`") for n in PACKED_ONLY),
    ("DPO", {"attn_implementation": {"a": 1}}, "got {'a': 1}"),
    ("DPO", {"attn_implementation": 3}, "a name, or a mapping"),
    ("DPO", {"attn_implementation": "{a"}, "not JSON"),
    *((k, {"padding_free": "false"}, "`padding_free='false'` is of type `str`; a flag is True or") for k in KINDS),
    ("DPO", GROUPED | {"prefix_sharing": False}, "`group_by_prefix=True` needs `prefix_sharing=True`"),
    ("DPO", GROUPED | {"train_sampling_strategy": "group_by_length"}, "`group_by_length` both choose which rows meet"),
    ("DPO", FREE | {"packed_multiple_of": 0}, "`packed_multiple_of` is a number of tokens"),
    ("DPO", FREE | {"packed_multiple_of": [64, 32]}, r"in ascending order.* got \[64, 32\]"),
    ("DPO", FREE | {"packed_multiple_of": 2048, BUDGET: 1024}, LENGTHS.format(1024, "multiple", 2048, "2048 tokens")),
    (
        "DPO",
        FREE | {"packed_multiple_of": [64, 256], BUDGET: 320},
        LENGTHS.format(320, "length", r"\[64, 256\]", "512"),
    ),
    ("SFT", FREE | {BUDGET: 0}, "must be an integer number of tokens above 0, got 0"),
    ("SFT", FREE | {BUDGET: True}, "must be an integer number of tokens above 0, got True"),
    ("SFT", {"expand_turns": True, "assistant_only_loss": True}, TURNS.format("assistant_only_loss")),
    ("SFT", {"expand_turns": True, "completion_only_loss": False}, TURNS.format("completion_only_loss")),
    ("DPO", GENERATING | {"generation_max_new_tokens": 0}, "`generation_max_new_tokens` must be positive"),
]
OF_TYPE = ("a name, or a mapping", "got {'a': 1}", "is of type `str`")
"""What a `TypeError` says; others are of a value."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_that_cannot_be_is_an_error(kind, tmp_path):
    config = getattr(trl_padfix, f"{kind}Config")
    for given, message in [row[1:] for row in CONFIGURATIONS if row[0] == kind]:
        with pytest.raises(TypeError if any(text in message for text in OF_TYPE) else ValueError, match=message):
            config(str(tmp_path), **given, **ON_CPU)
    check_field_types(config(str(tmp_path), **FREE, **ON_CPU))


def test_what_a_configuration_refuses_goes_with_what_it_needs(tmp_path):
    for name in PACKED_ONLY:
        trl_padfix.RewardConfig(str(tmp_path), **FREE, **{name: PACKED_ONLY[name]}, **ON_CPU)
    # Without generation its settings are not looked at.
    DPOConfig(str(tmp_path), generation_max_new_tokens=0, **ON_CPU)


# -- trainers


class Bad(NamedTuple):
    """
    A trainer that is refused.

    Attributes:
        kind (`str`): Which trainer.
        given (`Callable`): Makes what it is given, beside tiny models and rows.
        message (`str`): A pattern of the error's text.
        error (`type`): The error.
    """

    kind: str
    given: Callable[[], dict[str, Any]]
    message: str
    error: type[Exception] = ValueError


PAIR = {"prompt": "w3", "chosen": "w4 w5", "rejected": "w6"}
EXAMPLE = {"prompt": "w3", "completion": "w4 w5", "label": True}


def rows(kind: str, row: dict[str, Any], message: str, **given: Any) -> Bad:
    """Eight such rows."""
    return Bad(kind, lambda: {"train_dataset": Dataset.from_list([row] * 8)} | given, message)


def stream(row: dict[str, Any] | None) -> dict[str, Any]:
    return {"train_dataset": IterableDataset.from_generator(lambda: iter([row] * 4 if row else []))}


RIGHT = trl_padfix.DataCollatorForPreference(pad_token_id=39)
BAD = {
    # Models
    "a language model for rewards": Bad(
        "Reward",
        lambda: {"model": build_model("causal", num_labels=1)},
        "scores a whole sequence.*AutoModelForSequenceClassification",
    ),
    "images for a text model": rows("KTO", EXAMPLE | {"image": "a.png"}, "vision", **FREE),
    # Settings
    "noise under a budget": Bad(
        "SFT",
        lambda: FREE | {"max_tokens_per_batch": 60, "neftune_noise_alpha": 5},
        "`neftune_noise_alpha=5` adds noise",
    ),
    "a budget of packed rows": Bad(
        "SFT", lambda: FREE | {"packing": True, "max_tokens_per_batch": 60}, "joins the rows of a batch, which"
    ),
    "a side of packed rows": Bad(
        "SFT", lambda: {"packing": True, "padding_side": "left"}, "`packing=True` leaves nothing to pad on the left"
    ),
    "a side of another collator": Bad(
        "DPO", lambda: {"padding_side": "left", "data_collator": print}, "`padding_side=.*default collator"
    ),
    "two sides": Bad("DPO", lambda: {"padding_side": "left", "data_collator": RIGHT}, "your own .*chooses the side"),
    "groups of a stream": Bad(
        "DPO", lambda: GROUPED | stream(PAIR), "is a `IterableDataset`, which cannot list its rows.*leave it out"
    ),
    "no teacher": Bad(
        "Distillation",
        lambda: {"teacher_model": None},
        "The student needs a teacher, and `teacher_model` is not given",
    ),
    "attention of no teacher": Bad(
        "Distillation",
        lambda: {"teacher_model": None, "teacher_attn_implementation": "eager"},
        "`teacher_attn_implementation` needs `teacher_model`",
    ),
    "a budget below a completion": Bad(
        "Distillation", lambda: FREE | {"max_tokens_per_batch": 8}, "Raise the budget above 12"
    ),
}


@pytest.mark.skipif(not NEWEST, reason="other messages of TRL's own")
@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward", "KTO", "GRPO", "Distillation"])
def test_a_trainer_says_what_is_wrong_and_what_to_do(kind, tmp_path):
    for case, (_, given, message, error) in ((case, bad) for case, bad in BAD.items() if bad.kind == kind):
        with pytest.raises(error) as raised:
            make_trainer(trl_padfix, kind, tmp_path, **{"padding_free": True} | given())
        assert re.search(f"(?s){message}", str(raised.value)), (case, str(raised.value))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("prefix_sharing", True, "`prefix_sharing"), ("padding_free", "false", "a flag is True or False")],
)
def test_a_field_that_was_set_on_a_finished_configuration_is_checked_too(field, value, message, tmp_path):
    for library in (trl, trl_padfix):
        args = library.SFTConfig(str(tmp_path), **ON_CPU)
        setattr(args, field, value)
        if library is trl_padfix or field == "padding_free":
            with pytest.raises((ValueError, TypeError), match=message):
                make_trainer(trl_padfix, "SFT", tmp_path, args=args)


def test_columns_that_a_subclass_renames_are_its_own(tmp_path):
    class Renaming(trl_padfix.DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return super()._prepare_dataset(
                dataset.rename_columns({"good": "chosen", "bad": "rejected"}), *args, **kwargs
            )

    data = build_pairs(8).rename_columns({"chosen": "good", "rejected": "bad"})
    make_trainer(trl_padfix, "DPO", tmp_path, Renaming, train_dataset=data, max_steps=1, **FREE).train()


def test_an_unknown_argument_of_a_trainer_is_named():
    for trainer in (trl_padfix.DPOTrainer, trl_padfix.SFTTrainer, trl_padfix.GRPOTrainer):
        with pytest.raises(TypeError, match="unexpected keyword argument 'zebra'"):
            trainer("model", args=DPOConfig(**ON_CPU), zebra=1)
    with pytest.raises(TypeError, match=r"DPOTrainer.__init__\(\) .* 'tokenizer'\. It is `processing_class` now"):
        trl_padfix.DPOTrainer("model", tokenizer=None)


def test_sequence_parallelism_is_refused(tmp_path, monkeypatch):
    parallelism = SimpleNamespace(tp_size=1, cp_size=1, sp_size=2, cp_enabled=False)
    policy, of_trl = build_model(), trl.DPOTrainer.__init__

    def with_parallelism(trainer, *args, **kwargs):
        of_trl(trainer, *args, **kwargs)
        monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", parallelism)

    monkeypatch.setattr(trl.DPOTrainer, "__init__", with_parallelism)
    monkeypatch.setattr(with_parallelism, "__signature__", inspect.signature(of_trl), raising=False)
    with pytest.raises(PaddingRemovalError, match=r"`sp_size`.*every padded row.*`cp_size`.*padding_free=False"):
        make_trainer(trl_padfix, "DPO", tmp_path, model=policy, **FREE)
    assert is_bare(policy)
