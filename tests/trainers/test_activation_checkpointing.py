"""`activation_checkpointing_kwargs` in our trainers, and the faults of TRL that docs/upstream.md shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import budget_runs
from kit.cells import slow_but
from kit.methods import METHODS
from kit.trainer_runs import assert_same, figures
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_padfix.core.attention import operators
from trl_padfix.core.attention.operators import attend_segments, attention_operators
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.trainers.activation_checkpointing import METHOD


pytestmark = pytest.mark.skipif(
    not hasattr(TrainingArguments, "activation_checkpointing"), reason="later versions of transformers have it"
)
selective = pytest.importorskip("trl.models.selective_activation_checkpointing")

UPSTREAM = Path(__file__).parents[2] / "docs/upstream.md"
WAYS = {
    "every other layer": {"every_n_layers": 2},
    "offloaded": {"offload": True},
    "selective": {"selective": True},
    "all three": {"every_n_layers": 2, "offload": True, "selective": True},
}
CASES = {"DPO": "short", "SFT": "completions only", "Reward": "plain", "KTO": "apo_zero_unpaired"}
CASES |= {"GRPO": "plain", "RLOO": "plain"}


def layers_of(model: torch.nn.Module) -> list[bool]:
    """Whether each layer of a model is checkpointed."""
    return [m.gradient_checkpointing for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@pytest.fixture(autouse=True)
def offloads(monkeypatch, request):
    """Offload as to a host beside an accelerator, without pages that cannot be moved, which a CPU alone has not."""
    if "offload" in str(WAYS.get(getattr(request.node, "callspec", None) and request.node.callspec.params.get("way"))):
        import transformers.modeling_utils as modeling

        save, saved = modeling.save_on_cpu, []
        unpinned = lambda **how: saved.append(1) or save(pin_memory=False)  # noqa: E731
        monkeypatch.setattr(modeling, "save_on_cpu", unpinned)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        yield
        assert saved
    else:
        yield


@pytest.mark.parametrize(
    ("name", "way"),
    slow_but(
        [("DPO", "every other layer"), ("DPO", "all three"), ("SFT", "selective")],
        [(name, way) for name in CASES for way in WAYS if name in METHODS],
    ),
)
@pytest.mark.parametrize("mode", [0, 1])
def test_a_checkpointed_run_is_trls_without_checkpoints(name, way, mode, makers):
    make = makers(name)
    method, case = make.method, CASES[name]
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": WAYS[way]}
    ours, theirs = make.train(case, **method.modes[method.packed_modes[mode]], **given), make.theirs(case)
    metrics = [m for m in method.metrics if any(m in log for log in theirs.logs)]
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics), method.atol.get(case, 1e-6))
    every_n = WAYS[way].get("every_n_layers", 1)
    flags = layers_of(ours.trainer.model)
    assert flags == [i % every_n == 0 for i in range(len(flags))]
    stats = ours.trainer.padding.stats
    assert 0 < stats.packed_tokens < stats.padded_tokens
    ours.trainer.restore_padding()
    if name != "SFT":  # TRL's own wrapper stays there
        assert METHOD not in vars(ours.trainer.model)


@pytest.mark.parametrize("way", slow_but(["all three"], WAYS))
def test_a_step_that_shares_prefixes_is_checkpointed(way, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MIN_SAVED_TOKENS", 1)
    given = {"train_dataset": budget_runs.build_branching("dpo", prompts=3), "max_steps": 4}
    theirs = budget_runs.make("dpo", tmp_path, ours=False, **given)
    theirs.train()
    budget = {"max_tokens_per_batch": 64, "packed_multiple_of": 16, "prefix_sharing": True, "parity_check": False}
    checkpoints = {"activation_checkpointing": True, "activation_checkpointing_kwargs": WAYS[way]}
    ours = budget_runs.make("dpo", tmp_path, ours=True, **given | budget | checkpoints)
    ours.train()
    budget_runs.assert_same(*(figures(trainer.state.log_history) for trainer in (ours, theirs)))
    assert ours.padding.stats.packed_tokens < ours.padding.stats.real_tokens


def test_without_an_accelerator_nothing_is_offloaded(makers):
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": WAYS["offloaded"], "max_steps": 1}
    trainer = makers("DPO")(config=given, padding_free=True, eval_dataset=None)
    trainer.train()
    assert all(layers_of(trainer.model))


# -- what is computed again


class Operators(TorchDispatchMode):
    """Counts the operators that are computed; those whose outputs selective checkpointing kept are not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_the_operators_of_packed_attention_are_kept():
    policy = selective._build_policy_fn(selective._aten_attention_ops() | attention_operators())
    for operator in attention_operators():
        assert policy(None, operator) is CheckpointPolicy.MUST_SAVE
    assert torch.ops.torch_attn._varlen_attn.default in attention_operators()
    assert attend_segments._opoverload in attention_operators()


def test_selective_checkpointing_computes_no_attention_again(makers):
    make, counts = makers("DPO"), {}
    for way, kwargs in {"full": {}, "selective": {"selective": True}}.items():
        given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs, "max_steps": 1}
        trainer = make(config=given, padding_free=True, parity_check=False, eval_dataset=None)
        with Operators() as computed:
            trainer.train()
        attention = selective._aten_attention_ops() | attention_operators()
        counts[way] = sum(computed.counts[op] for op in attention), computed.counts[torch.ops.aten.silu.default]
    (full, gates), (kept, gates_again) = counts["full"], counts["selective"]
    # Policy and reference compute each segment of each layer once, and full checkpoints those of the policy again.
    assert full == 1.5 * kept > 0
    assert gates == gates_again > 0


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("selects", [False, True])
def test_compiled_layers_compute_their_operator_once(selects, makers, monkeypatch):
    kwargs = {"selective": True} if selects else {}
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs, "max_steps": 1}
    given |= {"torch_compile": True, "torch_compile_backend": "aot_eager", "padding_free": True, "parity_check": False}
    torch._dynamo.reset()
    trainer, calls, blocks = makers("DPO")(config=given, eval_dataset=None), [], operators._blocks
    # Compiled code runs in no mode that could count: both operators begin with a call of this function.
    monkeypatch.setattr(operators, "_blocks", lambda *args: calls.append(1) or blocks(*args))
    trainer.train()
    torch._dynamo.reset()
    # Of policy and reference, in backward, and without a selection of the policy again.
    assert len(calls) == trainer.model.config.num_hidden_layers * (3 if selects else 4)


# -- what is TRL's


def scripts() -> Iterator[str]:
    return iter(re.findall(r"```python\n(.+?)```", UPSTREAM.read_text(), re.DOTALL))


def test_every_n_layers_still_stops_trls_dpo_at_its_second_step(tmp_path, monkeypatch):
    """If this fails, TRL has mended it: drop `_enable` in `activation_checkpointing.py` and the entry of the page."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    with pytest.raises(ValueError, match="every_n_layers"):
        exec(next(script for script in scripts() if "every_n_layers" in script), space)
    assert space["trainer"].state.global_step == 1


def test_trls_list_of_operators_still_misses_variable_length_attention():
    """If this fails, TRL has mended it: drop `torch_attn` in `attention_operators`, and the entry of the page."""
    space: dict[str, Any] = {}
    with pytest.raises(AssertionError):
        exec(next(script for script in scripts() if "_varlen_attn" in script), space)
