"""
Tiny trainings with DPO, TRL's and ours: every loss and every set-up, and what is compared of them.

Policy and reference are two random models with large weights, so their margins are large from the first step on, and a
token that sees one token too many bends the curve.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from kit import trainer_runs
from kit.models import build
from kit.trainer_runs import SIDED_MODES, lora
from peft import LoraConfig, TaskType, get_peft_model

from trl_padfix import DPOTrainer, check_parity


STEPS = 20
MODES = SIDED_MODES
TWO_MODES, is_bare = trainer_runs.TWO_MODES, trainer_runs.is_bare
PACKED_MODES = [name for name in MODES if not name.startswith("padded")]


def build_pairs(count: int, seed: int = 0) -> Dataset:
    """Ragged pairs, some of which have a prompt in common; some answers are cut off."""
    return trainer_runs.build_pairs(count, seed, common=None, end="<eos>")


def build_alike_pairs() -> Dataset:
    """Pairs of which some have two equal answers, and some a rejected one that goes on where the chosen one ends."""
    columns = build_pairs(40).to_dict()
    for i in range(0, 40, 4):
        columns["rejected"][i] = columns["chosen"][i]
        columns["chosen"][i + 1] = columns["rejected"][i + 1].rsplit(" ", 1)[0] + " w2 <eos>"
    return Dataset.from_dict(columns)


def adapters() -> LoraConfig:
    return lora(task_type=TaskType.CAUSAL_LM)


def adapted_model():
    torch.manual_seed(0)
    return get_peft_model(build("qwen2"), adapters())


@dataclass(frozen=True)
class Case:
    """A configuration that must give TRL's trajectory in every mode."""

    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = "qwen2"
    given: Callable[[], dict[str, Any]] = dict
    """More arguments of the trainer, made anew for each."""


SHORT = {"max_steps": 5}
EPOCH = {"max_steps": 10}  # every batch that is collated is computed
OBJECTIVES = {
    "ipo": Case(EPOCH | {"loss_type": ["ipo"]}),
    "wpo": Case(EPOCH | {"use_weighting": True}),
    "sft+sigmoid": Case(EPOCH | {"loss_type": ["sft", "sigmoid"], "loss_weights": [0.3, 1.0]}),
    "aot": Case(EPOCH | {"loss_type": ["aot"]}),
    "ld_alpha": Case(EPOCH | {"ld_alpha": 0.4}),
}
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
    "lora": Case(SHORT, given=lambda: {"ref_model": None, "peft_config": adapters()}),
    "lora, checkpointing": Case(
        SHORT | {"gradient_checkpointing": True},
        given=lambda: {"ref_model": None, "peft_config": adapters()},
    ),
    "lora, precomputed reference": Case(
        SHORT | {"precompute_ref_log_probs": True},
        given=lambda: {"ref_model": None, "peft_config": adapters()},
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
CASES = {"sigmoid": Case()} | OBJECTIVES | OTHER_OBJECTIVES | DIVERGENCES | SET_UPS | {"short": Case(SHORT)}


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
    with patch("trl_padfix.trainers.watch.parity.check_parity", check):
        trainer.train(**how)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    if hook:
        hook.remove()
    return Run(trainer, trainer.state.log_history, batches, sum(entered))


def count_tokens(batches: list[dict[str, torch.Tensor]]) -> dict[str, int]:
    """What every mode puts through the decoder, counted without any of the package's code."""
    forwards = [(batch["input_ids"], batch["attention_mask"]) for batch in batches]
    return trainer_runs.Run(None, [], 0, forwards).counts()


def assert_mode_ran(run: Run, mode: str) -> None:
    """Count what entered the reference, and look where its batches were padded."""
    name, side = mode.split(", ")
    counts = count_tokens(run.batches)
    assert counts["prefix sharing"] < counts["padding-free"] < counts["padded"]
    assert run.entered == counts[name]
    for handle in run.trainer.padding.handles if hasattr(run.trainer, "padding") else []:
        stats = handle.stats
        assert (stats.padded_tokens, stats.real_tokens) == (counts["padded"], counts["padding-free"])
        assert stats.packed_tokens == counts[name]
    first, last = (torch.cat([batch["attention_mask"][:, i] for batch in run.batches]).bool() for i in (0, -1))
    padded, full = (first, last) if side == "left" else (last, first)
    assert full.all()
    assert not padded.all()


def our_warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("trl_padfix")]
