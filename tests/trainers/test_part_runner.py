"""A forward in sub-batches: its outputs, its gradients and the trajectories of losses that compare rows."""

from __future__ import annotations

import weakref
from copy import copy
from typing import Any

import pytest
import torch
import transformers
import trl
from accelerate import PartialState
from kit import budget_runs
from kit.budget_runs import BUDGETS, build_experts, make, subclass, train_split
from kit.methods import make_trainer
from kit.observe import accept_hooks, entered_tokens
from kit.processes import logged
from kit.rows import build_prompts
from kit.tolerance import assert_close
from kit.trainer_runs import assert_same, build_model, our_warnings, run
from packaging.version import Version

import trl_padfix
from trl_padfix import remove_padding
from trl_padfix.core.context import within
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.core.remove import attach_runner_patch
from trl_padfix.trainers.batching import merged_output
from trl_padfix.trainers.batching.bin_packing import RowSplitter
from trl_padfix.trainers.batching.merged_output import LossChecks, SubBatchOutput, _loss_of_labels
from trl_padfix.trainers.batching.part_runner import PartRunner
from trl_padfix.trainers.batching.token_budget import TokenBudget


pytestmark = pytest.mark.usefixtures("every_shared_prefix_pays")


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
        with within(runner=PartRunner(RowSplitter(14, False))):
            split = model(**call).loss
        counted = copy(handle.stats)
        with within(runner=PartRunner(RowSplitter(14, False))), torch.enable_grad():
            loss = model(**call).loss
        once = handle.stats.packed_tokens
        loss.backward()  # recomputes all sub-batches except one
    assert handle.stats.packed_tokens == once > counted.packed_tokens
    assert handle.stats.padded_forwards == 0
    assert_close(split, whole, terms=64, depth=24, control=rows.mean())


@pytest.mark.parametrize("of_reference", [torch.no_grad, torch.inference_mode])
def test_the_parts_of_a_policy_have_gradients_also_if_a_reference_came_first(of_reference):
    runner = PartRunner(RowSplitter(14, False))
    embeds, mask = torch.randn(6, 5, 4, requires_grad=True), torch.ones(6, 5, dtype=torch.long)
    call = {"inputs_embeds": embeds * 2, "attention_mask": mask}
    with of_reference():
        first = runner._split(call)
    assert runner._split(call) is first
    sum(inputs["inputs_embeds"].pow(2).sum() for inputs in first.inputs).backward()
    assert len(first.inputs) > 1
    assert torch.equal(embeds.grad, 8 * embeds.detach())


def test_an_unknown_loss_costs_one_sub_batch_once(monkeypatch):
    """The sub-batch is freed before all rows run at once, and a call without the loss is split."""
    PartialState(cpu=True)  # for the log
    model, (ids, mask), checks = build_model().train(), batch(), LossChecks()
    forward, rows, logits, alive = model.forward, [], [], []

    def own(**given: Any) -> Any:
        rows.append(len(given["input_ids"]))
        alive.append(sum(reference() is not None for reference in logits))
        output = forward(**given)
        logits.append(weakref.ref(output.logits))
        if output.loss is not None:
            output["loss"] = output.loss + output.logits.square().max()
        return output

    def rows_of_forwards(labels: torch.Tensor | None, **splitter: Any) -> list[int]:
        rows.clear()
        with within(runner=PartRunner(RowSplitter(28, False, **splitter), loss_checks=checks)):
            model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        return rows

    monkeypatch.setattr(model, "forward", own)
    with attach_runner_patch(model):
        of_parts = [*rows_of_forwards(None)]
        alive.clear()
        without_labels = torch.full_like(ids, -100)  # a loss of NaN shows nothing of other batches
        assert rows_of_forwards(without_labels) == [of_parts[0], 6]
        # Another process, which has no labels, must run as many forwards in the next step.
        assert rows_of_forwards(ids, sync_count=lambda count: count or 1) == [of_parts[0], 6]
        assert rows_of_forwards(ids) == [of_parts[0], 6]
        assert rows_of_forwards(ids) == [6]
        assert not any(alive)
        assert rows_of_forwards(None) == of_parts
    assert sum(of_parts) == 6 > len(of_parts) > 1


def test_a_loss_that_another_process_cannot_split_is_not_split_here():
    model, (ids, mask) = build_model().train(), batch()
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    first = SubBatchOutput(call, model(**call), None)
    assert LossChecks().check(model, first, int)
    assert not LossChecks().check(model, first, lambda unknown: 1)


def test_outside_of_the_block_and_after_removal_nothing_is_split():
    model = build_model()
    forward = vars(model).get("forward")
    ids, mask = batch()
    entered = entered_tokens(model)
    first = attach_runner_patch(model)
    second = attach_runner_patch(model)  # replaces the first
    model(input_ids=ids, attention_mask=mask)
    with within(runner=PartRunner(RowSplitter(20, False))):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        second.remove()
        model(input_ids=ids, attention_mask=mask)
    assert entered[0] == entered[-1] == sum(entered[1:-1]) == ids.numel()
    assert len(entered) > 3
    assert vars(model).get("forward") is forward
    assert not first.enabled


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


class OwnScores:
    """Compares rows where TRL's loss compares none."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps - 0.5 * logps[:, :1].mean(), *others  # no padding among these


@pytest.mark.parametrize("own", [None, OwnScores])
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
    merged = _loss_of_labels([torch.tensor(1.0), torch.tensor(4.0)], [{"labels": x} for x in labels])
    assert merged.item() == 2.5


# -- a custom loss may call the model in other ways than TRL: the budget holds, or the log says that it does not


def of_decoder(model, ids, mask):
    return model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)


def of_embeddings(model, ids, mask):
    return model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits


def without_mask(model, ids, mask):
    return model(input_ids=ids).logits


def with_hidden_states(model, ids, mask):
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return output.logits * (1 + output.hidden_states[1].detach()[..., :1])


def with_cache(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, use_cache=True).logits


CALLS = (of_decoder, of_embeddings, without_mask, with_hidden_states)
CALLS = {f.__name__: f for f in CALLS}
CELLS = [  # each call once, the trainers and modes by turns
    (("SFT", "DPO")[i % 2], call, {"prefix_sharing": True} if i // 2 % 2 else {}) for i, call in enumerate(CALLS)
]


def calling(call):
    """A loss that takes its logits from `call`, a mean over rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        labels = inputs["labels"] if "labels" in inputs else ids.masked_fill(inputs["completion_mask"] == 0, -100)
        logits = call(model, ids, mask)[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()

    return compute_loss


def run_split(name, call, ours, **config):
    trainer = make(trl_padfix if ours else trl, name, "unused", budget=ours, **config)
    return train_split(subclass(trainer, compute_loss=calling(call)))


@pytest.mark.parametrize(("name", "call", "mode"), CELLS)
def test_the_budget_holds_for_every_way_to_call_the_model(name, call, mode):
    ours = run_split(name, CALLS[call], True, **mode)
    budget_runs.assert_same(ours.figures, run_split(name, CALLS[call], False).figures)
    assert max(ours.forwards) <= BUDGETS[name]


def test_a_call_that_cannot_be_split_is_named_once(caplog):
    theirs = run_split("SFT", with_cache, False).figures
    with caplog.at_level("WARNING"):
        ours = run_split("SFT", with_cache, True)
    budget_runs.assert_same(ours.figures, theirs)
    assert not ours.forwards  # which leave out those with a cache
    (said,) = (message for message in our_warnings(caplog) if "was not applied" in message)
    assert "Qwen2ForCausalLM" in said
    assert "`use_cache=True`" in said


class Prepared:
    """A collator whose masks say which token attends to which, `(B, 1, L, L)`."""

    def __init__(self, collator):
        self.collator = collator

    def __call__(self, examples):
        batch = dict(self.collator(examples))
        seen = batch["attention_mask"].bool()[:, None, None, :] | torch.eye(batch["input_ids"].shape[1]).bool()
        return batch | {"attention_mask": seen.expand(-1, -1, seen.shape[-1], -1).tril()}


def test_a_collator_with_a_prepared_mask_has_trls_figures(caplog):
    def figures(library):
        trainer = make(library, "SFT", "unused", budget=library is trl_padfix, gradient_accumulation_steps=2)
        trainer.data_collator = Prepared(trainer.data_collator)
        return train_split(trainer).figures

    budget_runs.assert_same(figures(trl_padfix), figures(trl))
    assert any("`attention_mask` is not of shape `(B, L)`" in line for line in our_warnings(caplog))


def test_arguments_without_a_row_for_each_row_are_not_cut():
    """Three rows, and three axes of M-RoPE, three columns to score, three positions in a cache."""
    ids, mask = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.int64)
    axes = torch.arange(36).view(3, 3, 4)
    columns = torch.arange(3)
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids, "position_ids": axes}
    call |= {"logits_to_keep": columns, "cache_position": columns}
    batch = PartRunner(RowSplitter(8, sharing=False))._split(call)
    assert len(batch.inputs) == 2
    for rows, of_rows in zip(batch.parts.rows, batch.calls(call), strict=True):
        assert torch.equal(of_rows["labels"], ids[rows])
        assert torch.equal(of_rows["position_ids"], axes[:, rows])
        assert of_rows["logits_to_keep"] is of_rows["cache_position"] is columns


# -- the load-balancing loss of experts under a token budget is that of all rows of a step, gradients too


@pytest.mark.matrix
@pytest.mark.slow
def test_two_processes_have_the_loss_of_their_whole_batches(tmp_path):
    found = logged("fsdp2", tmp_path, "kit.budget_runs", "experts")
    for name in ("SFT", "DPO"):
        whole, split = found[name]
        steps = [[log for log in run["history"] if "loss" in log] for run in (whole, split)]
        names = sorted(n for n in steps[0][0] if not n.startswith(("perf/", "padfix/")))
        assert {"loss", "grad_norm", "aux_loss"} <= set(names)
        budget_runs.assert_same(*(torch.tensor([[log[n] for n in names] for log in logs]) for logs in steps))
        assert max(split["forwards"]) <= BUDGETS[name] < max(whole["forwards"])


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("num_items", [None, 40])
def test_a_loss_without_logits_has_the_balancing_loss_of_all_rows_once(num_items, counts, monkeypatch):
    """
    TRL up to 1.15 and Liger compute the loss within the head. TRL's counts tokens beside it, and reads the weight from
    the configuration under transformers 5.
    """
    model = build_experts("mixtral").eval()
    weights = {"model": 50.0, "config": 20.0}
    model.router_aux_loss_coef, model.config.router_aux_loss_coef = weights.values()
    added = weights["config"] - weights["model"] if counts and Version(transformers.__version__).major > 4 else 0.0
    ids = torch.randint(2, 39, (6, 14), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids > 30, -100)}
    call |= {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    forward = model.forward

    def head(**given: Any) -> Any:
        output = forward(**given)
        hits = output.logits[:, :-1].argmax(-1) == given["labels"][:, 1:]
        output["loss"] = output.loss + added * output.aux_loss
        output |= {"num_correct_tokens": hits.sum()} if counts else {}
        output["logits"] = None
        return output

    def figures(runner: PartRunner | None) -> torch.Tensor:
        with remove_padding(model), attach_runner_patch(model), within(runner=runner), torch.no_grad():
            output = model(**call, use_cache=False, output_router_logits=True)
        return torch.stack([output.loss, output.num_correct_tokens if counts else ids.new_ones(()), output.aux_loss])

    monkeypatch.setattr(model, "forward", head)
    split = figures(PartRunner(RowSplitter(14, False)))
    assert_close(split, figures(None), terms=64, depth=32)
    monkeypatch.setattr(merged_output, "balancing_term", lambda model, output: 0.0)
    wrong = figures(PartRunner(RowSplitter(14, False)))
    assert abs(wrong[0] - split[0]) > 0.1
    assert wrong[1] == split[1] > 0


def test_a_loss_of_another_kind_is_an_error(monkeypatch):
    model = build_experts("mixtral").train()
    monkeypatch.setattr(model.config, "num_experts_per_tok", 1)
    runner = PartRunner(RowSplitter(14, False))
    call = {"input_ids": (ids := torch.arange(2, 34).view(4, 8)), "attention_mask": torch.ones_like(ids)}
    refused = pytest.raises(ValueError, match=r"load-balancing loss of Mixtral\w+ is .* but their router logits")
    with remove_padding(model), attach_runner_patch(model), within(runner=runner), refused:
        model(**call, use_cache=False, output_router_logits=True)
