"""Rows that cannot be trained on: an error before the first step, and left out of a stream with a warning."""

import logging
import re

import pytest
import trl
from datasets import Dataset, Features, IterableDataset, List, Value
from hypothesis import given
from hypothesis import strategies as st
from kit.dpo_cases import build_pairs
from kit.methods import make_trainer
from kit.trainer_runs import build_tokenizer, our_warnings, trajectory

import trl_padfix
from trl_padfix.trainers.data.columns import ids_outside
from trl_padfix.trainers.data.row_checks import DoubtfulRowError, check_row, validate_rows


TEXT = {"text": "w3 w4"}
PAIR = {"prompt": "w3", "chosen": "w4 w5", "rejected": "w6"}
COMPLETION = {"prompt": "w3", "completion": "w4 w5"}


def make(kind, folder, data, library=trl_padfix, **given):
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    rows = {} if kind == "GRPO" else {"per_device_train_batch_size": 4}
    given = {"max_steps": 3, "train_dataset": data, "processing_class": tokenizer} | rows | given
    return make_trainer(library, kind, folder, **given)


def test_an_empty_prompt_is_none(tmp_path, caplog):
    make("SFT", tmp_path, Dataset.from_list([COMPLETION] * 5 + [COMPLETION | {"prompt": ""}]), strict=True)
    assert "empty text" not in caplog.text


def stream(rows):
    def generate():
        yield from rows

    return IterableDataset.from_generator(generate)


@pytest.mark.parametrize(
    ("kind", "good", "change"), [("SFT", TEXT, {"text": None}), ("DPO", PAIR, {"rejected": None})]
)
def test_a_stream_goes_on_without_it_as_if_it_were_not_there(kind, good, change, tmp_path, caplog):
    rows = [{k: f"{v} w{7 + i}" for k, v in good.items()} for i in range(12)]
    broken = [*rows[:3], rows[3] | change, *rows[3:]]
    curves = []
    for library, given_rows in ((trl, rows), (trl_padfix, broken)):
        with caplog.at_level(logging.WARNING, logger="trl_padfix"):
            side = {} if library is trl else {"padding_side": "right"}
            trainer = make(kind, tmp_path, stream(given_rows), library, **side)
            trainer.train()
        curves.append(trajectory(trainer).tolist())
    assert curves[0] == curves[1]
    assert any(
        "So far 1 rows of the train stream were left out. A row of the train dataset has None" in text
        for text in caplog.messages
    )


@pytest.mark.parametrize("bad", [-5, 40])
def test_an_unknown_id_in_a_stream_is_named_by_the_forward(bad, tmp_path):
    rows = [{"input_ids": [3 + i, 4, 5], "labels": [3 + i, 4, 5]} for i in range(12)]
    unknown = [*rows[:3], {"input_ids": [3, bad, 5], "labels": [3, 4, 5]}, *rows[4:]]
    for check in (True, False):
        trainer = make("SFT", tmp_path, stream(unknown), padding_free=True, parity_check=check)
        with pytest.raises(ValueError, match=f"The batch holds token id {bad}, .* has 40 rows"):
            trainer.train()


def test_pairs_that_trl_leaves_out_are_counted_in_a_warning(tmp_path, caplog):
    columns = build_pairs(4).to_dict() | {"prompt": ["w2 " * 9, "w3 " * 5, "w4 " * 6, "w5 "]}
    with caplog.at_level(logging.WARNING):
        make("DPO", tmp_path, Dataset.from_dict(columns), max_length=6, padding_side="right")
    (warning,) = our_warnings(caplog)
    assert re.search("2 of 4 pairs of the train dataset were left out.*`max_length=6`.*Raise `max_length`", warning)


texts = st.one_of(st.none(), st.text("ab", max_size=2))
messages = st.lists(
    st.fixed_dictionaries({"role": st.one_of(st.none(), st.sampled_from(["user", "assistant"])), "content": texts}),
    max_size=2,
)


@given(st.one_of(st.lists(texts, min_size=1, max_size=5), st.lists(messages, min_size=1, max_size=5)))
def test_a_bad_row_is_found_where_a_loop_finds_it(values):
    dataset = Dataset.from_list([{"prompt": value} for value in values])

    def bad(row):
        try:
            check_row(row, 0, ("prompt",))
        except DoubtfulRowError:
            return 1
        except ValueError:
            return 2
        return 0

    looped = [bad(row) for row in dataset]
    if any(looped):
        worst = max(looped)
        with pytest.raises(ValueError, match=f"Row {looped.index(worst)} "):
            validate_rows(dataset, "train", ("prompt",))
    else:
        assert validate_rows(dataset, "train", ("prompt",)) is dataset


@given(st.lists(st.lists(st.sampled_from([-100, -1, 0, 39, 40]), max_size=3), min_size=1, max_size=6))
def test_ids_are_looked_at_as_in_a_loop(rows):
    dataset = Dataset.from_list([{"a": row} for row in rows], features=Features({"a": List(Value("int64"))}))
    for ignored in ((), (-100,)):
        found = [(i, x) for i, row in enumerate(rows) for x in row if not 0 <= x < 40 and x not in ignored]
        assert ids_outside(dataset, "a", 40, ignored) == (found[0] if found else None)
