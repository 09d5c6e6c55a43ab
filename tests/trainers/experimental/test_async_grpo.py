"""Asynchronous GRPO on recorded rollouts: the steps of samples alone, distinct tokens computed, TRL's trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trl
from kit import async_processes, processes
from kit.async_runs import ROWS, SHARED, STEPS, RowsAlone, build_steps, make, train
from kit.cells import slow_but
from kit.rollouts import build_samples, distinct_tokens, raw_tokens
from kit.trainer_runs import lora
from packaging.version import Version
from zoo.families import build as build_family
from zoo.models import build


if not Version("1.16") <= Version(trl.__version__) < Version("1.18"):
    pytest.skip("another asynchronous GRPO than that of TRL 1.16", allow_module_level=True)

from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher, TokenBudgetBatcher
from trl.experimental.async_grpo.packing import TreeRow

from trl_padfix.experimental import rollout_rows


FAMILIES = ["gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_text", "bamba", "lfm2", "falcon_h1", "mamba2"]


def save(family: str, folder) -> tuple[object, str]:
    model = build("qwen2") if family == "qwen2" else build_family(family)
    if family.startswith("qwen3_"):  # as in tests/core/test_tree_arguments.py
        torch.manual_seed(0)
        for weight in (p for p in model.parameters() if p.dim() > 1):
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.5)
    model.save_pretrained(folder)
    return model, str(folder)


def flat(run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.trainer.model.parameters()])


def changes(run, model) -> torch.Tensor:
    return flat(run) - torch.cat([p.detach().flatten() for p in model.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["qwen2", "qwen3_5_text"], ["qwen2", *FAMILIES]))
def test_ten_steps_are_those_of_each_sample_alone(family, tmp_path):
    model, policy = save(family, tmp_path / "policy")
    samples = build_steps(model)
    # TRL's load-balancing loss is over the tokens of a tree, and rows alone have another one.
    own = {"router_aux_loss_coef": 0.0} if family in ("qwen3_next", "gpt_oss") else {}
    ours = train(make(policy, tmp_path / "ours", samples, **SHARED, **own))
    trainer = make(policy, tmp_path / "alone", samples, RowsAlone, **SHARED, **own)
    trainer.rows = list(samples)
    alone = train(trainer)
    wrong = [sample | {"advantage": sample["advantage"] * (1.5 if i == 3 else 1)} for i, sample in enumerate(samples)]
    control = train(make(policy, tmp_path / "wrong", wrong, **SHARED, **own))

    steps = [samples[i : i + ROWS] for i in range(0, ROWS * STEPS, ROWS)]
    assert ours.entered == sum(map(distinct_tokens, steps))
    torch.testing.assert_close(ours.weights(), alone.weights(), rtol=1e-4, atol=1e-4)
    assert relative(changes(ours, model), changes(alone, model)) < 2e-4
    assert relative(changes(control, model), changes(alone, model)) > 1e-2
    # A gated delta net computes chunks of 64 tokens, which begin elsewhere in a tree: one gradient norm of ten steps
    # of Qwen3-Next is off by 3.6e-4.
    rounding = 1e-3 if family.startswith("qwen3_") else 1e-4
    torch.testing.assert_close(ours.trajectory(), alone.trajectory(), rtol=rounding, atol=3e-5)


def test_what_a_run_logs_and_sends(tmp_path):
    model, policy = save("qwen2", tmp_path / "policy")
    samples = build_steps(model, 3)
    trainer = make(policy, tmp_path / "run", samples, max_steps=2, save_strategy="steps", save_steps=1, **SHARED)
    run = train(trainer)
    steps = [samples[:ROWS], samples[ROWS : 2 * ROWS]]
    for log, step in zip([log for log in run.logs if "loss" in log], steps, strict=True):
        longest = max(len(sample["input_ids"]) for sample in step)
        assert log["padfix/shared_fraction"] == pytest.approx(1 - distinct_tokens(step) / raw_tokens(step))
        assert log["padfix/pad_fraction"] == pytest.approx(1 - raw_tokens(step) / (ROWS * longest))
        assert log["batch/forwarded_tokens_per_step"] > distinct_tokens(step)  # TRL's tree, with copies at forks
    assert trainer.padding.parity["train"][0].compared
    assert trainer.weight_transfer.sent == len(list(model.named_parameters()))
    assert trainer.rollout_worker.versions == [1, 2, 3]
    assert trainer.rollout_worker.is_stopped
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert trainer.model.config._attn_implementation == "sdpa"
    assert trainer.model.config.layer_types == model.config.layer_types


def test_lora_and_the_attention_of_the_user(tmp_path):
    model, policy = save("qwen2", tmp_path / "policy")
    samples = build_steps(model, 3)
    config, runs = lora(target_modules=["q_proj", "v_proj"]), {}
    # The setting in our field, and in TRL's, where TRL itself raises a `TypeError`.
    for attention, given in {
        "eager": {"attn_implementation": "eager"},
        "sdpa": {"model_init_kwargs": {"attn_implementation": "sdpa"}},
    }.items():
        trainer = make(policy, tmp_path / attention, samples, max_steps=2, peft_config=config, **given, **SHARED)
        runs[attention] = train(trainer)
    for attention, run in runs.items():
        assert run.trainer.model.get_base_model().config._attn_implementation == attention
    torch.testing.assert_close(runs["eager"].weights(), runs["sdpa"].weights(), rtol=1e-4, atol=1e-6)


def test_without_padding_free_trl_speaks(tmp_path):
    _, policy = save("lfm2", tmp_path / "policy")
    with pytest.raises(ValueError, match=r"conv.* layers\. Tree packing only routes"):
        make(policy, tmp_path / "run", [])


# -- the trees of rollouts


def drawn_samples(seed: int) -> list[dict]:
    """Samples of two words, so that they share much; some are equal, some are the beginning of another one."""
    draw = np.random.default_rng(seed)
    samples = []
    for i in range(12):
        ids = draw.integers(2, 4, draw.integers(1, 9))
        mask = draw.integers(0, 2, len(ids))
        old, advantage = draw.random(len(ids)).astype(np.float32), float(draw.normal())
        sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": old, "advantage": advantage}
        samples.append(sample | {"group_id": i // 3, "metrics": {}})
    return samples


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("budget", [0, 12])
def test_rows_and_budgets_are_those_of_trl(seed, processes, budget):
    samples = drawn_samples(seed) if seed < 5 else build_samples(groups=3)
    if budget:
        budget *= 1 + 9 * (seed == 5)
        ours = rollout_rows.TokenBudgetBatcher(samples, processes, budget, {"batch/dropped_oversize_total": []})
        theirs = TokenBudgetBatcher(samples, processes, budget, {"batch/dropped_oversize_total": []})
    else:
        ours = rollout_rows.FixedCountBatcher(samples, processes, 6)
        theirs = FixedCountBatcher(samples, processes, 6)
    batches = list(zip(ours, theirs, strict=True))
    assert batches
    for our_rows, their_rows in batches:
        for our_row, their_row in zip(our_rows, their_rows, strict=True):
            assert isinstance(our_row, rollout_rows.RolloutRow)
            assert type(their_row) is TreeRow
            assert [id(s) for s in our_row.samples] == [id(s) for s in their_row.samples]
            assert (our_row.load, our_row.trained, our_row.groups) == (
                their_row.load,
                their_row.trained,
                their_row.groups,
            )
            assert len(our_row.tokens) == len(their_row.tokens)
            packed, expected = our_row.pack(), their_row.pack()
            assert packed.pop("sample_lengths").tolist() == [len(s["input_ids"]) for s in our_row.samples]
            assert packed.keys() == expected.keys()
            for name, value in expected.items():
                assert packed[name].dtype == value.dtype, name
                torch.testing.assert_close(packed[name], value, rtol=0, atol=0)


# -- checkpoints, and several processes


@pytest.mark.parametrize("adapts", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(adapts, tmp_path):
    model, policy = save("qwen2", tmp_path / "policy")
    samples = build_steps(model, 5)
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"} | SHARED
    given |= {"peft_config": lora(target_modules=["q_proj", "v_proj"])} if adapts else {}
    whole = train(make(policy, tmp_path / "whole", samples, **given))
    checkpoint, rest = tmp_path / "whole/checkpoint-2", samples[2 * ROWS :]
    # Of a live server the prompts go on where they were; here the worker has the samples of the last two steps.
    resumed = train(make(policy, tmp_path / "on", rest, **given), resume_from_checkpoint=str(checkpoint))
    assert resumed.trainer.state.global_step == 4
    assert [log["loss"] for log in resumed.logs if "loss" in log] == pytest.approx(
        [log["loss"] for log in whole.logs if "loss" in log][2:], rel=1e-5, abs=1e-7
    )
    torch.testing.assert_close(resumed.weights(), whole.weights(), rtol=1e-5, atol=1e-6)
    saved = "adapter_model.safetensors" if adapts else "model.safetensors"
    assert [p.name for p in checkpoint.glob("*.safetensors")] == [saved]
    other = train(make(policy, tmp_path / "other", rest, **given | {"max_steps": 2}))
    with pytest.raises(AssertionError, match="not close"):  # without the checkpoint
        torch.testing.assert_close(other.weights(), whole.weights(), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    for family in ("qwen2", "lfm2"):
        model, _ = save(family, folder / family / "policy")
        torch.save(build_steps(model, async_processes.STEPS + 2), folder / family / "samples.pt")
    return folder


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["multi_gpu", "fsdp2"])
def test_two_processes_train_as_one(strategy, material):
    cases = ["qwen2,full", "qwen2,lora", "lfm2,full"]
    logged = processes.logged(strategy, material, "kit.async_processes", *cases)
    for case in cases:
        one, two = async_processes.train_case(material, case), logged[case]
        logs = [log for log in one.logs if "loss" in log]
        assert two["sent"] == one.trainer.weight_transfer.sent > 0
        assert two["compared"]  # packed against padded, in each process
        # Each process has a tree of its own, so what samples of different processes share is computed in both.
        assert one.entered < two["entered"] < sum(log["batch/forwarded_tokens_per_step"] for log in two["logs"])
        for name in ("loss", "grad_norm", "ratio", "kl", "entropy"):
            found, expected = [log[name] for log in two["logs"]], [log[name] for log in logs]
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), (case, name)
        torch.testing.assert_close(torch.load(material / f"{case}.pt"), flat(one), rtol=1e-4, atol=1e-5)
        changed = torch.load(material / case.split(",")[0] / "samples.pt", weights_only=False)
        changed[3]["advantage"] *= 1.5
        wrong = async_processes.train_case(material, case, samples=changed)
        assert not torch.allclose(torch.load(material / f"{case}.pt"), flat(wrong), rtol=1e-4, atol=1e-5), case
