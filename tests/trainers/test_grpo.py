"""TRL's `GRPOTrainer` and ours: one trajectory, generation included, whatever the mode."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import trl
from kit.cells import once_each
from kit.online_runs import (
    MODES,
    ONLINE_SETTINGS,
    admitted,
    build_prompts,
    load_policy,
    reward_words,
    save_policy,
    watch_forwards,
)
from kit.trainer_runs import Run, assert_mode_ran, assert_same, break_mode, build_model, build_tokenizer, lora, run
from packaging.version import Version

from trl_padfix import GRPOConfig, GRPOTrainer, ParityError
from trl_padfix.trainers.online import group_prompts


METRICS = ("reward", "reward_std", "kl", "entropy", "completions/mean_length", "num_tokens")
PACKED = ["padding-free", "prefix sharing"]

SHORT = {"max_steps": 4}
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
"""Two groups of four completions, in two micro-batches of one step."""

CASES = {
    "plain": ({}, dict),
    "accumulation": (SHORT | SCATTERED, dict),
    "two steps of a generation": (SHORT | SCATTERED | {"steps_per_generation": 4}, dict),
    "two generations of a step": (
        SHORT | SCATTERED | {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
        dict,
    ),
    "two iterations": (SHORT | SCATTERED | {"num_iterations": 2}, dict),
    "truncated completions masked": (SHORT | {"mask_truncated_completions": True}, dict),
    "no reference": (SHORT | {"beta": 0.0}, dict),
    "checkpointing": (SHORT | {"gradient_checkpointing": True}, dict),
    "temperature and multiples of 8": (SHORT | {"temperature": 0.7, "pad_to_multiple_of": 8}, dict),
    "lora": (SHORT, lambda: {"peft_config": lora(task_type="CAUSAL_LM")}),
    "generation without a cache": (SHORT | {"generation_kwargs": {"use_cache": False}}, dict),
    "continuous batching": (
        {
            "max_steps": 2,
            "use_transformers_continuous_batching": True,
            # Else half of the machine's memory becomes its cache.
            "transformers_continuous_batching_config": {"num_blocks": 64, "block_size": 32, "max_batch_tokens": 256},
        },
        lambda: {"eval_dataset": None},
    ),
    "head in full precision": (SHORT | {"cast_lm_head_to_fp32": True}, dict),
    "weights by micro-batch": (SHORT | SCATTERED | {"loss_type": "bnpo"}, dict),
    "quantiles by micro-batch": (SHORT | SCATTERED | {"top_entropy_quantile": 0.5}, dict),
    "entropy bonus by micro-batch": (SHORT | SCATTERED | {"entropy_coef": 0.1}, dict),
}
LOSSES = {
    f"{loss} loss": (SHORT | SCATTERED | {"num_iterations": 2, "loss_type": loss}, dict)
    for loss in ("grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
}


@dataclass
class OnlineRun:
    run: Run
    completions: list[list[int]]

    def trajectory(self, *names: str) -> torch.Tensor:
        return self.run.trajectory(*names)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    policy = save_policy(tmp_path_factory.mktemp("policy"))

    def make_trainer(trainer_class=GRPOTrainer, config=None, **given):
        config_class = GRPOConfig if issubclass(trainer_class, GRPOTrainer) else trl.GRPOConfig
        settings = ONLINE_SETTINGS | {"output_dir": str(tmp_path_factory.mktemp("run"))}
        defaults = {
            "model": lambda: load_policy(policy),
            "train_dataset": lambda: build_prompts(24),
            "eval_dataset": lambda: build_prompts(4, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", config_class(**admitted(config_class, settings | (config or {}))))
        torch.manual_seed(0)  # some versions of TRL draw adapters without a seed
        return trainer_class(reward_funcs=reward_words, **given)

    return make_trainer


def train(make, settings, given=dict, trainer_class=GRPOTrainer, **config) -> OnlineRun:
    completions: list[list[int]] = []
    return OnlineRun(run(make(trainer_class, settings | config, **given()), watch_forwards(completions)), completions)


@pytest.fixture(scope="module")
def trl_run(make):
    return cache(lambda case: train(make, *(CASES | LOSSES)[case], trl.GRPOTrainer))


@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_and_an_evaluation_are_trls(mode, make, trl_run):
    ours, theirs = train(make, {}, **MODES[mode]), trl_run("plain")
    assert len(ours.trajectory()) == 11
    assert ours.completions == theirs.completions
    assert len({len(c) for c in ours.completions}) > 5
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert_mode_ran(ours.run, mode)


def assert_set_up_is_trls(case: str, mode: str, make, theirs: OnlineRun, atol: float = 1e-6) -> OnlineRun:
    ours = train(make, *(CASES | LOSSES)[case], **MODES[mode])
    # Means over micro-batches differ where these hold other rows.
    means = {"kl", "entropy"} if ours.run.trainer.padding.task.may_group() else set()
    metrics = [m for m in METRICS if m not in means and not (case == "no reference" and m == "kl")]
    assert ours.completions == theirs.completions
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics), atol)
    return ours


@pytest.mark.parametrize(("case", "mode"), once_each([case for case in CASES if case != "plain"], PACKED))
def test_every_set_up_is_trls(case, mode, make, trl_run):
    ours = assert_set_up_is_trls(case, mode, make, trl_run(case))
    # Layers run twice, or for the reference, or in generation without a cache or with paged memory.
    if case not in ("checkpointing", "lora", "generation without a cache", "continuous batching"):
        assert_mode_ran(ours.run, mode)
    assert ours.run.entered < trl_run(case).run.entered


@pytest.mark.slow
@pytest.mark.parametrize("mode", PACKED)
@pytest.mark.parametrize("case", LOSSES)
def test_every_loss_is_trls(case, mode, make, trl_run):
    # Some losses are small differences of weights of either sign.
    assert_set_up_is_trls(case, mode, make, trl_run(case), atol=1e-5)


@pytest.mark.parametrize("case", ["accumulation", "two steps of a generation", "two generations of a step"])
def test_accumulation_does_not_scatter_a_group(case, make, trl_run):
    ours = train(make, *CASES[case], **MODES["prefix sharing"])
    assert ours.run.entered < trl_run(case).run.counts()["prefix sharing"]


@pytest.mark.parametrize(
    "case", ["weights by micro-batch", "quantiles by micro-batch", "entropy bonus by micro-batch"]
)
def test_rows_stay_where_their_micro_batch_counts(case, make):
    settings, given = CASES[case]
    assert not make(config=settings | MODES["prefix sharing"], **given()).padding.task.may_group()


def test_rows_are_moved_whole():
    rows = torch.tensor([2, 1, 1, 2, 3, 1, 3, 1])
    batches = [
        {"prompt_ids": r[:, None], "mask": r[:, None] * 10, "names": [f"n{i}" for i in r.tolist()], "sum": r.sum()}
        for r in rows.split(2)
    ]
    grouped = group_prompts(batches, window=2)
    assert [b["prompt_ids"].flatten().tolist() for b in grouped] == [[1, 1], [2, 2], [1, 1], [3, 3]]
    assert [b["names"] for b in grouped] == [["n1", "n1"], ["n2", "n2"], ["n1", "n1"], ["n3", "n3"]]
    assert all(torch.equal(b["mask"], b["prompt_ids"] * 10) for b in grouped)
    assert [b["sum"] for b in grouped] == [b["sum"] for b in batches]


def test_eight_completions_of_a_long_prompt_compute_it_once(make, tmp_path):
    long = save_policy(tmp_path, ends=[1], max_position_embeddings=1024)
    settings = {"num_generations": 8, "max_completion_length": 64, "max_steps": 2}

    def entered(trainer_class, **config):
        data = build_prompts(4, low=500, high=524)
        given = {"model": load_policy(long), "train_dataset": data, "eval_dataset": None}
        done = train(make, settings | config, lambda: given, trainer_class)
        lengths = [len(completion) for completion in done.completions]
        assert 16 < sum(lengths) / len(lengths) <= 64
        return done.run.entered

    padded, packed = entered(trl.GRPOTrainer), entered(GRPOTrainer, **MODES["prefix sharing"])
    assert padded >= 3 * packed


# The tests can fail


def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(make):
    ours = train(make, {"max_steps": 2})
    for mode in PACKED:
        with pytest.raises(AssertionError):
            assert_mode_ran(ours.run, mode)


@pytest.mark.parametrize("mode", PACKED)
def test_a_leaking_layout_does_not_give_trls_trajectory(mode, make, trl_run, monkeypatch):
    ours = train(make, {}, **break_mode(monkeypatch, mode), parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(*METRICS), trl_run("plain").trajectory(*METRICS))


@pytest.mark.parametrize("mode", PACKED)
def test_a_leaking_layout_stops_training_and_evaluation(mode, make, monkeypatch):
    trainer = make(config=break_mode(monkeypatch, mode))
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.evaluate()


# Our own figures


def test_fractions_are_those_of_the_forwards_of_the_loss(make):
    ours = train(make, {"beta": 0.0, "max_steps": 3}, **MODES["prefix sharing"]).run
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        one = Run(ours.trainer, [], 0, [ours.batches[i]]).counts()
        assert log["padfix/pad_fraction"] == pytest.approx(1 - one["padding-free"] / one["padded"])
        assert log["padfix/shared_fraction"] == pytest.approx(1 - one["prefix sharing"] / one["padding-free"])
        assert log["perf/tokens_per_second"] > 0
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    assert 0 < evaluated["eval_padfix/shared_fraction"] < 1
    assert evaluated["eval_perf/tokens_per_second"] > 0


def test_tokens_are_counted_without_padding_removal_too(make):
    log = train(make, {"max_steps": 1}).run.logs[0]
    assert log["perf/tokens_per_second"] > 0
    assert not any("padfix" in name for name in log)


@pytest.mark.skipif(Version(trl.__version__) < Version("1.10"), reason="TRL has a fused head from 1.10 on")
def test_the_language_model_head_scores_completions_only(make, monkeypatch):
    scored = []
    original = trl.trainer.utils._ChunkedLogProbFunction.forward

    def watched(ctx, hidden, *args):
        scored.append(len(hidden))
        return original(ctx, hidden, *args)

    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "forward", staticmethod(watched))
    done = train(make, {"max_steps": 2, "beta": 0.0}, lambda: {"eval_dataset": None}, **MODES["prefix sharing"])
    assert sum(scored) == sum(map(len, done.completions))


def test_a_plain_configuration_of_trl_is_taken(make, tmp_path, trl_run):
    trainer = make(args=trl.GRPOConfig(output_dir=str(tmp_path), **ONLINE_SETTINGS))
    assert_same(run(trainer, watch_forwards([])).trajectory(), trl_run("plain").trajectory())


# Bad input


def test_prompts_without_a_token_are_refused(make):
    data = build_prompts(4)
    data = data.map(lambda row, i: {"prompt": "" if i == 1 else row["prompt"]}, with_indices=True)
    with pytest.raises(ValueError, match=r"have no token.*BOS"):
        make(train_dataset=data, config={"shuffle_dataset": False}).train()


def test_missing_columns_are_named(make):
    with pytest.raises(ValueError, match="no column 'prompt'; it has"):
        make(train_dataset=build_prompts(4).rename_column("prompt", "question"))


def test_images_without_a_vision_model_are_refused(make):
    data = build_prompts(4).add_column("image", ["a.png"] * 4)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM takes text only|vision"):
        make(config=MODES["padding-free"], train_dataset=data)


def test_a_wrapper_without_a_configuration_is_refused(make):
    class ValueHead(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pretrained_model = build_model()

    with pytest.raises(TypeError, match=r"no `config`.*pass the model inside"):
        make(model=ValueHead())


def test_sharing_without_padding_free_is_refused():
    with pytest.raises(ValueError, match="needs `padding_free=True`"):
        GRPOConfig(prefix_sharing=True, use_cpu=True, bf16=False)


def test_there_is_no_padding_side():
    with pytest.raises(TypeError, match="padding_side"):
        GRPOConfig(padding_side="left", use_cpu=True, bf16=False)
