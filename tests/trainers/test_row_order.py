"""`group_by_prefix`, and even tokens for processes: a permutation of TRL's order, whose steps are those of TRL."""

from itertools import chain

import numpy as np
import pytest
import trl
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from kit.budget_runs import GLOBAL_BATCH, assert_same, build_branching, make, subclass
from kit.trainer_runs import figures
from torch.utils.data import BatchSampler, DataLoader
from zoo import models

import trl_padfix
from trl_padfix.trainers.batching.bin_packing import RowCosts, prefix_costs, sort_by_prefix, text_costs
from trl_padfix.trainers.batching.row_order import Batches, RowOrder, group_rows


GROUPED = {"padding_free": True, "prefix_sharing": True, "group_by_prefix": True, "parity_check": False}
ACCUMULATED = {"per_device_train_batch_size": GLOBAL_BATCH // 2, "gradient_accumulation_steps": 2}
ROWS = 40  # of 8 beginnings


def grouped(kind, folder, **config):
    settings = {"train_dataset": build_branching(kind), "max_steps": 4} | GROUPED
    return make(trl_padfix, kind, folder, **settings | config)


def order_of(trainer, epoch=0):
    loader = trainer.get_train_dataloader()
    loader.set_epoch(epoch)
    return [row for batch in loader.batch_sampler for row in batch]


def logged(trainer):
    return figures(trainer.state.log_history).flatten()


def beginnings(rows):
    """What the rows of each step begin with: a number for each beginning."""
    return [sorted(set(step.tolist())) for step in (np.array(rows) % 8).reshape(-1, GLOBAL_BATCH)]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_steps_of_grouped_rows_are_trls_steps_of_these_rows(kind, tmp_path):
    ours = grouped(kind, tmp_path, max_steps=2)
    order = order_of(ours)
    assert sorted(order) == list(range(ROWS))
    assert all(len(found) <= 3 for found in beginnings(order))  # 5 rows of each beginning, in 5 steps of 8 rows
    ours.train()
    runs = []
    for rows in (order, order[::-1]):  # the control: the same rows in another order
        theirs = make(trl, kind, tmp_path, max_steps=2, train_dataset=build_branching(kind))
        theirs._get_train_sampler = lambda *args, rows=rows: rows
        theirs.train()
        runs.append(logged(theirs))
    assert_same(logged(ours), runs[0])
    with pytest.raises(AssertionError, match="not close"):
        assert_same(logged(ours), runs[1], factor=10)
    split = grouped(kind, tmp_path, max_steps=2, max_tokens_per_batch=60)
    assert order_of(split) == order
    split.train()
    assert_same(logged(split), logged(ours))


def test_groups_are_drawn_by_seed_and_epoch_and_stay_whole_in_batches(tmp_path):
    trainer = grouped("DPO", tmp_path, seed=5, train_dataset=build_branching("DPO").select(range(32)), **ACCUMULATED)
    first = order_of(trainer)
    assert order_of(trainer) == first
    assert order_of(grouped("DPO", tmp_path, seed=6)) != first
    # A batch of four pairs is one prompt.
    assert all(len(set(rows)) == 1 for rows in (np.array(first) % 8).reshape(-1, 4).tolist())
    epochs = {tuple(sorted(map(tuple, beginnings(order_of(trainer, epoch))))) for epoch in range(4)}
    assert len(epochs) > 2  # which groups meet


@pytest.mark.parametrize("is_own", [True, False])
def test_rows_of_a_loader_or_sampler_of_the_users_own_are_not_ordered_in_silence(is_own, tmp_path):
    def get_train_dataloader(trainer):
        if is_own:
            return DataLoader(trainer.train_dataset, 8, collate_fn=trainer.data_collator)
        return super(type(trainer), trainer).get_train_dataloader()

    trainer = subclass(grouped("DPO", tmp_path, max_steps=1), get_train_dataloader=get_train_dataloader)
    if not is_own:
        trainer.train()
        return
    with pytest.raises(ValueError, match=r"`get_train_dataloader` of Own returns another one\. Call `super"):
        trainer.train()


def test_a_sampler_of_the_users_own_is_refused_when_the_trainer_is_made(tmp_path):
    class Own(trl_padfix.DPOTrainer):
        def _get_train_sampler(self, *args):
            return range(len(self.train_dataset))

    with pytest.raises(ValueError, match=r"`group_by_prefix=True` and `Own\._get_train_sampler` both order"):
        grouped("DPO", tmp_path, trainer_class=Own)


EXPERTS = {"model": lambda: models.build("qwen3_moe"), "ref_model": lambda: models.build("qwen3_moe", seed=1)}


def prepare(trainer):
    """A user's code may cut a batch to its shortest row."""
    subclass(trainer, _prepare_inputs=lambda trainer, inputs: inputs)


def clamp(trainer):
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


COMPARED = [({"loss_type": ["aot"]}, None), (EXPERTS, None), ({}, prepare), ({}, clamp)]


@pytest.mark.parametrize(("more", "change", "moves"), [({}, None, True), *((*case, False) for case in COMPARED)])
def test_rows_move_to_another_process_if_nothing_compares_them_in_a_batch(more, change, moves, tmp_path, monkeypatch):
    """The balancing loss of experts does."""
    monkeypatch.setattr(RowOrder, "_batches", lambda part: Batches(4, processes=2))
    given = {name: value() if callable(value) else value for name, value in more.items()}
    ours, theirs = (make(trl_padfix, "DPO", tmp_path, padding_free=free, **given) for free in (True, False))
    if change is not None:
        change(ours)
    assert (order_of(ours) != order_of(theirs)) is moves


def drawn_costs(draw, count):
    begins = [np.arange(10 * i, 10 * i + draw.randint(1, 6)) for i in range(3)]
    rows = [
        np.concatenate([draw.choice(begins), [99 + draw.randint(0, 9)] * draw.randint(1, 9)]) for _ in range(count)
    ]
    each = np.array([len(row) for row in rows])
    return prefix_costs(each, each, *sort_by_prefix(rows))


@given(
    st.integers(1, 30), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_permutation_has_each_row_once_and_ungrouped_in_its_round(count, size, processes, steps, groups, draw):
    order, costs = draw.sample(range(count), count), drawn_costs(draw, count)
    batches = Batches(size, processes, steps)
    found = batches.permuted(order, costs, groups)
    assert found.tolist() == batches.permuted(order, costs, groups).tolist()
    assert sorted(found.tolist()) == sorted(order)
    if groups:
        return
    per_round = size * processes
    for begin in range(0, count, per_round):
        assert sorted(found[begin : begin + per_round]) == sorted(order[begin : begin + per_round])


def test_processes_get_equal_rows_and_even_work():
    """As accelerate shards the batches."""
    draw = np.random.default_rng(0)
    costs = text_costs(draw.lognormal(5, 0.8, 256).astype(int).clip(1, 1024))
    order = draw.permutation(256)
    waiting, quadratic = [], 1e-3
    cost = lambda batch: sum(n + quadratic * n * n for n in costs.tokens[batch])  # noqa: E731
    for rows in (order, Batches(8, 4, quadratic=quadratic).permuted(order, costs, is_grouped=False)):
        shards = [list(BatchSamplerShard(BatchSampler(rows.tolist(), 8, False), 4, i)) for i in range(4)]
        assert {len(batch) for shard in shards for batch in shard} == {8}
        work = np.array([[cost(batch) for batch in shard] for shard in shards])
        waiting.append(1 - work.mean() / work.max(0).mean())
    assert waiting[1] < 0.3 * waiting[0]


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.booleans(), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_rows_that_fill_an_epoch_are_those_of_accelerate(count, size, processes, steps, splits, groups, draw):
    """The rows of all processes at a time, and those that are trained twice."""

    def rounds(rows):
        whole = BatchSampler(rows, size * (processes if splits else 1), False)
        given = {"split_batches": splits, "even_batches": True}
        shards = [list(BatchSamplerShard(whole, processes, i, **given)) for i in range(processes)]
        return [sorted(chain(*batches)) for batches in zip(*shards, strict=True)]

    order, costs = draw.sample(range(count), count), drawn_costs(draw, count)
    batches = Batches(size, processes, steps, is_filled=True)
    found = batches.permuted(order, costs, groups).tolist()
    assert len(found) % (size * processes) == 0
    assert found[count:] == np.resize(order, len(found) - count).tolist()  # the first of TRL's rows, repeated
    if groups:
        assert sorted(chain(*rounds(found))) == sorted(chain(*rounds(order)))
    else:
        assert rounds(found) == rounds(order)
        if count % (size * processes):  # in their places in the last step, whose last round is filled
            begin = (count - 1) // batches.per_step * batches.per_step
            assert found[begin:count] == order[begin:]


def test_longer_prefixes_stay_together_where_a_step_ends():
    """Seven rows of a prompt, of which three share a question, two of another, and one alone: in steps of four."""
    costs = RowCosts(np.full(10, 40), np.arange(10), np.array([0, 10, 10, 10, 10, 30, 30, 0, 20, 0]))
    steps = np.split(group_rows(costs, 4), [4, 8])
    assert any({4, 5, 6} <= set(step.tolist()) for step in steps)
    assert any({7, 8} <= set(step.tolist()) for step in steps)
