"""A forward in pieces: its outputs, its gradients and the trajectories of losses that compare rows."""

import pytest
import torch
import trl
from kit.online_runs import ONLINE_SETTINGS, build_prompts, load_policy, reward_words, save_policy, watch_forwards
from kit.trainer_runs import assert_same, build_model, build_tokenizer, run

from trl_padfix import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, remove_padding
from trl_padfix.core.layout import pieces as planning
from trl_padfix.trainers.steps.split_forward import Splits, attach_splitting, splitting


@pytest.fixture(autouse=True)
def every_trunk_pays(monkeypatch):
    """So that trainers compute prefixes of a few tokens once for all pieces."""
    monkeypatch.setattr(planning, "FORWARD", 1)


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
    entered = []
    layer = model.model.layers[0]
    hook = layer.register_forward_pre_hook(lambda m, args: entered.append(args[0].shape[:2].numel()))
    with remove_padding(model, prefix_sharing=sharing), attach_splitting(model):
        with splitting(budget and Splits(budget, sharing)):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logps = (logits.log_softmax(-1)[..., 3] * mask).sum(1)
        (logps.sort().values * torch.arange(6.0)).sum().backward()
    hook.remove()
    return logits.detach(), [p.grad.clone() for p in model.parameters()], entered


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pieces_have_the_outputs_and_gradients_of_the_whole_forward(checkpointing):
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
    # Rows of a prompt are in one piece: 14 + 9 + 8 tokens and what their companions have of their own.
    assert sum(gradients(model, 24)[2][:3]) == whole[2][0]


def test_pieces_in_a_wrong_order_are_another_gradient(monkeypatch):
    model = build_model().train()
    whole = gradients(model, None)
    monkeypatch.setattr(torch.Tensor, "argsort", lambda x: torch.arange(len(x)))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(gradients(model, 24)[1][0], whole[1][0], rtol=1e-5, atol=1e-5)


def test_outside_of_the_block_and_after_removal_nothing_is_split():
    model = build_model()
    forward = vars(model).get("forward")
    ids, mask = batch()
    entered = []
    model.model.layers[0].register_forward_pre_hook(lambda m, args: entered.append(len(args[0])))
    first = attach_splitting(model)
    second = attach_splitting(model)  # takes the place of the first
    model(input_ids=ids, attention_mask=mask)
    with splitting(Splits(20, False)):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        second.remove()
        model(input_ids=ids, attention_mask=mask)
    assert entered[0] == entered[-1] == 6
    assert sum(entered[1:-1]) == 6
    assert len(entered) > 3
    assert vars(model).get("forward") is forward
    assert not first.enabled


def test_all_processes_have_the_pieces_of_the_one_with_most():
    ids, mask = batch()
    pieces = Splits(10**6, True, agree=lambda count: count + 3).of(ids, mask).rows
    assert len(pieces) == 4
    assert sorted(torch.cat(pieces).tolist()) == list(range(6))


# GRPO and RLOO


TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig, trl.GRPOTrainer, trl.GRPOConfig)}
TRAINERS |= {"rloo": (RLOOTrainer, RLOOConfig, trl.RLOOTrainer, trl.RLOOConfig)}
METRICS = ("reward", "num_tokens", "completions/mean_length")
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def train(name, policy, folder, forwards, ours, **config):
    trainer_class, config_class = TRAINERS[name][:2] if ours else TRAINERS[name][2:]
    budget = {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 48} if ours else {}
    settings = ONLINE_SETTINGS | {"output_dir": str(folder)} | SCATTERED | budget | config
    torch.manual_seed(0)
    trainer = trainer_class(
        reward_funcs=reward_words, model=load_policy(policy), args=config_class(**settings),
        train_dataset=build_prompts(16), eval_dataset=build_prompts(4, seed=1), processing_class=build_tokenizer(),
    )  # fmt: skip
    layer = next(m for m in trainer.model.modules() if type(m).__name__ == "Qwen2DecoderLayer")
    forwards.append(0)
    layer.register_forward_pre_hook(lambda m, args: forwards.append(args[0].shape[:2].numel()))
    return run(trainer, watch_forwards([]))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("grpo", {"loss_type": "grpo", "num_iterations": 2}),
        pytest.param("grpo", {"steps_per_generation": 4}, marks=pytest.mark.slow),
        ("rloo", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
    ],
)
def test_online_trainers_split_whole_steps_and_keep_their_trajectory(name, config, policy, tmp_path):
    forwards, whole = [], []
    ours = train(name, policy, tmp_path, forwards, ours=True, parity_check=False, **config)
    theirs = train(name, policy, tmp_path, whole, ours=False, **config)
    # The mean entropy is over the tokens of a forward, of which TRL has several in a step with accumulation.
    metrics = METRICS + (("entropy",) if "gradient_accumulation_steps" in config else ())
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics))
    assert ours.trainer.args.gradient_accumulation_steps == 1
    # Each step is one batch of two groups, computed in pieces; generation is not (8 or 16 prompts of up to 18 tokens).
    assert {len(ids) for ids, _ in ours.batches} == {8}
    assert ours.entered > 1.2 * ours.counts()["prefix sharing"]  # some pieces are computed twice
    assert max(forwards) <= (16 if "steps_per_generation" in config else 8) * 18
    assert max(whole) > 8 * 18
    assert sum(8 * 18 >= count > 48 for count in forwards) < len(forwards) / 8


def test_completions_longer_than_the_budget_are_an_error():
    with pytest.raises(ValueError, match=r"`max_completion_length=256` tokens, more than `max_tokens_per_batch=128`"):
        GRPOConfig(
            use_cpu=True, bf16=False, padding_free=True, max_tokens_per_batch=128, max_completion_length=256,
        )  # fmt: skip
