"""`DataCollatorForPreference`: TRL's batches, on the side that was asked for."""

import pytest
import torch
import trl.trainer.dpo_trainer as trl_dpo
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.methods import make_trainer
from kit.trainer_runs import assert_same, trained

import trl_padfix
from trl_padfix import DataCollatorForLanguageModeling, DataCollatorForPreference, DataCollatorForUnpairedPreference
from trl_padfix.trainers.data.collators import SidedCollator


PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9], "rejected_ids": [10, 11]},
]
EXAMPLES = [
    {"prompt_ids": [1, 2], "completion_ids": [3, 4], "KL_completion_ids": [5], "label": True},
    {"prompt_ids": [6], "completion_ids": [7], "KL_completion_ids": [8, 9, 10], "label": False},
]


def collate(pairs, **settings):
    return DataCollatorForPreference(pad_token_id=0, **settings)([dict(pair) for pair in pairs])


def literals(batch):
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_the_label_that_only_padding_predicts_stands_where_no_loss_scores_it():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    assert literals(DataCollatorForLanguageModeling(pad_token_id=0, padding_side="left")(rows)) == {
        "input_ids": [[1, 2, 3], [0, 4, 5]],
        "attention_mask": [[1, 1, 1], [0, 1, 1]],
        "labels": [[1, 2, 3], [4, -100, 5]],
    }


ids = st.lists(st.integers(1, 9), min_size=1, max_size=6)
pairs = st.lists(st.fixed_dictionaries({"prompt_ids": ids, "chosen_ids": ids, "rejected_ids": ids}), min_size=1)
options = {"max_length": st.none() | st.integers(7, 12), "pad_to_multiple_of": st.none() | st.integers(1, 8)}


@settings(max_examples=60)
@given(pairs=pairs, truncation_mode=st.sampled_from(["keep_start", "keep_end"]), **options)
def test_right_padding_is_trls_and_left_padding_holds_the_same_rows(pairs, **settings):
    theirs = trl_dpo.DataCollatorForPreference(pad_token_id=0, **settings)([dict(pair) for pair in pairs])
    right, left = collate(pairs, **settings), collate(pairs, padding_side="left", **settings)
    assert literals(right) == literals(theirs)
    keep_left, keep_right = left["attention_mask"].bool(), right["attention_mask"].bool()
    assert torch.equal(keep_left, keep_right.flip(1))
    for name in ("input_ids", "completion_mask"):
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name][keep_left], right[name][keep_right])
        assert not left[name][~keep_left].any()


def test_a_batch_with_a_row_without_a_prompt_token_is_padded_right():
    promptless = [PAIRS[0], {"prompt_ids": [], "chosen_ids": [4, 5, 6, 7, 8], "rejected_ids": [6]}]
    assert literals(collate(promptless, padding_side="left")) == literals(collate(promptless, padding_side="right"))


# -- KTO


def test_left_padding_moves_each_batch_by_its_own_mask():
    # Both batches are two rows of up to four tokens, of other lengths.
    assert literals(DataCollatorForUnpairedPreference(pad_token_id=0, padding_side="left")(EXAMPLES)) == {
        "input_ids": [[1, 2, 3, 4], [0, 0, 6, 7]],
        "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
        "completion_mask": [[0, 0, 1, 1], [0, 0, 0, 1]],
        "KL_input_ids": [[0, 1, 2, 5], [6, 8, 9, 10]],
        "KL_attention_mask": [[0, 1, 1, 1], [1, 1, 1, 1]],
        "KL_completion_mask": [[0, 0, 0, 1], [0, 1, 1, 1]],
        "label": [True, False],
    }


# -- rows without a token


def build_rows(kind):
    """Tokenized rows, of which some have no prompt, and some nothing at all."""
    rows = []
    for i in range(12):
        row = [2 + (7 * i + j) % 36 for j in range(2 + i % 5)]
        prompt, answer = [] if i % 4 == 1 else row, [] if i % 4 in (1, 2) else row[::-1]
        rows.append(
            {
                "SFT": {"input_ids": prompt, "labels": prompt},
                "KTO": {"prompt_ids": prompt, "completion_ids": answer, "label": i % 2 == 0},
                "DPO": {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": row[:2]},
            }[kind]
        )
    return Dataset.from_list(rows)


SETTINGS = {
    "SFT": {"padding_side": "left"},
    "KTO": {"padding_free": True, "prefix_sharing": True, "loss_type": "apo_zero_unpaired"},
    "DPO": {"padding_free": True, "padding_side": "left", "max_length": 6, "truncation_mode": "keep_end"},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_rows_without_a_token_teach_nothing_and_do_not_stop_a_stream(kind, tmp_path, monkeypatch):
    """Whatever stands in their place in a batch is of no account."""
    as_they_are = lambda trainer, dataset, *_, **__: dataset  # noqa: E731
    monkeypatch.setattr(getattr(trl_padfix, f"{kind}Trainer"), "_prepare_dataset", as_they_are)
    given = {"max_steps": 3, "per_device_train_batch_size": 4} | SETTINGS[kind]

    def figures():
        return trained(
            make_trainer(trl_padfix, kind, tmp_path, train_dataset=build_rows(kind).to_iterable_dataset(), **given)
        )

    ours, own, seen = figures(), SidedCollator.without_empty_rows, []
    assert ours.isfinite().all()

    def other_token(collator, batch):
        batch = own(collator, batch)
        empty = batch["input_ids"].eq(collator.pad_token_id).all(1)
        seen.append(int(empty.sum()))
        return batch | {"input_ids": batch["input_ids"].masked_fill(empty[:, None], 7)}

    monkeypatch.setattr(SidedCollator, "without_empty_rows", other_token)
    assert_same(figures(), ours)
    assert sum(seen) > 0


def test_a_batch_of_empty_rows_alone_is_a_batch():
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_side="left")
    assert literals(collator([{"input_ids": [], "labels": []}] * 2)) == {
        "input_ids": [[0], [0]], "attention_mask": [[1], [1]], "labels": [[-100], [-100]],
    }  # fmt: skip
