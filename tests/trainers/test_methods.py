"""What DPO, GRPO and reward models have of their own. `test_every_method.py` has the trajectories."""

import contextlib
import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.logging import MultiProcessAdapter
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from kit import trainer_runs
from kit.dpo_cases import build_pairs
from kit.methods import make_trainer
from kit.mixer_runs import initial
from kit.trainer_runs import (
    MODES,
    SIDED_MODES,
    TWO_MODES,
    assert_mode_ran,
    assert_other,
    assert_same,
    break_mode,
    build_model,
    build_tokenizer,
    is_bare,
    our_warnings,
    run,
    trained,
    watch_inputs,
)
from zoo.family_outcomes import stable_topk

import trl_padfix
import trl_padfix.core.patches.heads
from trl_padfix import DataCollatorForReward, DPOTrainer, PaddingRemovalError, RewardTrainer
from trl_padfix.trainers.checks.user_code import INPUT_METHODS
from trl_padfix.trainers.methods.online import group_prompts, trained_tokens
from trl_padfix.trainers.parts.packing import RemovePadding


def test_gradients_are_compared_of_the_policy_and_in_training(makers):
    trainer = makers("DPO")(config=SIDED_MODES["prefix sharing, left"] | {"max_steps": 1})
    trainer.train()
    trainer.evaluate()
    (policy, reference), *evaluation = trainer.padding.parity["train"], *trainer.padding.parity["eval"]
    assert policy.gradient is not None
    assert [report.gradient for report in (reference, *evaluation)] == [None] * 3
    assert {report.not_compared for report in (policy, reference, *evaluation)} == {""}


def test_no_configuration_at_all_is_trls_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the output directory gets its name from the model
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = DPOTrainer(
        model=build_model(),
        ref_model=build_model(seed=1),
        train_dataset=build_pairs(4),
        processing_class=build_tokenizer(),
    )
    assert type(trainer.args) is trl.DPOConfig
    assert trainer.padding.parts == ()
    assert type(trainer.data_collator).__module__.startswith("trl.")


def test_the_side_is_the_tokenizers_where_none_is_given(makers):
    tokenizer = build_tokenizer(padding_side="left")
    assert makers("DPO")(processing_class=tokenizer).data_collator.padding_side == "left"
    assert (
        makers("DPO")(config={"padding_side": "right"}, processing_class=tokenizer).data_collator.padding_side
        == "right"
    )


def test_a_decoder_with_linear_attention_gives_the_trajectory_of_trl(makers, monkeypatch):
    """`end_to_end/test_mixer_processes.py` has more families."""

    def train(trainer_class: type, **config) -> torch.Tensor:
        policy, reference = copy.deepcopy(initial("qwen3_5_text"))
        return trained(makers("DPO")(trainer_class, {"max_steps": 3} | config, model=policy, ref_model=reference))

    mode = SIDED_MODES["prefix sharing, right"]
    with stable_topk():
        theirs = train(trl.DPOTrainer)
        assert_same(train(DPOTrainer, **mode), theirs, atol=1e-4)
        break_mode(monkeypatch, "prefix sharing")
        assert_other(train(DPOTrainer, **mode, parity_check=False), theirs, atol=1e-4)


# -- models as before, whatever ended the training


def test_an_error_while_the_trainer_is_made_leaves_the_models_as_they_were(makers):
    class Fails(DPOTrainer):
        def compute_ref_log_probs(self, model, inputs):
            assert model.config._attn_implementation == "eager"
            raise RuntimeError("out of memory, say")

    policy, reference = build_model(), build_model(seed=1)
    config = SIDED_MODES[TWO_MODES[1]] | {"attn_implementation": "eager", "ref_attn_implementation": "eager"}
    with pytest.raises(RuntimeError, match="out of memory, say"):
        makers("DPO")(Fails, config | {"precompute_ref_log_probs": True}, model=policy, ref_model=reference)
    for model in (policy, reference):
        assert is_bare(model)
        assert model.config._attn_implementation == "sdpa"


# -- compiled layers


@pytest.mark.parametrize("mode", ["padded", "padding-free"])
def test_accelerate_compiles_no_model_whose_layers_are_compiled(mode, makers):
    """It keeps what the first trainer of a process asks for, which here is this one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        trainer = makers("DPO")(config=MODES[mode] | {"torch_compile": True, "torch_compile_backend": "aot_eager"})
        assert (trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO) is (mode == "padding-free")
        assert trainer.args.torch_compile_backend == "aot_eager"
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def test_compiled_layers_under_zero_3_are_refused_before_the_first_step(makers, monkeypatch):
    trainer = makers("DPO")(config=MODES["padding-free"])
    for stage, refused in ((2, False), (3, True)):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
            patch.setattr(trainer.args, "torch_compile", True)
            patch.setattr("trl_padfix.core.patches.compiled.compile_layers", lambda *args, **kwargs: {})
            with pytest.raises(PaddingRemovalError, match="ZeRO-3") if refused else contextlib.nullcontext():
                next(x for x in trainer.padding.parts if isinstance(x, RemovePadding)).on_init_end()


# -- what GRPO has of its own: groups, and what is computed of a prompt. `test_every_method.py` has the trajectories


def test_rows_stay_where_their_micro_batch_counts(makers):
    for case in ("weights by micro-batch", "quantiles by micro-batch", "entropy bonus by micro-batch"):
        settings, _ = makers("GRPO").method.cases[case]
        assert not makers("GRPO")(config=settings | MODES["prefix sharing"]).padding.task.may_regroup()


class Advantages:  # an inner method of a user's: in units of the largest advantage of the micro-batch
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs | {"advantages": inputs["advantages"] / inputs["advantages"].max()})


class Clipped:  # the step of a user: the gradient is clamped after each micro-batch
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        return loss


def clamp(trainer):
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
@pytest.mark.parametrize("of_user", [Advantages, Clipped, clamp], ids=lambda x: x.__name__)
def test_rows_stay_where_code_of_a_user_acts_on_a_micro_batch(makers, method, of_user, monkeypatch, caplog):
    make = makers(method)
    MultiProcessAdapter.warning_once.cache_clear()  # said once, also of trainers of earlier tests

    def train(trainer_class, **config):
        change = {"change": of_user} if of_user is clamp else {}
        trainer_class = trainer_class if change else type("Trainer", (of_user, trainer_class), {})
        return make.train("accumulation", trainer_class, {"eval_dataset": None}, **change, **config)

    theirs, ours = train(make.method.theirs), train(make.method.ours, **MODES["prefix sharing"])
    atol = 8 * torch.finfo(torch.float32).eps  # RLOO's loss is a mean of eight advantages that cancel
    assert_same(ours.trajectory(), theirs.trajectory(), atol)
    assert_mode_ran(ours, "prefix sharing")
    assert any("Rows stay in TRL's micro-batches, because `" in line for line in our_warnings(caplog))
    monkeypatch.setattr(make.method.ours.task_class, "may_regroup", lambda task: True)
    assert_other(train(make.method.ours, **MODES["prefix sharing"]).trajectory(), theirs.trajectory(), atol)


@pytest.mark.parametrize("name", sorted(INPUT_METHODS))
def test_logits_that_an_inner_method_of_a_user_reads_are_padded(makers, name):
    seen, method = [], makers("GRPO").method

    def reading(trainer, *args):
        result = getattr(super(type(trainer), trainer), name)(*args)
        ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
        seen.append(trainer.model(input_ids=ids, attention_mask=ids.clamp(max=1)).logits.square().mean().item())
        return result

    def train(kind, **config):
        seen.clear()
        run = makers("GRPO").train(method.plain, type("Reading", (kind,), {name: reading}), max_steps=1, **config)
        logged = {k: v for log in run.trainer.state.log_history for k, v in log.items() if "padded_forwards" in k}
        assert sum(logged.values()) == len(seen) * config.get("padding_free", 0) * config.get("parity_check", 1)
        return torch.tensor(seen)

    theirs, ours = train(method.theirs), train(method.ours, padding_free=True)
    assert_same(ours, theirs)
    assert_other(train(method.ours, padding_free=True, parity_check=False), theirs)


def test_answers_of_tools_are_no_trained_tokens():
    completions = {"completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
    assert trained_tokens(completions) == trained_tokens(completions | {"tool_mask": None}) == 5
    assert trained_tokens(completions | {"tool_mask": torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]])}) == 3


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


@pytest.mark.parametrize(
    "ragged", [torch.arange(5), list(range(5)), {"ids": torch.arange(2)}], ids=["flat", "list", "dict"]
)
def test_a_column_without_a_value_for_each_row_is_not_moved(ragged):
    """Kept token ids, one row behind the other: in which places the tokens of a row stand is unknown."""
    batches = [{"prompt_ids": torch.tensor([[1], [2]]), "kept_ids": ragged} for _ in range(2)]
    with pytest.raises(ValueError, match=r"`kept_ids` .* does not have one value for each of its 2 rows"):
        group_prompts(batches, window=2)


def test_a_budget_cuts_what_is_scored_by_rows_and_refuses_all_else(makers, monkeypatch):
    """A later TRL may score with arguments that TRL 1.16 does not have."""
    seen = []

    def score(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **more):
        seen.append((len(input_ids), batch_size, *more.values()))

    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", score)
    trainer = makers("GRPO")(config={"padding_free": True, "max_tokens_per_batch": 64})
    ids, kept = torch.ones(4, 6, dtype=torch.int64), torch.ones(4, 2)
    trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, kept_mask=kept, compute_entropy=True)
    assert seen == [(4, 4, kept, True)]
    for flat in (torch.ones(7), [0] * 7):
        with pytest.raises(ValueError, match=r"`kept_ids` .* does not have one value for each of its 4 rows"):
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, kept_ids=flat)
    assert len(seen) == 1


# -- what reward modelling has of its own: which token is scored. `test_every_method.py` has the trajectories

# The token that is scored


def train_with_pad(make, trainer_class, pad: str, **config):
    tokenizer = build_tokenizer(pad_token=pad)
    model = build_model("reward")  # the embedding of its own pad token is zero, whatever the tokenizer pads with
    model.config.pad_token_id = tokenizer.pad_token_id
    return run(
        make(trainer_class, {"max_steps": 5} | config, model=model, processing_class=tokenizer), watch_inputs("")
    ).trajectory("mean_reward")


@pytest.fixture(scope="module")
def trl_with_pad(makers):
    return cache(lambda pad: train_with_pad(makers("Reward"), trl.RewardTrainer, pad))


@pytest.mark.parametrize("mode", TWO_MODES)
def test_where_the_pad_token_ends_rows_the_score_is_trls_or_that_of_the_last_token(mode, makers, trl_with_pad, caplog):
    before_the_end, at_the_end = trl_with_pad("<eos>"), trl_with_pad("<pad>")
    config = SIDED_MODES[mode] | {"parity_check": False}
    assert_same(train_with_pad(makers("Reward"), RewardTrainer, "<eos>", **config), before_the_end)
    warnings = [record.message for record in caplog.records if "scores a token other than" in record.message]
    assert len(warnings) == 1
    assert "In 8 of 8 rows" in warnings[0]  # said once
    assert_same(train_with_pad(makers("Reward"), RewardTrainer, "<eos>", pool_last_token=True, **config), at_the_end)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(before_the_end, at_the_end)


def with_another_pad(make, trainer_class, **config):
    """A training whose collator pads with a token that the model takes for text, on the right."""
    collator = DataCollatorForReward(pad_token_id=5)
    return run(make(trainer_class, {"max_steps": 5} | config, data_collator=collator), watch_inputs(""))


def test_where_padding_is_scored_the_figures_are_trls(makers):
    mode = "prefix sharing"
    theirs = with_another_pad(makers("Reward"), trl.RewardTrainer).trajectory("mean_reward", "min_reward")
    ours = with_another_pad(makers("Reward"), RewardTrainer, **MODES[mode])
    assert_same(ours.trajectory("mean_reward", "min_reward"), theirs)
    assert ours.trainer.padding.stats.padded_forwards > 0
    assert ours.entered == ours.counts()["padded"]
    with pytest.raises(PaddingRemovalError, match=r"and in rows \[.*\] of the batch that is padding"):
        with_another_pad(makers("Reward"), RewardTrainer, strict=True, **MODES[mode])


class Hides:
    """Hides a third of all tokens, but not the last one of a row, which is scored."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        mask = inputs["attention_mask"]
        is_last = (mask.flip(1).cumsum(1).flip(1) == 1) & mask.bool()
        return {**inputs, "attention_mask": mask * ((inputs["input_ids"] % 3 != 1) | is_last)}


@pytest.mark.parametrize("config", [{}, {"prefix_sharing": True, "max_tokens_per_batch": 80}], ids=str)
def test_rows_with_hidden_tokens_are_scored_as_trl_scores_them(config, tmp_path):
    """The parity check compares last columns, and leaves batches out in which one of them is hidden."""
    data, figures = trainer_runs.build_pairs(16, 0), []
    for library in (trl, trl_padfix):
        kind = type("Own", (Hides, library.RewardTrainer), {})
        given = {"train_dataset": data, "eval_dataset": data, "max_steps": 3, "model": build_model("reward")}
        given |= {"padding_free": True, **config} if library is trl_padfix else {}
        trainer = make_trainer(library, "Reward", tmp_path / library.__name__, kind, **given)
        figures.append(trained(trainer))
    assert_same(*figures)
    assert trainer.padding.stats.packed_tokens > 0
