"""A forward in sub-batches: its outputs, its gradients and the trajectories of losses that compare rows."""

from functools import partial

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.observe import accept_hooks, entered_tokens
from kit.rows import build_prompts
from kit.tolerance import assert_close
from kit.trainer_runs import assert_same, build_model, run

import trl_padfix
from trl_padfix import remove_padding
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.trainers.batching.row_splits import RowSplitter
from trl_padfix.trainers.batching.sub_batches import SubBatches, _merged_loss
from trl_padfix.trainers.batching.token_budget import TokenBudget


@pytest.fixture(autouse=True)
def every_shared_prefix_pays(monkeypatch):
    """So that trainers compute prefixes of a few tokens once for all sub-batches."""
    monkeypatch.setattr(planning, "MIN_SAVED_TOKENS", 1)


def batch():
    """Six rows of three prompts, padded on both sides."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 39, (6, 14), generator=draw)
    ids[3:, :8] = ids[:3, :8]
    mask = torch.ones_like(ids)
    for row, (begin, end) in enumerate([(0, 14), (3, 12), (1, 9), (0, 13), (3, 14), (1, 14)]):
        mask[row, :begin] = mask[row, end:] = 0
    return ids, mask


def test_the_models_own_loss_is_a_mean_over_the_labels_of_all_rows():
    model, (ids, mask) = build_model().train(), batch()
    follows_real = torch.cat([mask[:, :1], mask[:, :-1]], dim=1) * mask
    labels = ids.masked_fill(follows_real == 0, -100)
    labels[0, 2:10] = -100  # a label in column 0, which no loss scores, among few others
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    with torch.no_grad(), remove_padding(model) as handle, attach_runner_patch(model):
        whole = model(**call).loss
        rows = torch.stack(
            [model(**{k: v[i : i + 1] for k, v in call.items() if k != "use_cache"}).loss for i in range(6)]
        )
        with within(runner=SubBatches(partial(RowSplitter, 14, False))):
            split = model(**call).loss
    assert handle.stats.padded_forwards == 0
    assert_close(split, whole, terms=64, depth=24, control=rows.mean())


def test_outside_of_the_block_and_after_removal_nothing_is_split():
    model = build_model()
    forward = vars(model).get("forward")
    ids, mask = batch()
    entered = entered_tokens(model)
    first = attach_runner_patch(model)
    second = attach_runner_patch(model)  # replaces the first
    model(input_ids=ids, attention_mask=mask)
    with within(runner=SubBatches(partial(RowSplitter, 20, False))):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        second.remove()
        model(input_ids=ids, attention_mask=mask)
    assert entered[0] == entered[-1] == sum(entered[1:-1]) == ids.numel()
    assert len(entered) > 3
    assert vars(model).get("forward") is forward
    assert not first.enabled


def test_all_processes_have_as_many_sub_batches_as_the_one_with_most():
    ids, mask = batch()
    sub_batches = RowSplitter(10**6, True, sync_count=lambda count: count + 3).split(ids, mask).rows
    assert len(sub_batches) == 4
    assert sorted(torch.cat(sub_batches).tolist()) == list(range(6))


# GRPO


METRICS = ("reward", "num_tokens", "completions/mean_length")


def train(library, folder, trainer_class, **config):
    """A training, and the tokens of the forwards with a graph."""
    budget = {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 48, "parity_check": False}
    given = {"max_steps": 4, "train_dataset": build_prompts(16)} | (budget if library is trl_padfix else {})
    trainer = make_trainer(library, "GRPO", folder, trainer_class, **given | config)
    with_graph = []
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: with_graph.append(args[0].shape[1] * torch.is_grad_enabled()))
    accept_hooks(trainer.model)
    return run(trainer, lambda *args: None), sum(with_graph)


def test_deepspeed_is_refused_where_forwards_are_computed_again(tmp_path):
    trainer = make_trainer(trl_padfix, "GRPO", tmp_path, padding_free=True, max_tokens_per_batch=48)
    trainer.is_deepspeed_enabled = True
    trainer.compute_loss = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="would recompute forwards in the backward pass"):
        trainer.get_train_dataloader()


def distinct_tokens(monkeypatch):
    """The distinct tokens of the batches whose loss is computed in training."""
    tokens, compute = [], TokenBudget.compute_loss

    def computed(part, of_trl, model, inputs, *args, **kwargs):
        if part.trainer.model.training:
            ids, mask = part.trainer.padding.task.padded_batches(inputs)[0].values()
            tokens.append(prefix_sharing_layout(ids, mask).packed_tokens)
        return compute(part, of_trl, model, inputs, *args, **kwargs)

    monkeypatch.setattr(TokenBudget, "compute_loss", computed)
    return tokens


class OwnLoss:
    def _compute_loss(self, *args):
        return 2 * super()._compute_loss(*args)


class OwnScores:
    """Compares rows where TRL's loss compares none."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps - 0.5 * logps[:, :1].mean(), *others  # no padding among these


@pytest.mark.parametrize("own", [None, OwnLoss, OwnScores])
def test_a_loss_of_the_users_own_takes_two_passes_and_trls_one(own, tmp_path, monkeypatch):
    """It may not be a sum over rows, and neither may what it calls."""
    distinct = distinct_tokens(monkeypatch)
    classes = [type("Own", (own, library.GRPOTrainer), {}) if own else None for library in (trl_padfix, trl)]
    (ours, tokens), (theirs, _) = (
        train(library, tmp_path, owner) for library, owner in zip((trl_padfix, trl), classes, strict=True)
    )
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert tokens == sum(distinct) if own is None else tokens > 1.2 * sum(distinct)


def test_losses_without_logits_weigh_by_the_labels_that_are_scored():
    labels = torch.tensor([[5, 6, 7], [5, -100, -100]]), torch.tensor([[-100, 7, 8]])  # two scored in each
    merged = _merged_loss([torch.tensor(1.0), torch.tensor(4.0)], [{"labels": x} for x in labels])
    assert merged.item() == 2.5
