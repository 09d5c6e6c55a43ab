"""A forward in sub-batches: its outputs, its gradients and the trajectories of losses that compare rows."""

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.methods import make_trainer
from kit.observe import accept_hooks, entered_tokens
from kit.online_runs import admitted, load_policy, save_policy
from kit.rows import build_prompts
from kit.trainer_runs import assert_same, build_model, run

import trl_padfix
from trl_padfix import GRPOConfig, RLOOTrainer, remove_padding
from trl_padfix.core.call.runner_patch import attach_runner_patch
from trl_padfix.core.context import within
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.trainers.batching.sub_batches import SubBatches
from trl_padfix.trainers.batching.token_budget import SubBatchBudget


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


def gradients(model, budget, sharing=True):
    """Logits, gradients of a loss that compares all rows, and the tokens of each forward."""
    ids, mask = batch()
    model.zero_grad()
    with remove_padding(model, prefix_sharing=sharing), attach_runner_patch(model), entered_tokens(model) as entered:
        with within(runner=budget and SubBatches(budget, sharing)):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logps = (logits.log_softmax(-1)[..., 3] * mask).sum(1)
        (logps.sort().values * torch.arange(6.0)).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters()], entered


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sub_batches_have_the_outputs_and_gradients_of_the_whole_forward(checkpointing):
    model = build_model().train()
    whole = gradients(model, None)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for budget in (14, 24, 40):
        logits, grads, entered = gradients(model, budget)
        torch.testing.assert_close(logits, whole[0], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(grads, whole[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
        assert len(entered) > 2
        assert max(entered) <= budget
    assert len(whole[2]) == 1
    # Rows of a prompt are in one sub-batch: 14 + 9 + 8 tokens and what their companions have of their own.
    assert sum(gradients(model, 24)[2][:3]) == whole[2][0]


@pytest.mark.parametrize("across", [False, True])
def test_a_batch_that_is_written_to_between_two_forwards_is_split_again(across):
    (ids, mask), model = batch(), build_model()
    with remove_padding(model, prefix_sharing=True), attach_runner_patch(model), torch.no_grad():
        with within(runner=SubBatches(24, True, share_across_sub_batches=across)):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
            ids[:, 5] = 3
            model(input_ids=ids, attention_mask=mask, use_cache=False)
            ids.data[:, 5] = 4
            found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_sub_batches_in_a_wrong_order_are_another_gradient(monkeypatch):
    model = build_model().train()
    whole = gradients(model, None)
    monkeypatch.setattr(torch.Tensor, "argsort", lambda x: torch.arange(len(x)))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(gradients(model, 24)[1][0], whole[1][0], rtol=1e-5, atol=1e-5)


def test_outside_of_the_block_and_after_removal_nothing_is_split():
    model = build_model()
    forward = vars(model).get("forward")
    ids, mask = batch()
    entered = entered_tokens(model)
    first = attach_runner_patch(model)
    second = attach_runner_patch(model)  # replaces the first
    model(input_ids=ids, attention_mask=mask)
    with within(runner=SubBatches(20, False)):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        second.remove()
        model(input_ids=ids, attention_mask=mask)
    assert entered[0] == entered[-1] == sum(entered[1:-1]) == ids.numel()
    assert len(entered) > 3
    assert vars(model).get("forward") is forward
    assert not first.enabled


def test_all_processes_have_as_many_sub_batches_as_the_one_with_most():
    ids, mask = batch()
    sub_batches = SubBatches(10**6, True, sync_count=lambda count: count + 3).split(ids, mask).rows
    assert len(sub_batches) == 4
    assert sorted(torch.cat(sub_batches).tolist()) == list(range(6))


# GRPO and RLOO


METRICS = ("reward", "num_tokens", "completions/mean_length")
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def build(name, policy, folder, ours, trainer_class=None, **config):
    budget = {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 48} if ours else {}
    rows = {"train_dataset": build_prompts(16), "eval_dataset": build_prompts(4, seed=1), "model": load_policy(policy)}
    package = trl_padfix if ours else trl
    return make_trainer(package, name, folder, trainer_class, **rows | SCATTERED | budget | config)


def train(name, policy, folder, forwards, ours, trainer_class=None, **config):
    trainer = build(name, policy, folder, ours, trainer_class, **config)
    forwards.append(0)
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: forwards.append(args[0].shape[:2].numel()))
    with_graph = trainer.with_graph = []
    layer.register_forward_pre_hook(lambda m, args: with_graph.append(args[0].shape[1] * torch.is_grad_enabled()))
    accept_hooks(trainer.model)
    return run(trainer, lambda *args: None)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_deepspeed_is_refused(name, policy, tmp_path):
    trainer = build(name, policy, tmp_path, ours=True)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="DeepSpeed does not compute forwards a second time within a backward"):
        trainer.padding.part(SubBatchBudget).attach()


def watch_losses(monkeypatch):
    """The batches whose loss the trainers of this package compute in training."""
    batches, compute = [], SubBatchBudget.compute_loss

    def computed(part, of_trl, model, inputs, *args, **kwargs):
        if part.trainer.model.training:
            batches.append(tuple(part.trainer.padding.task.padded_batches(inputs)[0].values()))
        return compute(part, of_trl, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SubBatchBudget, "compute_loss", computed)
    return batches


WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Without accumulation TRL's metrics are means over whole steps."""

CLIPPED = {"num_iterations": 2, "epsilon": 0.01, "learning_rate": 1e-2, **WHOLE}
BY_SEQUENCE = {"importance_sampling_level": "sequence", **CLIPPED}
CASES = {
    "grpo": ("GRPO", {"loss_type": "grpo", "num_iterations": 2}),
    "grpo, longer generations": ("GRPO", {"steps_per_generation": 4}),
    "grpo, clipped": ("GRPO", {"loss_type": "bnpo", **CLIPPED}),
    "grpo, by sequence": ("GRPO", {"loss_type": "luspo", **BY_SEQUENCE}),
    **{f"grpo, {loss}": ("GRPO", {"loss_type": loss, **CLIPPED}) for loss in ("dapo", "dr_grpo", "cispo", "sapo")},
    "rloo": ("RLOO", CLIPPED),
}


@pytest.mark.parametrize("case", slow_but(["grpo", "grpo, clipped", "rloo"], CASES))
def test_online_trainers_split_whole_steps_and_keep_their_trajectory(case, policy, tmp_path, monkeypatch):
    name, config = CASES[case]
    steps, forwards, whole = watch_losses(monkeypatch), [], []
    ours = train(name, policy, tmp_path, forwards, ours=True, parity_check=False, **config)
    theirs = train(name, policy, tmp_path, whole, ours=False, **config)
    logged = [n for n in theirs.trainer.state.log_history[0] if n in ("kl", "entropy") or "clip_ratio" in n]
    metrics = METRICS + (tuple(logged) if WHOLE.items() <= config.items() else ())
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics))
    if "epsilon" in config and "sapo" not in case:
        assert any(log.get(n) for log in ours.trainer.state.log_history for n in logged if "ratio" in n)
    assert ours.trainer.args.gradient_accumulation_steps == 1
    # Each step is one batch of two groups, computed in sub-batches, and each of its tokens once.
    assert {len(ids) for ids, _ in steps} == {8}
    assert sum(ours.trainer.with_graph) == sum(prefix_sharing_layout(*step).packed_tokens for step in steps)
    # Generation is not split (8 or 16 prompts of up to 18 tokens).
    assert max(forwards) <= (16 if "steps_per_generation" in config else 8) * 18
    assert max(whole) > 8 * 18
    assert sum(8 * 18 >= count > 48 for count in forwards) < len(forwards) / 8


def test_other_weights_of_sub_batches_are_another_trajectory(policy, tmp_path, monkeypatch):
    right = train("RLOO", policy, tmp_path, [], ours=True, parity_check=False, **WHOLE)
    monkeypatch.setattr(RLOOTrainer.task_class, "sub_batch_weight", lambda task, sub_batch, batch: 0.5)
    wrong = train("RLOO", policy, tmp_path, [], ours=True, parity_check=False, **WHOLE)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(wrong.trajectory(*METRICS), right.trajectory(*METRICS))


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}])
def test_losses_that_compare_tokens_of_all_rows_take_two_passes(config, policy, tmp_path, monkeypatch):
    steps, config = watch_losses(monkeypatch), admitted(GRPOConfig, WHOLE | config)
    runs = [train("GRPO", policy, tmp_path, [], ours, **config) for ours in (True, False)]
    assert_same(*(run.trajectory(*METRICS, "entropy") for run in runs))
    assert sum(runs[0].trainer.with_graph) > 1.2 * sum(prefix_sharing_layout(*step).packed_tokens for step in steps)


class OwnLoss:
    def _compute_loss(self, *args):
        return 2 * super()._compute_loss(*args)


class OwnScores:
    """Compares rows where TRL's loss compares none."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps - 0.5 * logps.mean(), *others


@pytest.mark.parametrize("own", [OwnLoss, OwnScores])
def test_a_loss_of_the_users_own_takes_two_passes(own, policy, tmp_path, monkeypatch):
    """It may not be a sum over rows, and neither may what it calls."""
    steps = watch_losses(monkeypatch)
    classes = (type("Own", (own, package.GRPOTrainer), {}) for package in (trl_padfix, trl))
    ours, theirs = (
        train("GRPO", policy, tmp_path, [], is_ours, trainer, **WHOLE)
        for is_ours, trainer in zip((True, False), classes, strict=True)
    )
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert sum(ours.trainer.with_graph) > 1.2 * sum(prefix_sharing_layout(*step).packed_tokens for step in steps)


def test_completions_longer_than_the_budget_are_an_error():
    with pytest.raises(ValueError, match=r"`max_completion_length=256` tokens, more than `max_tokens_per_batch=128`"):
        GRPOConfig(
            use_cpu=True, bf16=False, padding_free=True, max_tokens_per_batch=128, max_completion_length=256,
        )  # fmt: skip
