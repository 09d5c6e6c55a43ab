"""Rows that cannot be trained on: an error before the first step, in a stream when the row is read."""

import pytest
from datasets import Dataset, Features, IterableDataset, List, Value
from hypothesis import given
from hypothesis import strategies as st
from kit.methods import make_trainer
from kit.trainer_runs import build_tokenizer

import trl_padfix
from trl_padfix.trainers.data.columns import lists
from trl_padfix.trainers.data.row_checks import validate_rows


TEXT = {"text": "w3 w4"}
PAIR = {"prompt": "w3", "chosen": "w4 w5", "rejected": "w6"}


def make(kind, folder, data, library=trl_padfix, **given):
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    rows = {} if kind == "GRPO" else {"per_device_train_batch_size": 4}
    given = {"max_steps": 3, "train_dataset": data, "processing_class": tokenizer} | rows | given
    return make_trainer(library, kind, folder, **given)


def stream(rows):
    def generate():
        yield from rows

    return IterableDataset.from_generator(generate)


@pytest.mark.parametrize(
    ("kind", "good", "change"), [("SFT", TEXT, {"text": None}), ("DPO", PAIR, {"rejected": None})]
)
def test_a_stream_stops_at_the_row_with_its_text(kind, good, change, tmp_path):
    rows = [good] * 3 + [good | change] + [good] * 8
    trainer = make(kind, tmp_path, stream(rows), padding_side="right", max_steps=9)
    with pytest.raises(ValueError, match=f"A row of the train dataset has None in column `{next(iter(change))}`"):
        trainer.train()


texts = st.one_of(st.none(), st.text("ab", max_size=2))
messages = st.lists(
    st.fixed_dictionaries({"role": st.one_of(st.none(), st.sampled_from(["user", "assistant"])), "content": texts}),
    max_size=2,
)


@given(st.one_of(st.lists(texts, min_size=1, max_size=5), st.lists(messages, min_size=1, max_size=5)))
def test_a_bad_row_is_found_where_a_loop_finds_it(values):
    dataset = Dataset.from_list([{"prompt": value} for value in values])

    looped = [number for number, value in enumerate(values) if value is None or value == []]
    if looped:
        with pytest.raises(ValueError, match=f"Row {looped[0]} "):
            validate_rows(dataset, "train", ("prompt",))
    else:
        assert validate_rows(dataset, "train", ("prompt",)) is dataset


@given(st.lists(st.lists(st.integers(-1, 1), max_size=3), min_size=1, max_size=12), st.booleans())
def test_lists_are_read_as_in_a_loop(rows, shuffled):
    dataset = Dataset.from_list([{"a": row} for row in rows], features=Features({"a": List(Value("int32"))}))
    if shuffled:
        rows, dataset = rows[::-1], dataset.select(list(range(len(rows)))[::-1])
    assert [row.tolist() for row in lists(dataset, "a")] == rows


def test_more_rows_than_arrow_is_given_at_a_time():
    rows = [[1] * (1 + i % 2) + [i % 3] for i in range(25_000)]
    assert [row.tolist() for row in lists(Dataset.from_dict({"a": rows}), "a")] == rows
