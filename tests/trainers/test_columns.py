"""Reading columns of numbers, against a loop over the rows."""

from datasets import Dataset, Features, List, Value
from hypothesis import given
from hypothesis import strategies as st

from trl_padfix.trainers.data.columns import lists


@given(st.lists(st.lists(st.integers(-1, 1), max_size=3), min_size=1, max_size=12), st.booleans())
def test_lists_are_read_as_in_a_loop(rows, shuffled):
    dataset = Dataset.from_list([{"a": row} for row in rows], features=Features({"a": List(Value("int32"))}))
    if shuffled:
        rows, dataset = rows[::-1], dataset.select(list(range(len(rows)))[::-1])
    assert [row.tolist() for row in lists(dataset, "a")] == rows


def test_more_rows_than_arrow_is_given_at_a_time():
    rows = [[1] * (1 + i % 2) + [i % 3] for i in range(25_000)]
    assert [row.tolist() for row in lists(Dataset.from_dict({"a": rows}), "a")] == rows
