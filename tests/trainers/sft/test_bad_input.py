"""Bad input is an error before the first step."""

import logging
import re

import pytest
from datasets import Dataset
from kit.rows import build_rows
from kit.sft_cases import LABELS_IN_DATA
from kit.trainer_runs import build_tokenizer


def masked(row):
    return {"input_ids": [5, 6, 7], "labels": [-100] * 3 if row % 2 else [-100, 6, 7]}


BAD = {
    "no evaluation rows": (lambda: {"eval_dataset": build_rows(4).select([])}, {}, "The eval dataset is empty"),
    "no columns": (
        lambda: {"train_dataset": Dataset.from_dict({"story": ["w2"]})},
        {},
        r"no column 'text'; it has \['story'\]. SFT needs `text`, `messages`, `prompt` and `completion`",
    ),
    "half of a pair": (
        lambda: {"train_dataset": build_rows(4).select_columns("prompt")},
        {},
        r"no column 'text'; it has \['prompt'\]",
    ),
    "no end": (lambda: {"processing_class": build_tokenizer(eos_token=None)}, {}, "no EOS token, and TRL ends"),
    "nothing to train on": (
        lambda: {"train_dataset": Dataset.from_list([{"input_ids": [5, 6], "labels": [5, -100]}] * 3)},
        {"strict": True},
        "3 of 3 rows of the train dataset have no token to train on",
    ),
    "only prompts": (lambda: {}, {"max_length": 2}, "40 of 40 rows of the train dataset were left out"),
    "a side of packed rows": (
        lambda: {},
        {"packing": True, "padding_side": "left"},
        "`packing=True` leaves nothing to pad on the left",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_before_the_first_step(case, make):
    if case == "only prompts" and not LABELS_IN_DATA:
        pytest.skip("this TRL truncates in its collator")
    given, config, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make(config=config, **given())


@pytest.mark.skipif(not LABELS_IN_DATA, reason="this TRL truncates in its collator")
def test_rows_that_teach_nothing_are_counted_in_a_warning(make, caplog):
    data = Dataset.from_list([masked(row) for row in range(8)])
    with caplog.at_level(logging.WARNING):
        make(train_dataset=data, eval_dataset=None, config={"max_length": None})
        make(config={"max_length": 14})
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("trl_padfix")]
    assert re.search("4 of 8 rows of the train dataset have no token to train on.*Drop them", ours[0])
    assert any(re.search(r"\d+ of 40 rows of the train dataset were left out.*`max_length=14`", o) for o in ours[1:])
