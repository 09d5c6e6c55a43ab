"""What KTO has of its own: its collator. `test_every_method.py` has the trajectories."""

import pytest
import torch
import trl.trainer.kto_trainer as trl_kto

from trl_padfix import DataCollatorForUnpairedPreference


EXAMPLES = [
    {"prompt_ids": [1, 2], "completion_ids": [3, 4], "KL_completion_ids": [5], "label": True},
    {"prompt_ids": [6], "completion_ids": [7], "KL_completion_ids": [8, 9, 10], "label": False},
]


def test_left_padding_moves_each_batch_by_its_own_mask():
    batch = DataCollatorForUnpairedPreference(pad_token_id=0, padding_side="left")(EXAMPLES)
    # Both batches are two rows of up to four tokens, of other lengths.
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3, 4], [0, 0, 6, 7]],
        "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
        "completion_mask": [[0, 0, 1, 1], [0, 0, 0, 1]],
        "KL_input_ids": [[0, 1, 2, 5], [6, 8, 9, 10]],
        "KL_attention_mask": [[0, 1, 1, 1], [1, 1, 1, 1]],
        "KL_completion_mask": [[0, 0, 0, 1], [0, 1, 1, 1]],
        "label": [True, False],
    }


def test_right_padding_is_trls():
    for max_length in (None, 3):
        settings = {"pad_token_id": 0, "max_length": max_length, "pad_to_multiple_of": 8}
        ours = DataCollatorForUnpairedPreference(**settings)(EXAMPLES)
        theirs = trl_kto.DataCollatorForUnpairedPreference(**settings)(EXAMPLES)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_row_without_a_prompt_cannot_be_padded_left():
    rows = [{**row, "prompt_ids": []} for row in EXAMPLES]
    with pytest.raises(ValueError, match=r"begin with a completion token.*Give every row a prompt"):
        DataCollatorForUnpairedPreference(pad_token_id=0, padding_side="left")(rows)
