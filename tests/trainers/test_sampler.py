"""
`group_by_prefix`: rows that begin alike meet in a step, and the step is the one that TRL would make of these rows.

TRL's own trainer, padded and in the order that our sampler gives, is what every run is compared with.
"""

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from kit.budget_runs import ALL_TRAINERS, GLOBAL_BATCH, assert_same, build_branching, make

from trl_padfix import DPOConfig
from trl_padfix.trainers.batching.measures import TextMeasure
from trl_padfix.trainers.batching.step_plan import StepPlan
from trl_padfix.trainers.batching.streams import GroupedStream


GROUPED = {"padding_free": True, "prefix_sharing": True, "group_by_prefix": True}
WITHOUT_BUDGET = GROUPED | {"max_tokens_per_batch": None}
ACCUMULATED = {"per_device_train_batch_size": GLOBAL_BATCH // 2, "gradient_accumulation_steps": 2}


def grouped(name, folder, **config):
    settings = {"train_dataset": build_branching(name), "max_steps": 4, "parity_check": False} | WITHOUT_BUDGET
    return make(name, folder, ours=True, **settings | config)


def order_of(trainer):
    given = list(trainer.get_train_dataloader().batch_sampler.sampler)
    return given if isinstance(given[0], int) else [row for share in given for row in share.rows]


def figures(trainer, *names):
    return torch.tensor([[log[n] for n in ("loss", "grad_norm", *names)] for log in trainer.state.log_history[:-1]])


def starts(name, rows):
    """What the rows of each step begin with: a number for each beginning."""
    return [sorted(set(step.tolist())) for step in (np.array(rows) % 8).reshape(-1, GLOBAL_BATCH)]


@pytest.mark.parametrize("name", ALL_TRAINERS)
def test_steps_of_grouped_rows_are_trls_steps_of_these_rows(name, tmp_path):
    ours = grouped(name, tmp_path, max_steps=2)
    order = order_of(ours)
    # 8 beginnings of 4 rows each, in 4 steps of 8 rows.
    assert sorted(order) == list(range(32))
    assert all(len(found) == 2 for found in starts(name, order))
    ours.train()
    theirs = make(name, tmp_path, ours=False, max_steps=2, train_dataset=build_branching(name))
    theirs._get_train_sampler = lambda *args: order
    theirs.train()
    assert_same(figures(ours), figures(theirs))
    # The same rows in another order are other steps.
    mixed = make(name, tmp_path, ours=False, max_steps=2, train_dataset=build_branching(name))
    mixed.train()
    with pytest.raises(AssertionError, match="not close"):
        assert_same(figures(ours), figures(mixed))
    # With `max_tokens_per_batch` and with accumulation the steps have the same rows and the same loss.
    # Of KTO the KL term compares the rows of a micro-batch, so accumulation makes it another loss.
    split = grouped(name, tmp_path, max_steps=2, max_tokens_per_batch=60, **({} if name == "kto" else ACCUMULATED))
    assert [sorted(step) for step in np.reshape(order_of(split), (4, 8)).tolist()] == [
        sorted(step) for step in np.reshape(order, (4, 8)).tolist()
    ]
    split.train()
    assert_same(figures(split), figures(ours))


def test_grouping_computes_what_several_rows_begin_with_once(tmp_path):
    computed = {}
    for group in (True, False):
        trainer = grouped("sft", tmp_path, group_by_prefix=group)
        trainer.train()
        stats = trainer.padding.stats
        computed[group] = stats.packed_tokens / stats.real_tokens
    assert computed[True] < computed[False] - 0.1


def test_groups_are_drawn_by_seed_and_epoch_and_stay_whole_in_micro_batches(tmp_path):
    trainer = grouped("dpo", tmp_path, seed=5, **ACCUMULATED)
    first = order_of(trainer)
    assert order_of(trainer) == first
    assert order_of(grouped("dpo", tmp_path, seed=6, **ACCUMULATED)) != first
    # A micro-batch of four pairs is one prompt.
    assert all(len(set(rows)) == 1 for rows in (np.array(first) % 8).reshape(-1, 4).tolist())
    epochs = set()
    for epoch in range(4):
        trainer.state.epoch = float(epoch)
        epochs.add(tuple(sorted(map(tuple, starts("dpo", order_of(trainer))))))
    assert len(epochs) > 2  # which groups meet


def test_a_grouped_run_is_resumed_in_the_middle_of_an_epoch(tmp_path):
    saved = {"max_steps": 7, "save_strategy": "steps", "save_steps": 6} | ACCUMULATED
    whole = grouped("dpo", tmp_path, **saved)
    whole.train()
    resumed = grouped("dpo", tmp_path, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same(figures(resumed)[-1], figures(whole)[-1])
    assert not torch.allclose(figures(whole)[-1], figures(whole)[-2])


def test_a_stream_is_grouped_within_its_buffer(tmp_path):
    rows = [{"input_ids": [i % 8, 20, 20, 20, 21, i]} for i in range(70)]
    plan = StepPlan(0, micro_batch=4, accumulation_steps=2)
    for _ in range(2):
        stream = list(GroupedStream(rows, TextMeasure(sharing=True), plan, buffer=35))
        assert sorted(row["input_ids"][5] for row in stream) == list(range(70))
        # 35 rows are rounded down to four whole steps; each buffer is grouped by itself.
        assert {row["input_ids"][5] for row in stream[:32]} == set(range(32))
        assert all(len({row["input_ids"][0] for row in stream[i : i + 4]}) == 1 for i in range(0, 64, 4))
    data = build_branching("sft")
    streamed = grouped("sft", tmp_path, train_dataset=data.to_iterable_dataset(), group_by_prefix_buffer=32)
    assert isinstance(streamed.train_dataset, IterableDataset)
    streamed.train()
    known = grouped("sft", tmp_path, train_sampling_strategy="sequential")
    known.train()
    assert_same(figures(streamed), figures(known))


def test_without_the_field_no_row_moves(tmp_path):
    trainer = grouped("dpo", tmp_path, group_by_prefix=False)
    assert type(trainer._get_train_sampler()).__name__ == "RandomSampler"
    split = grouped("dpo", tmp_path, group_by_prefix=False, max_tokens_per_batch=60)
    plain = make("dpo", tmp_path, ours=False, train_dataset=build_branching("dpo"))
    theirs = np.reshape(list(plain.get_train_dataloader().batch_sampler.sampler), (4, 8))
    ours = np.reshape(order_of(split), (4, 8))
    assert np.sort(ours).tolist() == np.sort(theirs).tolist()


# Input


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prefix_sharing": False}, "`group_by_prefix=True` needs `prefix_sharing=True`"),
        ({"group_by_prefix_buffer": 0}, "`group_by_prefix_buffer=0` is the number of rows of a stream"),
        ({"group_by_prefix": False, "group_by_prefix_buffer": 8}, "`group_by_prefix_buffer=8` is the number of rows"),
        ({"train_sampling_strategy": "group_by_length"}, "`group_by_length` both say which rows meet in a step"),
    ],
)
def test_settings_that_do_not_go_together_are_errors(config, message):
    if not config.keys() <= DPOConfig.__dataclass_fields__.keys():
        config = {"group_by_length": True}
    with pytest.raises(ValueError, match=message):
        DPOConfig(**{"use_cpu": True, "bf16": False} | GROUPED | config)


def test_a_stream_without_a_buffer_is_an_error(tmp_path):
    stream = build_branching("dpo").to_iterable_dataset()
    with pytest.raises(ValueError, match=r"is a `IterableDataset`, which.*`group_by_prefix_buffer=8192`"):
        grouped("dpo", tmp_path, train_dataset=stream)
