"""Facts about columns against a loop over the rows."""

from datasets import Dataset, Features, List, Value
from hypothesis import given
from hypothesis import strategies as st

from trl_padfix.trainers.data.columns import (
    blank_texts,
    empty_lists,
    equal_rows,
    image_counts,
    list_lengths,
    rows_of_only,
    untrained_rows,
)


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
    assert equal_rows(dataset, "a", "b") == [i for i, row in enumerate(rows) if row["a"] == row["b"]]
    assert rows_of_only(dataset, "a", 1).tolist() == [i for i, row in enumerate(rows) if set(row["a"]) <= {1}]


@given(st.lists(st.fixed_dictionaries({"labels": st.lists(st.sampled_from([-100, 5]), max_size=4)}), min_size=1))
def test_rows_without_a_trained_token_are_counted_as_in_a_loop(rows):
    dataset = Dataset.from_list(rows, features=Features({"labels": List(Value("int64"))}))
    assert untrained_rows(dataset) == [
        i for i, row in enumerate(rows) if all(label == -100 for label in row["labels"][1:])
    ]


def test_more_rows_than_arrow_is_given_at_a_time():
    dataset = Dataset.from_dict({"a": [[i % 3] * (i % 2) for i in range(25_000)], "b": [[0]] * 25_000})
    assert empty_lists(dataset, "a").tolist() == list(range(0, 25_000, 2))
    assert equal_rows(dataset, "a", "b") == [i for i in range(25_000) if i % 2 and not i % 3]


def test_texts_of_white_space_are_found():
    chats = [[{"role": "user", "content": ""}]] * 4
    dataset = Dataset.from_dict({"text": ["a", "", " \n", "b "], "number": [1, 2, 3, 4], "chats": chats})
    assert blank_texts(dataset, "text").tolist() == [1, 2]
    assert blank_texts(dataset, "number").tolist() == blank_texts(dataset, "chats").tolist() == []


def test_images_are_counted():
    dataset = Dataset.from_dict({"images": [[0, 1], None, []], "image": ["a.png", None, "b.png"]})
    assert image_counts(dataset, "images").tolist() == [2, 0, 0]
    assert image_counts(dataset, "image").tolist() == [1, 0, 1]
