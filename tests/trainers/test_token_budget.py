"""A split batch against the whole one: TRL's numbers, all metrics included, whatever the loss and the accumulation."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import trl
from bench import live_bytes, profiled
from kit.budget_runs import (
    BUDGETS,
    FREE,
    IMAGE_BUDGETS,
    IMAGE_DATA,
    IMAGES,
    assert_same,
    build_experts,
    figures_of,
    make,
    make_on_images,
    train_split,
)
from kit.cells import slow_but
from kit.processes import logged
from kit.rows import build_pairs
from kit.trainer_runs import figures, lora
from peft import PromptTuningConfig, TaskType
from transformers import TrainerCallback

import trl_padfix
from trl_padfix.trainers.batching.bin_packing import RowSplitter
from trl_padfix.trainers.batching.token_budget import TokenBudget


class Case(NamedTuple):
    """A loss under a budget: of which trainer, with which settings and further arguments."""

    kind: str
    config: dict[str, Any] = {}
    given: Callable[[], dict[str, Any]] = dict
    is_sum: bool = True
    """Whether it is a sum over rows with known weights."""


def experts(kind: str = "mixtral", **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": build_experts(kind)} | {name: make() for name, make in more.items()}


COEFFICIENT = {"router_aux_loss_coef": 0.5}
REFERENCE = {"ref_model": lambda: build_experts("mixtral", seed=1)}
GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down"),
    *("discopop", "sigmoid_norm"),
)
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
SMOOTHED = {"label_smoothing": 0.1}

CASES = {
    "SFT": Case("SFT"),
    "SFT, dft": Case("SFT", {"loss_type": "dft"}),
    "SFT, label smoothing": Case("SFT", {"label_smoothing_factor": 0.1}, is_sum=False),
    "SFT, a mean over processes": Case("SFT", {"average_tokens_across_devices": False}),
    "SFT, experts": Case("SFT", COEFFICIENT, experts(), is_sum=False),
    "SFT, other experts": Case("SFT", COEFFICIENT, experts("qwen3_moe"), is_sum=False),
    "SFT, adapters": Case("SFT", given=lambda: {"peft_config": lora(task_type="CAUSAL_LM")}),  # once refused
    "SFT, wrapped": Case("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    **{f"DPO, {loss}": Case("DPO", {"loss_type": [loss]} | SMOOTHED) for loss in DPO_LOSSES},
    **{f"DPO, {loss}": Case("DPO", {"loss_type": [loss]}, is_sum=False) for loss in ("aot", "aot_unpaired", "sft")},
    "DPO, mixed": Case("DPO", {"loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]}),
    "DPO, mixed with SFT": Case("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}, is_sum=False),
    "DPO, weighted": Case("DPO", {"use_weighting": True}),
    "DPO, lengths": Case("DPO", {"ld_alpha": 0.5}),
    **{f"DPO, {name}": Case("DPO", {"f_divergence_type": name}) for name in DIVERGENCES},
    "DPO, precomputed reference": Case("DPO", {"precompute_ref_log_probs": True}),
    "DPO, adapters": Case("DPO", given=lambda: {"peft_config": lora(task_type="CAUSAL_LM"), "ref_model": None}),
    "DPO, experts": Case("DPO", COEFFICIENT, experts(**REFERENCE), is_sum=False),
    "Reward": Case("Reward", {"center_rewards_coefficient": 0.1}),
    "Reward, margins": Case(
        "Reward", given=lambda: {"train_dataset": build_pairs(40).add_column("margin", [i % 3 / 2 for i in range(40)])}
    ),
    "Reward, adapters": Case(
        "Reward", given=lambda: {"peft_config": lora(task_type=TaskType.SEQ_CLS, modules_to_save=["score"])}
    ),
    "KTO": Case("KTO"),
    "KTO, without the KL term": Case("KTO", {"loss_type": "apo_zero_unpaired"}),
    "KTO, precomputed reference": Case("KTO", {"precompute_ref_log_probs": True}),
    "KTO, experts": Case("KTO", COEFFICIENT, experts(**REFERENCE), is_sum=False),
    **{f"GRPO, {loss}": Case("GRPO", {"loss_type": loss}) for loss in GRPO_LOSSES},
    "GRPO, sequences": Case("GRPO", {"importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 1e-3}),
    "GRPO, truncated completions": Case("GRPO", {"mask_truncated_completions": True, "loss_type": "bnpo"}),
    "GRPO, high entropy": Case("GRPO", {"top_entropy_quantile": 0.53}, is_sum=False),
    "GRPO, entropy bonus": Case("GRPO", {"entropy_coef": 0.1}, is_sum=False),
    "GRPO, adaptive entropy": Case("GRPO", {"use_adaptive_entropy": True, "entropy_target": 3.0}, is_sum=False),
    "GRPO, experts": Case("GRPO", COEFFICIENT | {"beta": 0.0}, experts(), is_sum=False),
    "RLOO": Case("RLOO"),
    "Distillation": Case("Distillation"),
    "Distillation, forward": Case("Distillation", {"beta": 0.0, "temperature": 0.7}),
}
PUSHED = (
    *("SFT", "SFT, adapters", "SFT, experts", "DPO, sigmoid", "DPO, aot", "Reward", "KTO"),
    *("GRPO, bnpo", "GRPO, high entropy", "RLOO"),
)
"""Cases of every push; the others run at night."""
ACCUMULATION = {1: {}, 3: {"gradient_accumulation_steps": 3}}
ONE_BATCH = ("SFT", "SFT, experts", "DPO, sigmoid", "KTO", "GRPO, bnpo")
"""Cases that are also tried without accumulation: one of each way to weigh a chunk."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], torch.Tensor]:
    """What TRL logs without a budget, and its weights."""

    @cache
    def train(name: str, accumulation: int) -> torch.Tensor:
        case = CASES[name]
        config = case.config | ACCUMULATION[accumulation] | case.given()
        return figures_of(make(trl, case.kind, tmp_path_factory.mktemp("trl"), **config))

    return train


def parametrized() -> list[Any]:
    marks = {True: [], False: [pytest.mark.slow]}
    return [
        pytest.param(name, n, id=f"{name}, {n}", marks=marks[name in PUSHED and n == 3])
        for name in CASES
        for n in ACCUMULATION
        if n == 3 or name in ONE_BATCH
    ]


LOSS_SETTINGS = ("loss_type", "f_divergence_type", "importance_sampling_level")


def accepted(kind: str) -> set[tuple[str, str]]:
    """Fields of a loss and the values that TRL's trainer compares them with."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(getattr(trl, f"{kind}Trainer"))))):
        if isinstance(node, ast.Compare):
            field = ast.unparse(node.left).rpartition(".")[2]
            values = [n.value for n in ast.walk(node.comparators[0]) if isinstance(n, ast.Constant)]
            found |= {(field, value) for value in values if field in LOSS_SETTINGS}
    return found


@pytest.mark.parametrize(("kind", "loss"), [("SFT", "dft"), ("DPO", "aot"), ("KTO", "kto"), ("GRPO", "vespo")])
def test_every_loss_of_trl_has_a_case(kind, loss, tmp_path):
    config = getattr(trl, f"{kind}Config")(tmp_path, bf16=False)
    cases = [
        {name: case.config.get(name, getattr(config, name, None)) for name in LOSS_SETTINGS}
        for case in CASES.values()
        if case.kind == kind
    ]
    losses = accepted(kind)
    assert ("loss_type", loss) in losses  # they are found
    tried = {
        (name, value)
        for case in cases
        for name, x in case.items()
        for value in ([x] if isinstance(x, str) else x or [])
    }
    assert losses - tried == set()


@pytest.mark.parametrize(("name", "accumulation"), parametrized())
def test_a_split_batch_has_the_numbers_of_the_whole_one(name, accumulation, theirs, tmp_path, monkeypatch):
    case = CASES[name]
    config = case.config | ACCUMULATION[accumulation]

    def split(folder: str) -> Any:
        return train_split(make(trl_padfix, case.kind, tmp_path / folder, budget=True, **config | case.given()))

    ours = split("ours")
    assert_same(ours.figures, theirs(name, accumulation))
    # A batch was split, in chunks or else in sub-batches, and no forward exceeds the budget.
    assert (max(ours.chunks, default=1) > 1) == case.is_sum
    assert max(ours.forwards) <= ours.trainer.args.max_tokens_per_batch
    assert len(ours.forwards) > len(ours.chunks) + ours.trainer.state.global_step

    # A wrong weight, and for a loss that is no sum over rows the weight that it would have, give other numbers.
    task = type(ours.trainer.padding.task)
    weigh = task.chunk_weight

    def wrong(self: Any, chunk: Any, batch: Any, num_items: Any) -> Any:
        if not case.is_sum:
            rows = "input_ids" if "input_ids" in batch else "prompt_ids"
            return len(chunk[rows]) / len(batch[rows])
        return weigh(self, chunk, batch, num_items) * (1.5 if len(chunk) and chunk is not batch else 1)

    monkeypatch.setattr(task, "chunk_weight", wrong)
    if not case.is_sum:
        monkeypatch.setattr(TokenBudget, "why_all_rows", lambda self: None)
    wrongly = split("wrong")
    assert max(wrongly.chunks) > 1
    with pytest.raises(AssertionError):
        assert_same(wrongly.figures, theirs(name, accumulation), factor=10)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", slow_but(["multi_gpu"], ["multi_gpu", "fsdp2"]))
def test_two_processes_have_trls_numbers_and_resume(strategy, tmp_path):
    """Rows are permuted over processes, so that they have even tokens; each of TRL's batches is split by itself."""
    found = logged(strategy, tmp_path, "kit.budget_runs", "rows")
    for kind in ("DPO", "SFT", "Reward", "KTO"):
        theirs, ours, *resumed = found[kind]
        assert_same(figures(ours), figures(theirs))
        for history in resumed:
            assert_same(figures(history, ("num_tokens",))[5:], figures(ours, ("num_tokens",))[5:])
    for kind in ("DPO", "SFT"):
        whole, split = found[f"grouped {kind}"]
        assert_same(figures(split), figures(whole))


def kept_bytes(trainer: Any) -> int:
    """The most bytes that a step keeps at once, beyond those before it."""
    with profiled(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.train()
    return max(live_bytes(profile))


@pytest.mark.parametrize("name", ["SFT", "DPO, aot", "GRPO, grpo", "DPO, images"])
def test_a_step_keeps_the_activations_of_one_part(name, tmp_path):
    kind, _, loss = name.partition(", ")

    def kept(rows: int, **budget: Any) -> int:
        config = {"max_steps": 1, "per_device_train_batch_size": rows} | budget
        if loss == "images":
            data = {"train_dataset": IMAGE_DATA[kind](32, IMAGES)}
            return kept_bytes(make_on_images(trl_padfix, kind, "llava", tmp_path, **data, **FREE | config))
        return kept_bytes(make(trl_padfix, kind, tmp_path, budget=True, **CASES[name].config | config))

    budget = IMAGE_BUDGETS[kind] if loss == "images" else {}
    assert kept(32, **budget) < 2 * kept(8, **budget)  # eight rows may not fill a part
    whole = {"max_tokens_per_batch": None}
    assert kept(32, **whole) > 3 * kept(8, **whole)


def test_a_tuned_prompt_predicts_the_first_token_of_a_row(tmp_path, monkeypatch):
    def train(library):
        given = {"peft_config": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)}
        return train_split(make(library, "SFT", tmp_path, budget=library is trl_padfix, **given))

    theirs, ours = train(trl), train(trl_padfix)
    assert min(ours.chunks) > 1
    assert_same(ours.figures, theirs.figures)
    later_tokens = lambda task, batch: (batch["labels"][:, 1:] != -100).sum()  # noqa: E731
    monkeypatch.setattr(trl_padfix.SFTTrainer.task_class, "num_loss_items", later_tokens)
    with pytest.raises(AssertionError):
        assert_same(train(trl_padfix).figures, theirs.figures, factor=10)


def test_a_row_beyond_the_budget_is_computed_by_itself_with_a_warning(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="trl_padfix"):
        ours = train_split(make(trl_padfix, "DPO", tmp_path, budget=True, max_tokens_per_batch=20))
    assert_same(ours.figures, figures_of(make(trl, "DPO", tmp_path)))
    assert max(ours.chunks) == 8
    assert caplog.text.count("more tokens than `max_tokens_per_batch=20`") == 1  # in five steps


def test_a_batch_within_the_budget_is_planned_once(tmp_path, monkeypatch):
    planned, split = [], RowSplitter.split
    monkeypatch.setattr(RowSplitter, "split", lambda *args, **kwargs: planned.append(kind) or split(*args, **kwargs))
    for kind in ("DPO", "SFT", "Reward", "KTO"):
        given = {"budget": True, "parity_check": False, "max_steps": 1, "max_tokens_per_batch": 10_000}
        make(trl_padfix, kind, tmp_path, **given).train()
    # The rows of KTO's KL term are another batch.
    assert [planned.count(kind) for kind in ("DPO", "SFT", "Reward", "KTO")] == [1, 1, 1, 3]


def test_it_follows_the_batch_size_that_is_found_and_no_argument_that_is_changed(tmp_path):
    trainer = make(trl_padfix, "SFT", tmp_path, budget=True)
    trainer.args.per_device_train_batch_size = 2
    assert trainer.padding.budget.budget == BUDGETS["SFT"]  # Trainer goes on with batches of 8
    trainer.args.auto_find_batch_size, trainer.args.per_device_train_batch_size = True, 8
    trainer._train_batch_size = 4
    assert trainer.padding.budget.budget == BUDGETS["SFT"] // 2


def test_a_step_leaves_as_many_hooks_as_trls(tmp_path):
    def hooks(library: Any, checkpointing: bool = True, **given: Any) -> list[int]:
        trainer, counts = make(library, "DPO", tmp_path, gradient_checkpointing=checkpointing, **given), []
        on_step = {"on_step_end": lambda *args, **kwargs: counts.append(len(embedding._forward_hooks))}
        embedding = trainer.model.get_input_embeddings()
        trainer.add_callback(type("Count", (TrainerCallback,), on_step))
        trainer.train()
        return counts

    first, second, last = hooks(trl)
    assert second - first == last - second
    ours = hooks(trl_padfix, budget=True, parity_check=False)
    assert ours == [first, second, last]
    assert len(set(ours)) == 3  # the control: they grow
    assert not any(hooks(trl_padfix, checkpointing=False, budget=True))


def test_one_process_does_not_tell_other_threads_to_skip_their_step(tmp_path):
    trainer, synced = make(trl_padfix, "SFT", tmp_path, budget=True, max_steps=1), []
    trainer.model.model.register_forward_pre_hook(lambda *args: synced.append(trainer.accelerator.sync_gradients))
    trainer.train()
    assert len(synced) > 1
    assert all(synced)
