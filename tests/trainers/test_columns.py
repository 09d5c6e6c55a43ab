"""Reading columns of numbers, against a loop over the rows."""

import json
from contextlib import nullcontext

import pytest
from datasets import Dataset, Features, List, Value, load_dataset
from hypothesis import given
from hypothesis import strategies as st

from trl_padfix.trainers.data.columns import lists, needed_columns, require_columns


@given(st.lists(st.lists(st.integers(-1, 1), max_size=3), min_size=1, max_size=12), st.booleans())
def test_lists_are_read_as_in_a_loop(rows, shuffled):
    dataset = Dataset.from_list([{"a": row} for row in rows], features=Features({"a": List(Value("int32"))}))
    if shuffled:
        rows, dataset = rows[::-1], dataset.select(list(range(len(rows)))[::-1])
    assert [row.tolist() for row in lists(dataset, "a")] == rows


def test_more_rows_than_arrow_is_given_at_a_time():
    rows = [[1] * (1 + i % 2) + [i % 3] for i in range(25_000)]
    assert [row.tolist() for row in lists(Dataset.from_dict({"a": rows}), "a")] == rows


def test_a_missing_value_is_found_in_the_rows_and_columns_that_trl_reads():
    rows = Dataset.from_dict({"prompt": ["a", None, "c"], "completion": ["d", "e", "f"], "text": [None, "h", "i"]})
    with pytest.raises(ValueError, match=r"Row 1 \(counted from 0\) of the train dataset has no 'prompt': {'comp"):
        require_columns(rows, "train", *needed_columns("sft"))
    require_columns(rows.filter(lambda row: row["prompt"]), "train", *needed_columns("sft"))  # it keeps the table
    pairs = rows.rename_columns({"completion": "chosen", "text": "rejected"}).select([1, 2])
    with pytest.raises(ValueError, match=r"Row 0 .* has no 'prompt'"):
        require_columns(pairs, "train", *needed_columns("dpo"))
    require_columns(pairs.remove_columns("prompt"), "train", *needed_columns("dpo"))


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([("prompt", "a"), ("prompt", CHAT)], r"Row 1 \(counted from 0\) .* has \[{'content': 'a', .* as 'prompt'"),
        ([("prompt", CHAT), ("prompt", "a"), ("prompt", CHAT)], None),  # TRL trains on them
        (
            [("prompt", "a"), ("prompt", 5)],
            r"Row 1 .* has 5 as 'prompt'\. TRL reads only texts, or only lists of mess",
        ),
        ([("prompt", [CHAT])], r"Row 0 .* has \[\[{'content': 'a'"),
        ([("messages", "[]")], r"has '\[\]' as 'messages'\. TRL reads lists of .*, not their JSON, and keys 'from'"),
        ([("conversations", CHAT)], r"as 'conversations'\. TRL reads lists of messages \(\[{'from'"),
        ([("label", "good")], r"has 'good' as 'label'\. TRL reads true or false"),
    ],
)
def test_values_that_trl_cannot_read_are_named(rows, wrong, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(dict([row])) for row in rows))
    data = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    with pytest.raises(ValueError, match=wrong) if wrong else nullcontext():
        require_columns(data, "train", [{*data.column_names}], "")
