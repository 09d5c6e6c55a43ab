"""
TRL's `DPOTrainer` and ours: one trajectory, whatever the mode.

A trajectory is the loss, the gradient norm and the reward margin of every step and of the evaluation after the last.
Policy and reference are two random models with large weights, so their margins are large from the first step on, and a
token that sees one token too many bends the curve. The curves of TRL are computed once for each configuration.
"""

import contextlib
import inspect
import logging
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate
import pytest
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from datasets import Dataset
from kit.cells import once_each, slow_but
from kit.flash_stand_in import flash_attention_stand_in
from kit.models import build
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_padfix import DPOConfig, DPOTrainer, PaddingRemovalError, ParityError, check_parity, padding_free_layout
from trl_padfix import prefix_sharing_layout as share_prefixes
from trl_padfix.core.model.views import PACKED_ATTENTION


SPECIAL = {"<bos>": 0, "<eos>": 1, "<pad>": 39}
WORDS = [f"w{i}" for i in range(2, 39)]
STEPS = 20

MODES = {
    f"{name}, {side}": mode | {"padding_side": side}
    for name, mode in {
        "padded": {},
        "padding-free": {"padding_free": True},
        "prefix sharing": {"padding_free": True, "prefix_sharing": True},
    }.items()
    for side in ("left", "right")
}
PACKED_MODES = [name for name in MODES if not name.startswith("padded")]
TWO_MODES = ["padding-free, left", "prefix sharing, right"]


def build_tokenizer(**settings) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per word, for the vocabulary of the models."""
    tokenizer = Tokenizer(models.WordLevel(SPECIAL | {word: i + 2 for i, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special | settings)


def build_pairs(count: int, seed: int = 0) -> Dataset:
    """Ragged pairs: prompts of 2 to 18 words, some common to several pairs, and answers of 1 to 12, some cut off."""
    draw = random.Random(seed)

    def words(low: int, high: int) -> str:
        return "".join(f"{word} " for word in draw.choices(WORDS, k=draw.randint(low, high)))

    prompts = [words(2, 18) for _ in range(max(1, count // 2))]
    return Dataset.from_list(
        [
            {"prompt": draw.choice(prompts), "chosen": words(1, 12) + "<eos>", "rejected": words(1, 12) + "<eos>"}
            for _ in range(count)
        ]
    )


def build_alike_pairs() -> Dataset:
    """Pairs of which some have two equal answers, and some a rejected one that goes on where the chosen one ends."""
    columns = build_pairs(40).to_dict()
    for i in range(0, 40, 4):
        columns["rejected"][i] = columns["chosen"][i]
        columns["chosen"][i + 1] = columns["rejected"][i + 1].rsplit(" ", 1)[0] + " w2 <eos>"
    return Dataset.from_dict(columns)


def lora() -> LoraConfig:
    """Adapters that change the model from the first step on, so that reference and policy differ."""
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, init_lora_weights=False, lora_dropout=0.0)


def adapted_model():
    torch.manual_seed(0)
    return get_peft_model(build("qwen2"), lora())


@dataclass(frozen=True)
class Case:
    """A configuration that must give TRL's trajectory in every mode."""

    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = "qwen2"
    given: Callable[[], dict[str, Any]] = dict
    """More arguments of the trainer, made anew for each."""


OBJECTIVES = {
    "sigmoid": Case(),
    "ipo": Case({"loss_type": ["ipo"]}),
    "wpo": Case({"use_weighting": True}),
    "sft+sigmoid": Case({"loss_type": ["sft", "sigmoid"], "loss_weights": [0.3, 1.0]}),
    "aot": Case({"loss_type": ["aot"]}),
    "ld_alpha": Case({"ld_alpha": 0.4}),
}
SHORT = {"max_steps": 5}
OTHER_OBJECTIVES = {
    loss: Case(SHORT | {"loss_type": [loss]} | more)
    for loss, more in {
        "hinge": {},
        "exo_pair": {"label_smoothing": 1e-3},
        "nca_pair": {},
        "robust": {"label_smoothing": 0.1},
        "bco_pair": {},
        "sppo_hard": {},
        "aot_unpaired": {},
        "apo_zero": {},
        "apo_down": {},
        "discopop": {},
        "sft": {},
        "sigmoid_norm": {},
    }.items()
}
DIVERGENCES = {
    f"{divergence}, {loss}": Case(SHORT | {"f_divergence_type": divergence, "loss_type": [loss]})
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence")
    for loss in ("sigmoid", "ipo")
}
SET_UPS = {
    "checkpointing": Case(SHORT | {"gradient_checkpointing": True}),
    "reentrant checkpointing": Case(
        SHORT | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "accumulation": Case(SHORT | {"gradient_accumulation_steps": 2}),
    "short rows, padded to multiples of 8": Case(SHORT | {"max_length": 12, "pad_to_multiple_of": 8}),
    "keep_end": Case(SHORT | {"max_length": 16, "truncation_mode": "keep_end"}),
    "synchronised reference": Case(
        {"max_steps": 7, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6}
    ),
    "precomputed reference": Case(SHORT | {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 7}),
    "precomputed reference, ld_alpha": Case(SHORT | {"precompute_ref_log_probs": True, "ld_alpha": 0.4}),
    "lora": Case(SHORT, given=lambda: {"ref_model": None, "peft_config": lora()}),
    "lora, checkpointing": Case(
        SHORT | {"gradient_checkpointing": True}, given=lambda: {"ref_model": None, "peft_config": lora()}
    ),
    "lora, precomputed reference": Case(
        SHORT | {"precompute_ref_log_probs": True}, given=lambda: {"ref_model": None, "peft_config": lora()}
    ),
    "an adapter trained before": Case(SHORT, given=lambda: {"ref_model": None, "model": adapted_model()}),
    "experts": Case(SHORT | {"router_aux_loss_coef": 0.1}, architecture="qwen3_moe"),
    "a window": Case(SHORT, architecture="mistral"),
    "absolute positions": Case(SHORT, architecture="gpt2"),
    # The gradients of equal answers cancel; Adam would make full steps of what rounding leaves of them.
    "answers that are equal, or begin alike": Case(
        SHORT | {"optim": "sgd", "learning_rate": 0.02}, given=lambda: {"train_dataset": build_alike_pairs()}
    ),
    "a stream": Case(
        SHORT, given=lambda: {"train_dataset": build_pairs(40).to_iterable_dataset(), "eval_dataset": None}
    ),
}
CASES = OBJECTIVES | OTHER_OBJECTIVES | DIVERGENCES | SET_UPS | {"short": Case(SHORT)}


@dataclass
class Run:
    """A finished training: its trainer, and what was logged, collated and computed."""

    trainer: trl.DPOTrainer
    logs: list[dict[str, float]]
    batches: list[dict[str, torch.Tensor]]
    entered: int
    """Tokens that entered the first layer of the reference."""

    @property
    def trajectory(self) -> torch.Tensor:
        """Loss, gradient norm (0 in evaluation) and reward margin of each step and of the evaluation."""
        steps = [(log["loss"], log["grad_norm"], log["rewards/margins"]) for log in self.logs if "loss" in log]
        ends = [(log["eval_loss"], 0.0, log["eval_rewards/margins"]) for log in self.logs if "eval_loss" in log]
        return torch.tensor(steps + ends, dtype=torch.float64)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes trainers that differ from one another only in what is given."""

    def make_trainer(
        trainer_class: type = DPOTrainer,
        config: dict[str, Any] | None = None,
        *,
        architecture: str = "qwen2",
        attention: str = "sdpa",
        config_class: Callable | None = None,
        **given,
    ) -> trl.DPOTrainer:
        if config_class is None:
            config_class = DPOConfig if issubclass(trainer_class, DPOTrainer) else trl.DPOConfig
        settings = {
            "output_dir": str(tmp_path_factory.mktemp("run")),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 8,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "max_length": 26,
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "log_level": "error",
            "disable_tqdm": True,
        }
        defaults = {
            "model": lambda: build(architecture, attention),
            "ref_model": lambda: build(architecture, attention, seed=1),
            "train_dataset": lambda: build_pairs(40),
            # One batch: TRL's metrics are means over batches, ours over pairs.
            "eval_dataset": lambda: build_pairs(8, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        trainer = trainer_class(args=config_class(**settings | (config or {})), **given)
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make_trainer


def make_case(make, case: Case, trainer_class: type = DPOTrainer, **config) -> trl.DPOTrainer:
    return make(trainer_class, case.config | config, architecture=case.architecture, **case.given())


def run(trainer: trl.DPOTrainer, **how) -> Run:
    """Train, and evaluate where there is something to evaluate on."""
    batches, entered, collate = [], [], trainer.data_collator

    def watch(rows):
        batches.append(collate(rows))
        return batches[-1]

    def count(layer, args):
        entered.append(args[0].shape[:2].numel())

    def check(*args, **kwargs):
        before = len(entered)
        report = check_parity(*args, **kwargs)
        del entered[before:]  # the comparison is no part of the run
        return report

    trainer.data_collator = watch
    layers = getattr(getattr(trainer.ref_model, "model", None), "layers", None)
    hook = layers[0].register_forward_pre_hook(count) if layers else None
    with patch("trl_padfix.trainers.base.check_parity", check):
        trainer.train(**how)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    if hook:
        hook.remove()
    return Run(trainer, trainer.state.log_history, batches, sum(entered))


@pytest.fixture(scope="module")
def trl_run(make):
    """The run of TRL's own trainer for one of `CASES`, computed once."""
    return cache(lambda name: run(make_case(make, CASES[name], trl.DPOTrainer)))


@pytest.fixture(scope="module")
def our_run(make):
    """The run of ours in one of `MODES` that several tests look at, computed once."""
    return cache(lambda mode: run(make_case(make, CASES["sigmoid"], **MODES[mode])))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def count_tokens(batches: list[dict[str, torch.Tensor]]) -> dict[str, int]:
    """What every mode puts through the decoder, counted without any of the package's code."""
    counts = dict.fromkeys(("padded", "padding-free", "prefix sharing"), 0)
    for batch in batches:
        masks = batch["attention_mask"].bool()
        rows = [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], masks, strict=True)]
        prefixes = [tuple(row[: i + 1]) for row in rows for i in range(len(row))]
        counts["padded"] += batch["input_ids"].numel()
        counts["padding-free"] += len(prefixes)
        counts["prefix sharing"] += len(set(prefixes))
    return counts


def assert_mode_ran(run: Run, mode: str) -> None:
    """Count what entered the reference, and look where its batches were padded."""
    name, side = mode.split(", ")
    counts = count_tokens(run.batches)
    assert counts["prefix sharing"] < counts["padding-free"] < counts["padded"]
    assert run.entered == counts[name]
    for handle in getattr(run.trainer, "_handles", []):
        stats = handle.stats
        assert (stats.padded_tokens, stats.real_tokens) == (counts["padded"], counts["padding-free"])
        assert stats.packed_tokens == counts[name]
    first, last = (torch.cat([batch["attention_mask"][:, i] for batch in run.batches]).bool() for i in (0, -1))
    padded, full = (first, last) if side == "left" else (last, first)
    assert full.all()
    assert not padded.all()


# One trajectory


@pytest.mark.parametrize(("objective", "mode"), once_each(OBJECTIVES, list(MODES), fully=["sigmoid"]))
def test_twenty_steps_and_an_evaluation_are_trls(objective, mode, make, our_run, trl_run):
    ours = our_run(mode) if objective == "sigmoid" else run(make_case(make, CASES[objective], **MODES[mode]))
    assert len(ours.trajectory) == STEPS + 1
    assert_same(ours.trajectory, trl_run(objective).trajectory)
    assert_mode_ran(ours, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("objective", [*OTHER_OBJECTIVES, *DIVERGENCES])
def test_every_loss_type_and_divergence_is_trls(objective, mode, make, trl_run):
    ours = run(make_case(make, CASES[objective], **MODES[mode]))
    assert_same(ours.trajectory, trl_run(objective).trajectory)
    assert (ours.trajectory[:-1, :2] > 0).all()


def test_no_loss_type_of_trl_is_left_out():
    text = next(f for f in fields(trl.DPOConfig) if f.name == "loss_type").metadata["help"]
    tried = {loss for name in (OBJECTIVES | OTHER_OBJECTIVES).values() for loss in name.config.get("loss_type", [])}
    assert set(re.findall(r"'(\w+)'", text)) <= tried | {"sigmoid"}
    text = next(f for f in fields(trl.DPOConfig) if f.name == "f_divergence_type").metadata["help"]
    tried = {name.split(",")[0] for name in DIVERGENCES} | {"reverse_kl"}
    assert {d for d in re.findall(r"`(\w+)`", text) if d.endswith(("_kl", "divergence"))} <= tried


@pytest.mark.parametrize(("set_up", "mode"), once_each(SET_UPS, TWO_MODES))
def test_every_set_up_is_trls(set_up, mode, make, trl_run):
    ours = run(make_case(make, CASES[set_up], **MODES[mode]))
    assert_same(ours.trajectory, trl_run(set_up).trajectory)
    for handle in ours.trainer._handles:
        assert 0 < handle.stats.packed_tokens <= handle.stats.real_tokens < handle.stats.padded_tokens
        assert handle.prefix_sharing == (handle.stats.packed_tokens < handle.stats.real_tokens)


def test_prompt_tuning_is_trls(make):
    # Right-padded, as TRL does it: left-padded, the virtual tokens of a row stand before its padding.
    settings = {"task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": 3}
    tuned = Case(SHORT, given=lambda: {"ref_model": None, "peft_config": PromptTuningConfig(**settings)})
    ours = run(make_case(make, tuned, padding_free=True))
    assert_same(ours.trajectory, run(make_case(make, tuned, trl.DPOTrainer)).trajectory)
    assert 0 < ours.trainer._handles[0].stats.packed_tokens < ours.trainer._handles[0].stats.padded_tokens


# A model of absolute positions gives other numbers where it is not told where the rows begin.
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_is_not_removed_gives_trls_numbers_with_absolute_positions(side, make, trl_run):
    ours = run(make_case(make, CASES["absolute positions"], padding_side=side))
    assert_same(ours.trajectory, trl_run("absolute positions").trajectory)


@pytest.mark.slow
def test_a_compiled_run_is_trls(make, trl_run):
    config = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours = run(make(config=SHORT | MODES["padded, left"] | config))
    assert_same(ours.trajectory, trl_run("short").trajectory)


@pytest.mark.slow
@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_run_with_compiled_layers_is_trls(mode, make, trl_run):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = run(make(config=SHORT | MODES[mode] | {"torch_compile": True, "torch_compile_backend": "aot_eager"}))
    torch.testing.assert_close(ours.trajectory, trl_run("short").trajectory, rtol=1e-4, atol=1e-4)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 2  # policy and reference
    assert not counters["graph_break"]
    assert not isinstance(ours.trainer.model, torch._dynamo.OptimizedModule)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["padded", "padding-free"])
def test_accelerate_compiles_no_model_whose_layers_are_compiled(mode, make):
    """It keeps what the first trainer of a process asks for, which here is this one."""
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        trainer = make(config=MODES[f"{mode}, left"] | {"torch_compile": True, "torch_compile_backend": "aot_eager"})
        assert (trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO) is (mode == "padding-free")
        assert trainer.args.torch_compile_backend == "aot_eager"
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)


def test_compiled_layers_under_zero_3_are_refused_before_the_first_step(make, monkeypatch):
    trainer = make(config=MODES["padding-free, left"])
    for stage, refused in ((2, False), (3, True)):
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "accelerator", SimpleNamespace(state=state))
            patch.setattr(trainer.args, "torch_compile", True)
            patch.setattr("trl_padfix.core.attention.compiled.compile_layers", lambda *args, **kwargs: {})
            with pytest.raises(PaddingRemovalError, match="ZeRO-3") if refused else contextlib.nullcontext():
                trainer._compile_layers()


def test_pairs_without_prompts_and_of_one_token_are_trls(make):
    answers = ["<eos>", "w5 w6 <eos>", "<eos>", "w7 <eos>"]
    data = Dataset.from_list([{"prompt": "", "chosen": "<eos>", "rejected": answer} for answer in answers])
    given = {"train_dataset": data, "eval_dataset": None}
    theirs = run(make(trl.DPOTrainer, SHORT, **given)).trajectory
    assert_same(run(make(config=SHORT | MODES["padding-free, right"], **given)).trajectory, theirs)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_every_metric_of_trl_is_logged_as_trl_logs_it(mode, our_run, trl_run):
    for our_log, their_log in zip(our_run(mode).logs, trl_run("sigmoid").logs, strict=True):
        their_log = {name: value for name, value in their_log.items() if not re.search("runtime|per_second", name)}
        assert their_log == pytest.approx({name: our_log[name] for name in their_log}, rel=1e-4, abs=1e-5)


def test_the_auxiliary_loss_of_experts_is_trls(make, trl_run):
    ours = run(make_case(make, CASES["experts"], **MODES["prefix sharing, left"]))
    losses = [[log["aux_loss"] for log in logs if "aux_loss" in log] for logs in (ours.logs, trl_run("experts").logs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 5


@pytest.mark.parametrize("mode", slow_but(["padded, left", *TWO_MODES], MODES))
def test_flash_attention_2_evaluates_batches_of_eight_on_either_side(mode, make, trl_run):
    with flash_attention_stand_in() as calls:
        trainer = make(config=SHORT | MODES[mode], attention="flash_attention_2")
        ours = run(trainer)
        assert trainer.model.config._attn_implementation == "flash_attention_2"
        assert len(calls) > 0
        if "padding_free" in MODES[mode]:
            # A segment for every row, but for those that are the beginning of another.
            assert 8 < max(call.segments for call in calls) <= 16
            assert all(call.causal for call in calls)
    assert_same(ours.trajectory, trl_run("short").trajectory)


def test_the_default_precision_of_trl_runs_and_passes_the_parity_check(make):
    settings = SHORT | {"bf16": True, "gradient_checkpointing": True}
    theirs = run(make(trl.DPOTrainer, settings)).trajectory
    ours = run(make(config=settings | MODES["prefix sharing, left"]))
    torch.testing.assert_close(ours.trajectory[:, :2], theirs[:, :2], rtol=0.03, atol=0.03)
    ours.trainer.restore_padding()
    assert is_bare(ours.trainer.model)


# The tests can fail


def leaking_layout(attention_mask):
    """All rows of the batch as one: each sees those before it."""
    return replace(padding_free_layout(attention_mask.reshape(1, -1)), batch_shape=tuple(attention_mask.shape))


def confusing_layout(input_ids, attention_mask, position_ids=None):
    """A token is taken for every other one at its place."""
    return share_prefixes(torch.zeros_like(input_ids), attention_mask, position_ids)


@pytest.fixture(params=["padding_free_layout", "prefix_sharing_layout"])
def broken_mode(request, monkeypatch):
    """A mode whose layout is wrong."""
    broken = {"padding_free_layout": leaking_layout, "prefix_sharing_layout": confusing_layout}[request.param]
    monkeypatch.setattr(f"trl_padfix.core.call.layout_of.{request.param}", broken)
    return MODES["prefix sharing, left" if "sharing" in request.param else "padding-free, left"]


def test_a_broken_layout_does_not_give_trls_trajectory(broken_mode, make, trl_run):
    ours = run(make(config=broken_mode | {"parity_check": False}))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory, trl_run("sigmoid").trajectory)


def test_a_broken_layout_stops_training_before_the_first_step(broken_mode, make):
    trainer = make(config=broken_mode)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(ParityError, match=r"parity FAILED .* difference of \d+ scores mean .*`padding_free=False`"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_a_broken_layout_stops_an_evaluation(broken_mode, make):
    with pytest.raises(ParityError, match="parity FAILED"):
        make(config=broken_mode).evaluate()


@pytest.mark.parametrize("mode", PACKED_MODES)
def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(mode, our_run):
    side = MODES[mode]["padding_side"]
    padded = our_run(f"padded, {side}")
    assert_mode_ran(padded, f"padded, {side}")
    with pytest.raises(AssertionError):
        assert_mode_ran(padded, mode)


# Our own figures


@pytest.mark.parametrize("mode", slow_but(["padded, left", *TWO_MODES], MODES))
def test_fractions_and_tokens_per_second_are_those_of_the_data(mode, make, monkeypatch):
    ticks = iter(range(10_000))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("trl_padfix.trainers.watch.token_counts.time", clock)
    ours = run(make(config={"max_steps": 10} | MODES[mode]))
    train, evaluation = ours.batches[:10], ours.batches[10:]
    logs = [log for log in ours.logs if "loss" in log]
    logged = [(log, [batch], "") for log, batch in zip(logs, train, strict=True)]
    # The clock ticks where a measurement begins and where it ends: every log covers one second.
    for log, batches, prefix in [*logged, (ours.logs[-1], evaluation, "eval_")]:
        counts = count_tokens(batches)
        real, packed = counts["padding-free"], counts[mode.split(", ")[0]]
        assert log[f"{prefix}perf/tokens_per_second"] == real
        if mode.startswith("padded"):
            assert not any("padfix" in name for name in log)
            continue
        assert log[f"{prefix}padfix/pad_fraction"] == pytest.approx(1 - real / counts["padded"])
        assert log[f"{prefix}padfix/shared_fraction"] == pytest.approx(1 - packed / real)


def test_a_log_covers_all_batches_since_the_last(make):
    config = {"max_steps": 10, "logging_steps": 5, "gradient_accumulation_steps": 2, "padding_free": True}
    ours = run(make(config=config))
    for i, log in enumerate(log for log in ours.logs if "loss" in log):
        counts = count_tokens(ours.batches[10 * i : 10 * (i + 1)])
        assert log["padfix/pad_fraction"] == pytest.approx(1 - counts["padding-free"] / counts["padded"])


def test_policy_and_reference_share_the_layout_of_a_batch(make, monkeypatch):
    built = []
    monkeypatch.setattr(
        "trl_padfix.core.call.layout_of.prefix_sharing_layout",
        lambda *batch: built.append(batch) or share_prefixes(*batch),
    )
    trainer = make(config=SHORT | MODES["prefix sharing, left"] | {"parity_check": False}, eval_dataset=None)
    run(trainer)
    assert 5 <= len(built) <= 6  # with their batches, of which the data loader fetches one ahead


# What a script does with a trainer


@pytest.mark.parametrize("mode", TWO_MODES)
def test_evaluate_takes_raw_datasets_and_dictionaries_of_them(mode, make):
    fresh = {"fresh": build_pairs(8, seed=2), "other": build_pairs(4, seed=3)}
    trainers = make(trl.DPOTrainer), make(config=MODES[mode])
    theirs, ours = (trainer.evaluate(fresh["fresh"]) | trainer.evaluate(fresh) for trainer in trainers)
    losses = ["eval_loss", "eval_fresh_loss", "eval_other_loss"]
    assert [ours[name] for name in losses] == pytest.approx([theirs[name] for name in losses], rel=1e-4)
    first, again, other = (log["eval_padfix/pad_fraction"] for log in trainers[1].state.log_history)
    assert first == again != other
    assert "eval_loss" not in trainers[1].evaluate(fresh)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_compute_metrics_sees_trls_logits_of_the_real_tokens(mode, make):
    def compute_metrics(prediction):
        logits, ids = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
        real = (ids >= 0) & (ids != SPECIAL["<pad>"])
        return {"sum": logits[real].double().abs().sum().item(), "tokens": int(real.sum())}

    theirs, ours = (
        make(trainer_class, config, compute_metrics=compute_metrics).evaluate()
        for trainer_class, config in ((trl.DPOTrainer, {}), (DPOTrainer, MODES[mode]))
    )
    assert ours["eval_tokens"] == theirs["eval_tokens"]
    for name in ("eval_sum", "eval_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_a_configuration_of_trls_is_taken_as_it_is(make, trl_run):
    trainer = make(config={"padding_free": True}, config_class=trl.DPOConfig)
    ours = run(trainer)
    assert_same(ours.trajectory, trl_run("sigmoid").trajectory)
    assert_mode_ran(ours, "padding-free, right")
    assert trainer.args.padding_free
    assert trainer.padding_free


def test_no_configuration_at_all_is_trls_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the output directory gets its name from the model
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainer = DPOTrainer(
        model=build("qwen2"),
        ref_model=build("qwen2", seed=1),
        train_dataset=build_pairs(4),
        processing_class=build_tokenizer(),
    )
    assert type(trainer.args) is trl.DPOConfig
    assert trainer._handles == []
    assert trainer.data_collator.padding_side == "right"


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_is_the_tokenizers_where_none_is_given(side, make):
    tokenizer = build_tokenizer(padding_side=side)
    assert make(processing_class=tokenizer).data_collator.padding_side == side
    other = {"left": "right", "right": "left"}[side]
    assert make(config={"padding_side": other}, processing_class=tokenizer).data_collator.padding_side == other


def test_a_side_for_a_collator_that_has_none_is_an_error(make):
    def collate(pairs):
        raise AssertionError("not called")

    with pytest.raises(ValueError, match=r"`padding_side=.*default collator"):
        make(config={"padding_side": "left"}, data_collator=collate)


@pytest.mark.parametrize(("trainer_class", "warned"), [(DPOTrainer, False), (trl.DPOTrainer, True)])
def test_only_trl_warns_that_padding_free_is_off(trainer_class, warned, make, caplog):
    with caplog.at_level(logging.WARNING):
        make(trainer_class, {"padding_free": True})
    assert any("padding_free" in record.getMessage() for record in caplog.records) == warned


def test_a_model_named_by_its_path_is_attached_with_its_reference(make, tmp_path):
    build("qwen2").save_pretrained(tmp_path)
    config = MODES["padding-free, left"] | {"model_init_kwargs": {"dtype": "float32"}}
    ours = run(make(config=config, model=str(tmp_path), ref_model=None))
    assert len(ours.trainer._handles) == 2
    assert_mode_ran(ours, "padding-free, left")
    del config["padding_free"], config["padding_side"]
    assert_same(ours.trajectory, run(make(trl.DPOTrainer, config, model=str(tmp_path), ref_model=None)).trajectory)


def test_a_second_trainer_takes_over_the_model_as_with_trl(make):
    runs = []
    for trainer_class, config in ((trl.DPOTrainer, {}), (DPOTrainer, MODES["prefix sharing, left"])):
        first = run(make(trainer_class, SHORT | config)).trainer
        runs.append(run(make(trainer_class, SHORT | config, model=first.model, ref_model=first.ref_model)))
    assert_same(runs[1].trajectory, runs[0].trajectory)


@pytest.fixture(scope="module")
def checkpoints(make, tmp_path_factory):
    """The folder of a run of ours with checkpoints in the middle and at the end, and its trainer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = MODES["prefix sharing, left"] | {"save_strategy": "steps", "save_steps": 10, "output_dir": str(folder)}
    return folder, run(make(config=config))


@pytest.mark.parametrize(
    ("trainer_class", "mode"),
    [(DPOTrainer, "prefix sharing, left"), (DPOTrainer, "padding-free, right"), (trl.DPOTrainer, None)],
)
def test_a_checkpoint_of_ours_is_resumed_by_ours_and_by_trl(trainer_class, mode, make, checkpoints, trl_run):
    folder, _ = checkpoints
    resumed = run(
        make(trainer_class, MODES.get(mode, {})), resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}")
    )
    assert_same(resumed.trajectory, trl_run("sigmoid").trajectory)
    for handle in getattr(resumed.trainer, "_handles", []):
        assert 0 < handle.stats.packed_tokens < handle.stats.padded_tokens


def test_a_checkpoint_reloads_in_plain_transformers(checkpoints):
    folder, ours = checkpoints
    checkpoint = folder / f"checkpoint-{STEPS}"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    assert type(loaded) is type(build("qwen2"))
    expected = ours.trainer.model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    batch = ours.batches[-1]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        theirs = loaded(**inputs).logits
        attached = ours.trainer.model(**inputs).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(attached[real], theirs[real], rtol=1e-5, atol=1e-5)


def test_nothing_of_ours_lands_in_a_checkpoint(make, checkpoints):
    folder, _ = checkpoints
    checkpoint = folder / f"checkpoint-{STEPS}"
    make(trl.DPOTrainer).save_model(str(folder / "trl"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (checkpoint / name).read_text() == (folder / "trl" / name).read_text()
    assert "DPO" in (folder / "README.md").read_text()


# Nothing is lost


OVERRIDDEN = {
    "__init__": "self, model, ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, "
    "compute_metrics, callbacks, optimizers, quantization_config, peft_config",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
    "evaluation_loop": "self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
    "get_eval_dataloader": "self, eval_dataset",
    "get_test_dataloader": "self, test_dataset",
    "create_model_card": "self, model_name, dataset_name, tags",
    "log": "self, logs, start_time",
    "_prepare_dataset": "self, dataset, processing_class, args, dataset_name",
    "_precompute_ref_logps": "self, dataset, name, batch_size",
    "training_step": "self, args, kwargs",
    "get_train_dataloader": "self",
    "floating_point_ops": "self, inputs",
    "_get_train_sampler": "self, train_dataset",
    "_get_num_items_in_batch": "self, batch_samples, device",
    "_track_num_input_tokens": "self, inputs",
    "_get_grad_norm": "self, model, grad_norm",
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
    "_push_from_checkpoint": "self, checkpoint_folder",
    "_save_checkpoint": "self, model, trial",
    "_get_output_dir": "self, trial",
}


def test_what_we_override_of_trl_has_the_signatures_that_we_assume():
    ours = [c for c in DPOTrainer.__mro__ if c.__module__.startswith("trl_padfix")]
    functions = {name for c in ours for name, value in vars(c).items() if inspect.isfunction(value)}
    overridden = {name for name in functions if hasattr(trl.DPOTrainer, name)}
    assert overridden == OVERRIDDEN.keys()
    for name, parameters in OVERRIDDEN.items():
        assert ", ".join(inspect.signature(getattr(trl.DPOTrainer, name)).parameters) == parameters, name


def is_bare(model) -> bool:
    """Whether no module of a model is patched."""
    return not any("forward" in vars(module) for module in model.model.modules())


def assert_intact(trainer: DPOTrainer) -> None:
    """Models that were trained attached compute as any other once they are detached."""
    trainer.restore_padding()
    # The names that stay registered in transformers, one more after a run with compiled layers; no model keeps one.
    assert {name for name in ALL_ATTENTION_FUNCTIONS if "padfix" in name} <= {
        PACKED_ATTENTION,
        f"{PACKED_ATTENTION}_compiled",
    }
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for model in (trainer.model, trainer.ref_model):
        assert is_bare(model)
        assert model.config._attn_implementation == "sdpa"
        fresh = build("qwen2")
        fresh.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model.eval()(**inputs).logits, fresh(**inputs).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", TWO_MODES)
def test_an_exception_in_a_forward_leaves_models_that_can_be_detached(mode, checkpointing, make):
    trainer = make(config=MODES[mode] | {"gradient_checkpointing": checkpointing})
    calls = []

    def fail(module, args, output):
        calls.append(module)
        if len(calls) == 6:
            raise RuntimeError("out of memory, say")

    hook = trainer.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        trainer.train()
    hook.remove()
    assert_intact(trainer)


def test_an_interruption_between_steps_leaves_models_that_can_be_detached(make):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make(config=MODES["prefix sharing, left"], callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert_intact(trainer)


def test_a_trainer_whose_models_are_detached_trains_padded(make, trl_run):
    trainer = make(config=MODES["padding-free, left"])
    trainer.restore_padding()
    ours = run(trainer)
    assert_same(ours.trajectory, trl_run("sigmoid").trajectory)
    assert_mode_ran(ours, "padded, left")


@pytest.mark.parametrize("mode", TWO_MODES)
def test_an_error_while_the_trainer_is_made_leaves_the_models_as_they_were(mode, make):
    class Fails(DPOTrainer):
        def compute_ref_log_probs(self, model, inputs):
            raise RuntimeError("out of memory, say")

    policy, reference = build("qwen2"), build("qwen2", seed=1)
    with pytest.raises(RuntimeError, match="out of memory, say"):
        make(Fails, MODES[mode] | {"precompute_ref_log_probs": True}, model=policy, ref_model=reference)
    assert is_bare(policy)
    assert is_bare(reference)


# Bad input


def pairs_with(**columns) -> Dataset:
    """Four pairs, some of whose columns are given."""
    return Dataset.from_dict(build_pairs(4).to_dict() | columns)


def conversations_with_an_empty_answer() -> dict[str, Any]:
    """Pairs of which one has nothing in its rejected answer, under a template that adds nothing either."""
    template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    answers = ["w5", "w6", "", "w8"]
    rows = [
        {
            "prompt": [{"role": "user", "content": "w2 w3"}],
            "chosen": [{"role": "assistant", "content": "w4"}],
            "rejected": [{"role": "assistant", "content": answer}],
        }
        for answer in answers
    ]
    return {"train_dataset": Dataset.from_list(rows), "processing_class": build_tokenizer(chat_template=template)}


def encoder_decoder(seed: int):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 64}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


BAD_INPUT = {
    "no rejected": (
        {},
        lambda: {"train_dataset": build_pairs(4).remove_columns("rejected")},
        (ValueError, "train dataset has no column 'rejected'; it has .*DPO needs .*rename"),
    ),
    "neither chosen nor rejected": (
        {},
        lambda: {"train_dataset": build_pairs(4).select_columns("prompt")},
        (ValueError, "no column 'chosen' and no column 'rejected'"),
    ),
    "no chosen in the evaluation": (
        {},
        lambda: {"eval_dataset": {"held_out": build_pairs(4).remove_columns("chosen")}},
        (ValueError, "held_out dataset has no column 'chosen'"),
    ),
    "no chosen in a stream": (
        {},
        lambda: {"train_dataset": build_pairs(4).remove_columns("chosen").to_iterable_dataset()},
        (ValueError, "train dataset has no column 'chosen'"),
    ),
    "neither pad nor eos": (
        {},
        lambda: {"processing_class": build_tokenizer(pad_token=None, eos_token=None)},
        (ValueError, "neither a pad token nor an EOS token.*Set `tokenizer.pad_token`"),
    ),
    "no eos to end answers with": (
        {},
        lambda: {"processing_class": build_tokenizer(eos_token=None)},
        (ValueError, "EOS.*Set `tokenizer.eos_token`"),
    ),
    "prompt tuning": (
        {"padding_free": True, "prefix_sharing": True},
        lambda: {
            "ref_model": None,
            "peft_config": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
        },
        (PaddingRemovalError, "PromptTuningConfig.*virtual tokens.*`prefix_sharing=False`"),
    ),
    "prefix tuning": (
        {"padding_free": True},
        lambda: {
            "ref_model": None,
            "peft_config": PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
        },
        (PaddingRemovalError, "PrefixTuningConfig.*cache.*LoRA"),
    ),
    "neftune": (
        {"padding_free": True, "prefix_sharing": True, "neftune_noise_alpha": 5.0},
        dict,
        (PaddingRemovalError, "`neftune_noise_alpha` gives every token .* a noise of its own.*`prefix_sharing=False`"),
    ),
    "an encoder-decoder": (
        {"padding_free": True},
        lambda: {"model": encoder_decoder(0), "ref_model": encoder_decoder(1)},
        (PaddingRemovalError, "T5ForConditionalGeneration.*encoder-decoder.*padding_free=False"),
    ),
    "flex attention": (
        {"padding_free": True},
        lambda: {"model": build("qwen2", "flex_attention")},
        (PaddingRemovalError, "flex_attention.*attn_implementation='sdpa'"),
    ),
    "an empty answer": (
        {},
        conversations_with_an_empty_answer,
        (ValueError, "rejected completion of pair 2 of the train dataset has no token.*Drop the pair"),
    ),
    "only prompts that are too long": (
        {"max_length": 2},
        dict,
        (ValueError, "No pair of the train dataset is left: all 40 prompts fill `max_length=2`.*Raise `max_length`"),
    ),
    "nothing to train on": (
        {},
        lambda: {"train_dataset": build_pairs(4).select([])},
        (ValueError, "train dataset.*(empty|no pair)"),
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_an_error_that_says_what_why_and_what_to_do(name, make):
    config, given, (error, message) = BAD_INPUT[name]
    with pytest.raises(error, match=f"(?is){message}"):
        make(config=config, **given())


@pytest.mark.parametrize("setting", ["prefix_sharing", "padding_side"])
def test_a_field_that_was_set_on_a_finished_configuration_is_checked_too(setting, make):
    def config_class(**settings):
        config = DPOConfig(**settings)
        setattr(config, setting, {"prefix_sharing": True, "padding_side": "middle"}[setting])
        return config

    with pytest.raises(ValueError, match=f"`{setting}"):
        make(config_class=config_class)


@pytest.mark.parametrize("size", ["cp_size", "sp_size"])
def test_context_parallelism_is_refused(size, make, monkeypatch):
    parallelism = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, "cp_enabled": False} | {size: 2})
    policy = build("qwen2")
    make_trainer = trl.DPOTrainer.__init__

    def with_parallelism(trainer, *args, **kwargs):
        make_trainer(trainer, *args, **kwargs)
        monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", parallelism)

    monkeypatch.setattr(trl.DPOTrainer, "__init__", with_parallelism)
    monkeypatch.setattr(with_parallelism, "__signature__", inspect.signature(make_trainer), raising=False)
    with pytest.raises(PaddingRemovalError, match=f"`{size}` splits every padded row.*padding_free=False"):
        make(config={"padding_free": True}, model=policy)
    assert is_bare(policy)


def test_flash_attention_2_without_its_package_says_what_to_install_or_set(make, tmp_path):
    build("qwen2").save_pretrained(tmp_path)
    config = {"padding_free": True, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    with pytest.raises(ImportError, match=r"(?is)flash.*(pip install|sdpa)"):
        make(config=config, model=str(tmp_path), ref_model=None)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_flash_attention_2_in_float32_says_where_it_runs(mode, make, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")

    with flash_attention_stand_in():
        monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", refuse)
        trainer = make(config=MODES[mode], attention="flash_attention_2")
        with pytest.raises(PaddingRemovalError, match=r"failed with torch.float32 on cpu.*bfloat16.*sdpa"):
            trainer.train()


def our_warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("trl_padfix")]


@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        (
            lambda: pairs_with(chosen=["w2 w3", "w4", "w5", "w6"], rejected=["w2 w3", "w4", "w7", "w6 w6"]),
            {},
            "2 of 4 pairs of the train dataset have equal completions.*Drop them",
        ),
        (
            lambda: pairs_with(prompt=["w2 " * 9, "w3 " * 5, "w4 " * 6, "w5 "]),
            {"max_length": 6},
            "2 of 4 pairs of the train dataset were left out.*`max_length=6`.*Raise `max_length`",
        ),
    ],
)
def test_pairs_that_teach_nothing_are_counted_in_a_warning(data, config, message, make, caplog):
    with caplog.at_level(logging.WARNING):
        make(config=config, train_dataset=data(), eval_dataset=None)
    (warning,) = our_warnings(caplog)
    assert re.search(message, warning)


def test_good_pairs_give_no_warning(make, caplog):
    with caplog.at_level(logging.WARNING):
        run(make(config=SHORT | MODES["prefix sharing, left"]))
    assert our_warnings(caplog) == []


@pytest.mark.parametrize("first", ["padding-free, left", "padded, left"])
def test_a_padded_trainer_after_another_one_is_padded(first, make):
    before = make(config=MODES[first] | {"max_steps": 1})
    before.train()
    seen = [handle.stats.packed_tokens for handle in before._handles]
    models = {"model": before.model, "ref_model": before.ref_model}
    after = make(config={"max_steps": 1, "padding_side": "right"}, **models)
    after.train()
    assert [handle.stats.packed_tokens for handle in before._handles] == seen
    assert not any("forward" in vars(part) for part in attended(models))


def attended(models: dict[str, torch.nn.Module]) -> list[torch.nn.Module]:
    """The decoders and their attention modules, which TRL itself leaves as they are."""
    return [part for model in models.values() for part in (model.model, model.model.layers[0].self_attn)]


def test_an_empty_evaluation_set_is_an_error_that_names_it(make):
    with pytest.raises(ValueError, match="The eval dataset is empty"):
        make(eval_dataset=Dataset.from_dict({"prompt": [], "chosen": [], "rejected": []}))
