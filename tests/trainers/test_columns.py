"""Facts about columns by Arrow, against a loop over the rows."""

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from hypothesis import given
from hypothesis import strategies as st

from trl_padfix.trainers.data.columns import (
    blank_texts,
    count_equal,
    empty_lists,
    first_misplaced_image,
    list_lengths,
    rows_of_only,
    untrained_rows,
)
from trl_padfix.trainers.data.vision_collators import misplaced_images


lists = st.lists(st.integers(-1, 1), max_size=3)
IDS = Features({"a": List(Value("int32")), "b": List(Value("int32"))})


def build(rows, features=IDS, shuffled=False):
    dataset = Dataset.from_list(rows, features=features)
    return dataset.select(list(range(len(rows)))[::-1]) if shuffled else dataset


@given(st.lists(st.fixed_dictionaries({"a": lists, "b": lists}), min_size=1, max_size=12), st.booleans())
def test_lists_are_counted_as_in_a_loop(rows, shuffled):
    dataset = build(rows, shuffled=shuffled)
    rows = rows[::-1] if shuffled else rows
    assert list_lengths(dataset, "a").tolist() == [len(row["a"]) for row in rows]
    assert empty_lists(dataset, "a").tolist() == [i for i, row in enumerate(rows) if not row["a"]]
    assert count_equal(dataset, "a", "b") == sum(row["a"] == row["b"] for row in rows)
    assert rows_of_only(dataset, "a", 1).tolist() == [i for i, row in enumerate(rows) if set(row["a"]) <= {1}]


@given(st.lists(st.fixed_dictionaries({"labels": st.lists(st.sampled_from([-100, 5]), max_size=4)}), min_size=1))
def test_rows_without_a_trained_token_are_counted_as_in_a_loop(rows):
    dataset = Dataset.from_list(rows, features=Features({"labels": List(Value("int64"))}))
    assert untrained_rows(dataset) == sum(all(label == -100 for label in row["labels"][1:]) for row in rows)


def test_more_rows_than_arrow_is_given_at_a_time():
    dataset = Dataset.from_dict({"a": [[i % 3] * (i % 2) for i in range(25_000)], "b": [[0]] * 25_000})
    assert empty_lists(dataset, "a").tolist() == list(range(0, 25_000, 2))
    assert count_equal(dataset, "a", "b") == sum(i % 2 and not i % 3 for i in range(25_000))


def test_texts_of_white_space_are_found():
    chats = [[{"role": "user", "content": ""}]] * 4
    dataset = Dataset.from_dict({"text": ["a", "", " \n", "b "], "number": [1, 2, 3, 4], "chats": chats})
    assert blank_texts(dataset, "text").tolist() == [1, 2]
    assert blank_texts(dataset, "number").tolist() == blank_texts(dataset, "chats").tolist() == []


class Processor:
    image_token = "<image>"


parts = st.lists(st.sampled_from(["image", "text"]), max_size=3)
roles = st.sampled_from(["user", "assistant", "tool"])
FORMS = {
    "text": st.lists(st.sampled_from(["<image> ", "w3 "]), max_size=4).map("".join),
    "parts": st.lists(
        st.fixed_dictionaries({"role": roles, "content": parts.map(lambda kinds: [{"type": kind} for kind in kinds])}),
        max_size=3,
    ),
    "plain": st.lists(st.fixed_dictionaries({"role": roles, "content": st.sampled_from(["w3", "w4"])}), max_size=3),
}
CONTENT = {"parts": List({"type": Value("string")}), "plain": Value("string")}


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_images_and_placeholders_are_counted_as_the_collator_does(form, data):
    rows = data.draw(st.lists(st.tuples(FORMS[form], st.integers(0, 2)), min_size=1, max_size=6))
    text = Value("string") if form == "text" else List({"role": Value("string"), "content": CONTENT[form]})
    features = Features({"prompt": text, "images": List(Value("int64"))})
    dataset = Dataset.from_list([{"prompt": p, "images": [0] * count} for p, count in rows], features=features)
    found = first_misplaced_image(dataset, "images", "prompt", Processor.image_token)
    expected = misplaced_images([{"prompt": p, "images": [None] * count} for p, count in rows], Processor())
    assert found == (expected[0] if expected else None)


def test_a_form_of_messages_that_arrow_does_not_know_is_said():
    dataset = Dataset.from_dict({"prompt": [[1, 2]], "images": [[0]]})
    with pytest.raises(TypeError, match="messages of type"):
        first_misplaced_image(dataset, "images", "prompt", None)


def test_a_column_of_single_images_counts_them():
    dataset = Dataset.from_dict({"prompt": ["<image>", "w3"], "image": ["a.png", None]})
    assert first_misplaced_image(dataset, "image", "prompt", "<image>") is None
    assert first_misplaced_image(dataset, "image", "prompt", "w3") == (0, 1, 0)
    assert np.array_equal(empty_lists(Dataset.from_dict({"a": [[1], []]}), "a"), [1])
