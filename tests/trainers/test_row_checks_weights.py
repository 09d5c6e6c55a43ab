"""Rows without a prompt, a completion or any token weigh what they weigh in TRL's trainer."""

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from kit.methods import make_trainer
from kit.trainer_runs import assert_same, trained
from kit.vision_runs import build_pairs, build_processor, build_vlm

import trl_padfix
from trl_padfix.trainers.data.collators import SidedCollator


MODES = {
    "padded, left": {"padding_side": "left"},
    "padding-free, left": {"padding_free": True, "padding_side": "left"},
    "prefix sharing": {"padding_free": True, "prefix_sharing": True},
}


def train(library, kind, folder, data, config, **given) -> tuple[Any, torch.Tensor]:
    config = {"max_steps": 3, "per_device_train_batch_size": 4} | config
    trainer = make_trainer(library, kind, folder, train_dataset=data, **config | given)
    return trainer, trained(trainer)


# Completions that `max_length` cuts off


def longest_prompt(processor, data: Dataset) -> int:
    batch = trl.trainer.dpo_trainer.DataCollatorForVisionPreference(processor)([dict(row) for row in data])
    return int((batch["attention_mask"] - batch["completion_mask"]).sum(1).max())


def test_a_vision_pair_whose_completion_is_cut_off_weighs_as_in_trl(tmp_path):
    processor, data = build_processor("llava"), build_pairs(9, (1, 1, 0))
    config = {"max_length": longest_prompt(processor, data), "per_device_train_batch_size": 3}
    runs = {}
    for library in (trl, trl_padfix):
        given = {"model": build_vlm("llava", processor), "ref_model": build_vlm("llava", processor)}
        given["processing_class"] = processor
        more = MODES["padding-free, left"] if library is trl_padfix else {}
        runs[library] = train(library, "DPO", tmp_path, data, config | more, **given)
    assert_same(runs[trl_padfix][1], runs[trl][1])


# Rows without a prompt, and without a token


def rows_of(kind: str, empty: bool) -> list[dict]:
    """Tokenized rows, some of which have no prompt left, or nothing at all."""
    ids = [[2 + (7 * i + j) % 36 for j in range(2 + i % 5)] for i in range(12)]
    if kind == "SFT":
        ids = [[] if empty and i % 4 == 1 else row for i, row in enumerate(ids)]
        return [{"input_ids": row, "labels": row} for row in ids]
    prompts = [[] if i % 4 == 1 else row for i, row in enumerate(ids)]
    empties = {i for i in range(12) if empty and i % 4 in (1, 2)}
    rows = []
    for i, (prompt, row) in enumerate(zip(prompts, ids, strict=True)):
        chosen = [] if i in empties else row[::-1]
        if kind == "KTO":
            rows.append({"prompt_ids": prompt, "completion_ids": chosen, "label": i % 2 == 0})
        else:
            rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": row[:2]})
    return rows


def prepared(monkeypatch, kind):
    """Trainers that take tokenized rows as they are, as those of a stream are."""
    for library in (trl, trl_padfix):
        monkeypatch.setattr(
            getattr(library, f"{kind}Trainer"), "_prepare_dataset", lambda self, dataset, *_, **__: dataset
        )


CONFIGS = {
    "DPO": {"max_length": 6, "truncation_mode": "keep_end"},
    "KTO": {"loss_type": "apo_zero_unpaired"},
    "SFT": {},
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("DPO", "padding-free, left"), ("KTO", "padded, left")],
)
def test_rows_without_a_prompt_weigh_as_in_trl(kind, mode, tmp_path, monkeypatch):
    prepared(monkeypatch, kind)
    data = Dataset.from_list(rows_of(kind, empty=False))
    ours = train(trl_padfix, kind, tmp_path, data, CONFIGS[kind] | MODES[mode])
    theirs = train(trl, kind, tmp_path, data, CONFIGS[kind])
    assert_same(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("DPO", "padding-free, left"), ("KTO", "prefix sharing"), ("SFT", "padded, left")],
)
def test_rows_without_a_token_do_not_stop_a_stream(kind, mode, tmp_path, monkeypatch):
    prepared(monkeypatch, kind)
    data = Dataset.from_list(rows_of(kind, empty=True))
    config = {} if kind == "SFT" else CONFIGS[kind]
    ours = train(trl_padfix, kind, tmp_path, data.to_iterable_dataset(), config | MODES[mode])
    assert ours[1].isfinite().all()
    # An empty row teaches nothing: whatever stands in its place in the batch is of no account.
    without_empty_rows = SidedCollator.without_empty_rows

    def other_token(collator, batch):
        batch = without_empty_rows(collator, batch)
        empty = batch["input_ids"].eq(collator.pad_token_id).all(1)
        seen.append(int(empty.sum()))
        return batch | {"input_ids": batch["input_ids"].masked_fill(empty[:, None], 7)}

    seen = []
    monkeypatch.setattr(SidedCollator, "without_empty_rows", other_token)
    other = train(trl_padfix, kind, tmp_path, data.to_iterable_dataset(), config | MODES[mode])
    assert_same(other[1], ours[1])
    assert sum(seen) > 0


def test_a_batch_of_empty_rows_alone_is_a_batch(tmp_path):
    collator = trl_padfix.DataCollatorForLanguageModeling(pad_token_id=0, padding_side="left")
    batch = collator([{"input_ids": [], "labels": []}] * 2)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[0], [0]], "attention_mask": [[1], [1]], "labels": [[-100], [-100]],
    }  # fmt: skip
