"""
Batches by token budget give the trajectory of fixed batches, whatever the split.

TRL's own trainer with all rows of an optimizer step in one forward is what every split is compared with: loss,
gradient norm and every metric of every step.
"""

import logging
import re
from functools import cache

import numpy as np
import pytest
import torch
from datasets import Dataset
from kit import budget_runs
from kit.budget_runs import (
    ALL_TRAINERS,
    BUDGET,
    GLOBAL_BATCH,
    LAUNCHED,
    STEPS,
    TRAINERS,
    assert_same,
    build_data,
    make,
    subclass,
    watched,
)
from kit.cells import every_pair, slow_but
from kit.loss_watchers import before_loss
from kit.observe import entered_tokens
from kit.processes import logged
from kit.trainer_runs import build_model, build_tokenizer, figures, trajectory

import trl_padfix
from trl_padfix import DPOConfig, DPOTrainer
from trl_padfix.trainers.batching import micro_batch_budget, micro_batches
from trl_padfix.trainers.batching.measures import PairMeasure
from trl_padfix.trainers.batching.micro_batch_budget import MicroBatchBudget
from trl_padfix.trainers.batching.step_plan import StepPlan


SHARING = {"prefix_sharing": True}


def lists(config):
    """A configuration whose lists were given as tuples, which a cache can hash."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """What TRL logs with one forward per step, computed once for each trainer."""

    @cache
    def run(name, **config):
        trainer = make(name, tmp_path_factory.mktemp("fixed"), ours=False, **{"max_steps": STEPS} | lists(config))
        trainer.train()
        return trainer.state.log_history

    return run


CASES = {
    "dpo": ("dpo", {}),
    "dpo, left": ("dpo", SHARING | {"padding_side": "left"}),
    "dpo, accumulation": ("dpo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    "dpo, precomputed": ("dpo", SHARING | {"precompute_ref_log_probs": True}),
    "dpo, workers": ("dpo", {"dataloader_num_workers": 1}),
    "sft": ("sft", {}),
    "reward": ("reward", {}),
    "sft, accumulation": ("sft", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize(
    "case", slow_but(["dpo", "dpo, left", "dpo, precomputed", "reward", "sft", "sft, accumulation"], CASES)
)
def test_any_split_gives_the_trajectory_of_fixed_batches(case, fixed, tmp_path):
    name, config = CASES[case]
    trainer = make(name, tmp_path, ours=True, max_steps=STEPS, **config)
    steps = watched(trainer)
    assert_same(figures(trainer.state.log_history), figures(fixed(name)))
    # It was split, unevenly, and within the budget; the decoder computed no more than that.
    rows = 1 if name == "sft" else 2
    assert all(sum(map(len, step)) == rows * GLOBAL_BATCH for step in steps)
    assert all(len(step) > 1 for step in steps)
    assert any(len({len(batch) for batch in step}) > 1 for step in steps)
    if not config.get("prefix_sharing"):
        assert max(sum(batch) for step in steps for batch in step) <= BUDGET[name]
        assert trainer.padding.stats.packed_tokens == sum(sum(batch) for step in steps for batch in step)


@pytest.mark.parametrize("name", TRAINERS)
def test_other_weights_do_not_give_the_trajectory_of_fixed_batches(name, fixed, tmp_path, monkeypatch):
    trainer = make(name, tmp_path, ours=True, max_steps=STEPS)
    rising = staticmethod(lambda rows, of_step: np.arange(1, rows + 1) * 2 / rows / (rows + 1))
    monkeypatch.setattr(StepPlan, "weights", rising)
    monkeypatch.setattr(trainer.padding.task, "num_metric_items", lambda batch: {})
    monkeypatch.setattr(trainer, "_get_num_items_in_batch", lambda *args: None)
    trainer.train()
    with pytest.raises(AssertionError, match="not close"):
        assert_same(figures(trainer.state.log_history), figures(fixed(name)))


COMPARING = {
    "kto": ("kto", {}),
    "dpo, aot and sft": ("dpo", {"loss_type": ("aot", "sft")}),
}


@pytest.mark.parametrize("case", COMPARING)
def test_means_over_sub_batches_are_not_the_loss_that_compares_rows(case, fixed, tmp_path, monkeypatch):
    name, config = COMPARING[case]
    trainer = make(name, tmp_path, ours=True, max_steps=3, **lists(config))
    task = trainer.padding.task
    monkeypatch.setattr(task, "needs_all_rows", lambda: False)
    monkeypatch.setattr(task, "num_loss_items", lambda batch: len(batch["input_ids"]))
    monkeypatch.setattr(task, "num_metric_items", lambda batch: {})
    trainer.train()
    ours, theirs = (
        torch.tensor([log["loss"] for log in history if "loss" in log][:3])
        for history in (trainer.state.log_history, fixed(name, **config))
    )
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["kto", "dpo"])
def test_a_step_of_a_subclass_that_would_mix_the_micro_batches_of_trl_is_an_error(name, tmp_path):
    trainer = make(name, tmp_path, ours=True, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trls = type(trainer).training_step

    def training_step(self, model, inputs, *args):
        loss = self.compute_loss(model, inputs)
        return loss + trls(self, model, inputs, *args)

    subclass(trainer, training_step=training_step)
    with pytest.raises(ValueError, match="a `training_step` of yours computes one loss"):
        trainer.train()


@pytest.mark.parametrize("name", ALL_TRAINERS)
def test_evaluation_is_split_and_has_the_means_of_whole_batches(name, tmp_path):
    data = build_data(name).select(range(12))
    logs = {}
    for ours in (True, False):
        given = {"per_device_eval_batch_size": 12} | ({"parity_check": False} if ours else {})
        trainer = make(name, tmp_path, ours=ours, **given)
        computed = entered_tokens(trainer.model)
        arguments = (trainer.processing_class, trainer.args, *([False, None] if name == "sft" else []), "eval")
        logs[ours] = trainer.evaluate(trainer._prepare_dataset(data, *arguments))
        if ours:
            assert len(computed) > 2
            assert max(computed) <= BUDGET[name]
    names = [n for n in logs[False] if not n.endswith(("runtime", "_time", "_per_second", "num_tokens"))]
    assert len(names) > 3
    assert_same(*(torch.tensor([log[n] for n in names]) for log in (logs[True], logs[False])))


def test_pairs_of_one_prompt_are_in_one_micro_batch(tmp_path):
    # Two prompts of ten tokens in each step, in turns; a prompt and its four pairs are 26 tokens.
    prompts = [f"w{3 + 2 * (i // 8) + i % 2} " * 10 for i in range(24)]
    data = Dataset.from_list([{"prompt": p, "chosen": f"w{10 + i}", "rejected": "w9"} for i, p in enumerate(prompts)])
    given = {
        "train_dataset": data,
        "max_tokens_per_batch": 30,
        "max_steps": 3,
        "train_sampling_strategy": "sequential",
    }
    trainer = make("dpo", tmp_path, ours=True, **given, **SHARING)
    found = []

    def look(inputs):
        prompts = inputs["input_ids"].masked_fill(inputs["completion_mask"].bool(), 39)
        found.append({tuple(p for p in row if p != 39) for row in prompts.tolist()})

    before_loss(trainer, look)
    trainer.train()
    assert len(found) == 6  # three steps of two prompts with four pairs each
    assert [len(prompts) for prompts in found] == [1] * 6


# The rows of a step, and what they weigh


RAGGED = {
    "a last micro-batch of one row": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "rows": 13},
    "a last step of one micro-batch": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "rows": 11},
    "a last step without accumulation": {"per_device_train_batch_size": 4, "rows": 14},
    "the last rows dropped": {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "rows": 13, "dataloader_drop_last": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "case", "mode"), every_pair(TRAINERS, RAGGED, [{}, SHARING]))
def test_ragged_steps_and_repeated_prompts_give_the_trajectory_without_a_budget(name, case, mode, tmp_path):
    """Two epochs, shuffled; every prompt comes up several times."""
    config = RAGGED[case] | {"max_steps": -1, "num_train_epochs": 2, "seed": 5}
    rows = config.pop("rows")
    data = build_data(name).select(range(rows))
    if name == "dpo":
        prompts = data["prompt"]
        data = data.map(lambda row, i: {"prompt": prompts[i % 4]}, with_indices=True)
    steps, logs = {}, {}
    for ours in (True, False):
        trainer = make(name, tmp_path, ours=ours, train_dataset=data, **config, **mode if ours else {})
        steps[ours] = watched(trainer)
        logs[ours] = [log for log in trainer.state.log_history if "loss" in log]
    means = [n for n in logs[False][0] if n.startswith(("rewards/margins", "rewards/chosen", "logps"))]
    names = ["loss", "grad_norm", "epoch", *means]
    assert_same(*(torch.tensor([[log[n] for n in names] for log in logs[ours]]) for ours in (True, False)))
    # The budget split steps (TRL's batches may be split already), and what is logged is not that of any other order.
    most = max(len(batch) for step in steps[True] for batch in step)
    assert most < max(sum(map(len, step)) for step in steps[True])
    assert len({round(log["loss"], 4) for log in logs[False]}) > len(logs[False]) // 2


@pytest.mark.parametrize("case", slow_but(["a last micro-batch of one row"], RAGGED))
@pytest.mark.parametrize("logging_steps", [1, 2])
def test_the_log_of_a_reward_model_is_trls(case, logging_steps, tmp_path, monkeypatch):
    config = RAGGED[case] | {"max_steps": -1, "num_train_epochs": 2, "seed": 5, "logging_steps": logging_steps}
    data = build_data("reward").select(range(config.pop("rows")))
    logs = {}
    for kind in ("theirs", "ours", "extremes of whole steps"):
        if kind == "extremes of whole steps":
            monkeypatch.setattr(trl_padfix.RewardTrainer.task_class, "values_of_rows", lambda task: None)
        trainer = make("reward", tmp_path, ours=kind != "theirs", train_dataset=data, **config)
        steps = watched(trainer)
        logs[kind] = [log for log in trainer.state.log_history if "loss" in log]
        assert kind == "theirs" or max(map(len, steps)) > 1
    names = [n for n in logs["theirs"][0] if n not in ("learning_rate",)]
    assert {"epoch", "min_reward", "max_reward", "mean_reward", "accuracy", "margin"} < set(names)
    theirs, ours, whole = (torch.tensor([[log[n] for n in names] for log in kind]) for kind in logs.values())
    assert_same(ours, theirs)
    if config.get("gradient_accumulation_steps"):  # the negative control
        with pytest.raises(AssertionError, match="not close"):
            assert_same(whole, theirs)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}


@pytest.mark.parametrize(("name", "rope"), [("sft", LONGROPE), ("dpo", {"rope_type": "dynamic", "factor": 2.0})])
def test_rope_that_depends_on_the_longest_row_is_refused(name, rope, tmp_path):
    rope = rope | {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    kind = "rope_parameters" if "rope_parameters" in build_model().config.to_dict() else "rope_scaling"
    limits = {"max_position_embeddings": 16, kind: rope}
    with pytest.raises(ValueError, match=f"The model's '{rope['rope_type']}' rotary embedding depends on"):
        make(name, tmp_path, ours=True, model=build_model(**limits))
    make(name, tmp_path, ours=True, max_length=16, model=build_model(**limits))  # no row is long enough for it


COUNTED = ["num_tokens"]
"""What TRL counts from zero in a resumed run."""


def test_a_run_is_resumed_in_the_middle_of_an_epoch(fixed, tmp_path):
    make("dpo", tmp_path, ours=True, **LAUNCHED).train()
    trainer = make("dpo", tmp_path, ours=True, **LAUNCHED)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same(figures(trainer.state.log_history, COUNTED), figures(fixed("dpo"), COUNTED))


@pytest.mark.parametrize("strategy", slow_but([], ["multi_gpu", "fsdp2"]))
def test_two_processes_give_the_trajectory_of_one_and_resume_it(strategy, fixed, tmp_path):
    found = logged(strategy, tmp_path, "kit.budget_runs", "rows")
    for name in ALL_TRAINERS:
        whole, *resumed = found[name]
        # TRL logs extremes, and the rewards of KTO, by micro-batches: of two rows in each of two processes.
        size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        size = size if name in ("reward", "kto") else {}
        expected = fixed(name, **budget_runs.LOSSES.get(name, {}), **size)
        assert_same(figures(whole), figures(expected))
        for history in resumed:
            assert_same(figures(history, COUNTED), figures(expected, COUNTED))
    for name in ("dpo", "sft"):
        one = budget_runs.make_grouped(name, tmp_path, max_tokens_per_batch=None)
        one.train()
        histories = one.state.log_history, *found[f"grouped {name}"]
        steps = [[log for log in history if "loss" in log] for history in histories]
        losses = torch.tensor([[[log["loss"], log["grad_norm"]] for log in history] for history in steps])
        assert_same(losses[1:], losses[:1].expand_as(losses[1:]))
    if strategy == "multi_gpu":
        one = budget_runs.make_recorded(tmp_path / "one", 6, ours=False)
        one.train()
        names = ["loss", "grad_norm", "entropy", *(f"clip_ratio/{n}" for n in ("region_mean", "low_min", "high_max"))]
        ours, theirs = (
            torch.tensor([[log[n] for n in names] for log in history if "loss" in log])
            for history in (found["recorded"], one.state.log_history)
        )
        assert theirs[:, 3].any()
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_process_with_fewer_micro_batches_cuts_its_largest_in_two(name, fixed, tmp_path, monkeypatch):
    to_equal_count = micro_batches.to_equal_count
    monkeypatch.setattr(
        micro_batch_budget, "to_equal_count", lambda batches, count, rows: to_equal_count(batches, count + 2, rows)
    )
    config = {"precompute_ref_log_probs": True} if name == "dpo" else {}
    trainer = make(name, tmp_path, ours=True, max_steps=STEPS, max_tokens_per_batch=10**6, **config)
    steps = watched(trainer)
    rows = 2 if name == "dpo" else 1
    assert [[len(batch) for batch in step] for step in steps] == [[2 * rows, 2 * rows, 4 * rows]] * STEPS
    assert_same(figures(trainer.state.log_history), figures(fixed(name)))


def test_a_process_with_too_few_rows_computes_one_without_a_weight():
    batch = {"input_ids": torch.arange(6).view(6, 1), "reference": torch.arange(3)}
    whole = micro_batches.MicroBatch(batch, 0.75, [6, 7, 4])
    cut = micro_batches.to_equal_count([whole], 4, rows_per_item=2)
    assert [(m.batch["input_ids"].flatten().tolist(), m.batch["reference"].tolist()) for m in cut] == [
        ([0, 3], [0]), ([1, 4], [1]), ([2, 5], [2]), ([0, 3], [0]),
    ]  # fmt: skip
    assert [(m.weight, m.items) for m in cut] == [(0.25, [6]), (0.25, [7]), (0.25, [4]), (0, [6])]


# Input


def test_a_pair_beyond_the_budget_is_alone_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        trainer = make("dpo", tmp_path, ours=True, max_tokens_per_batch=26, max_steps=4)
        steps = watched(trainer)
    dataset = trainer.train_dataset
    tokens = PairMeasure(max_length=26).costs(dataset).tokens
    message = f"{(tokens > 26).sum()} of 32 rows of the train dataset have more tokens than"
    assert sum(message in text for text in caplog.messages) == 1
    assert any(sum(batch) > 26 for step in steps for batch in step)
    assert all(sum(batch) <= 26 or len(batch) == 2 for step in steps for batch in step)


def test_no_budget_leaves_batches_alone(tmp_path):
    trainer = make("dpo", tmp_path, ours=True, max_tokens_per_batch=None, max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert {"input_ids", "attention_mask", "completion_mask"} == set(batch)
    assert trainer.args.per_device_train_batch_size == GLOBAL_BATCH


def test_the_batch_of_a_step_is_the_product_with_the_accumulation():
    config = DPOConfig(
        use_cpu=True, bf16=False, padding_free=True, max_tokens_per_batch=2048,
        per_device_train_batch_size=4, gradient_accumulation_steps=8,
    )  # fmt: skip
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (32, 1)


REFUSED = {
    "no tokens": ("dpo", {"max_tokens_per_batch": 0}, "must be a number of tokens, got 0"),
    "padding": ("sft", {"padding_free": False}, "needs `padding_free=True`"),
    "packed rows": ("sft", {"packing": True}, "Set one of `packing` and `max_tokens_per_batch`"),
    "split batches": (
        "dpo", {"accelerator_config": {"split_batches": True}}, "leave `split_batches` and `even_batches` out"
    ),
    "noise by length": ("sft", {"neftune_noise_alpha": 5}, "`neftune_noise_alpha=5` adds noise whose size depends on"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_with_which_a_budget_cannot_be_kept_are_refused(case, tmp_path):
    name, config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make(name, tmp_path, ours=True, **config)


@pytest.mark.parametrize("max_length", [None, 1024])
@pytest.mark.parametrize("name", ["sft", "kto"])
def test_the_longest_row_that_the_data_has_is_compared_with_the_budget(name, max_length, tmp_path):
    config = {"ours": True, "max_length": max_length, "max_steps": 1}
    trainer = make(name, tmp_path, **config, max_tokens_per_batch=20)
    with pytest.raises(ValueError, match=r"\d+ rows of the train dataset have a sequence of more .* 2\d \(") as error:
        trainer.train()
    assert trainer.state.global_step == 0
    longest = int(re.search(r"Raise the budget to (\d+) at least", str(error.value))[1])
    trainer = make(name, tmp_path, **config, max_tokens_per_batch=longest)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_loss_that_compares_rows_is_refused_under_deepspeed(tmp_path):
    trainer = make("kto", tmp_path, ours=True)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match=r"The loss compares rows .*, and DeepSpeed does not compute"):
        trainer.padding.part(MicroBatchBudget).attach()


def test_another_sampling_strategy_is_refused(tmp_path):
    trainer = make("sft", tmp_path, ours=True, train_sampling_strategy="group_by_length")
    with pytest.raises(ValueError, match="a `LengthGroupedSampler`, which rearranges them differently"):
        trainer.get_train_dataloader()


def test_an_accumulation_that_was_set_later_is_refused(tmp_path):
    config = DPOConfig(str(tmp_path), use_cpu=True, bf16=False, padding_free=True, gradient_accumulation_steps=2)
    config.max_tokens_per_batch = 2048
    model, tokenizer = build_model(), build_tokenizer()
    with pytest.raises(ValueError, match="was set after the configuration was made, with `gradient_acc"):
        DPOTrainer(model=model, args=config, train_dataset=build_data("dpo"), processing_class=tokenizer)


def test_an_exception_in_a_micro_batch_restores_metrics_and_gathering(tmp_path, monkeypatch):
    trainer = make("dpo", tmp_path, ours=True, max_steps=2)
    metrics, gather = trainer._metrics["train"], trainer.accelerator.gather
    before_loss(trainer, lambda inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer._metrics["train"] is metrics
    assert trainer.accelerator.gather == gather
    assert "gather" not in vars(trainer.accelerator)
    assert trainer.accelerator.sync_gradients
    assert trainer.padding.part(MicroBatchBudget).weight is None


def test_rows_are_those_of_a_run_without_a_budget_also_after_the_script_has_seeded_torch(tmp_path):
    logs = []
    for ours in (True, False):
        trainer = make("sft", tmp_path, ours=ours, max_steps=3)
        torch.manual_seed(7)
        trainer.train()
        logs.append(trajectory(trainer))
    torch.testing.assert_close(logs[0], logs[1], rtol=1e-4, atol=1e-5)
