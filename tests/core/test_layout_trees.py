"""Trees in the form of TRL's asynchronous GRPO: the numbers of rows alone, distinct tokens computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.cells import by_turns, slow_but
from kit.rollouts import build_samples, distinct_tokens, loss_of_rows, sampled_by, tree_call, tree_loss, tree_row
from kit.tolerance import tolerance
from trl.trainer.utils import add_fused_lm_head
from zoo.families import build as build_family
from zoo.model_numbers import gradients
from zoo.models import build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core.layout.build import tree_layout


FAMILIES = ["gemma3_text", "gpt_oss", "qwen3_5_text", "bamba", "lfm2", "mamba2"]
"""Windows, sinks with experts, gated delta nets, Mamba 2 beside attention and alone, short convolutions."""

LOSS, GRADIENTS = (tolerance(1, terms=64, depth=depth) for depth in (24, 48))
"""Relative to a value, and to the norm of all gradients."""


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative difference of all gradients."""
    assert a.keys() == b.keys()
    a_flat, b_flat = (torch.cat([x[name].flatten() for name in sorted(x)]) for x in (a, b))
    return ((a_flat - b_flat).norm() / b_flat.norm()).item()


def numbers(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.item(), gradients(model)


def policy(family: str) -> Any:
    model = build("qwen2") if family == "qwen2" else build_family(family)
    if family.startswith("qwen3_"):
        # The zoo's sharp gates amplify rounding: there transformers' own left padding moves the gradients of rows
        # alone by 1e-4. With these weights it moves them by 4e-6, and a tree by as much.
        torch.manual_seed(0)
        for weight in (p for p in model.parameters() if p.dim() > 1):
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() == 2 else 0.5)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.train()


@pytest.mark.parametrize(
    ("family", "checkpointing"), slow_but([("qwen2", True)], [("qwen2", True), *by_turns(FAMILIES, [False, True])])
)
def test_a_tree_has_the_loss_and_gradients_of_rows_alone(family, checkpointing):
    model = policy(family)
    samples = sampled_by(model, build_samples())
    expected, by_rows = numbers(model, loss_of_rows(model, samples))
    other = [dict(sample, input_ids=sample["input_ids"].copy()) for sample in samples]
    other[1]["input_ids"][12] ^= 1  # a token of a prompt
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for fused in (True, False):
        with remove_padding(model, prefix_sharing=True) as handle:
            loss, by_tree = numbers(model, tree_loss(model, samples, fused))
            assert handle.stats.packed_tokens == distinct_tokens(samples) < len(tree_row(samples)["input_ids"])
            _, by_others = numbers(model, tree_loss(model, other, fused))
        assert abs(loss - expected) <= LOSS * abs(expected)
        assert difference(by_tree, by_rows) <= GRADIENTS
        assert difference(by_others, by_rows) > 1e-3


def test_without_prefix_sharing_every_token_of_the_tree_is_computed():
    model, samples = policy("qwen2"), build_samples()
    expected, _ = numbers(model, loss_of_rows(model, samples))
    with remove_padding(model) as handle:
        loss, _ = numbers(model, tree_loss(model, samples))
    assert handle.stats.packed_tokens == len(tree_row(samples)["input_ids"]) > distinct_tokens(samples)
    assert loss == pytest.approx(expected, rel=LOSS)


@pytest.mark.parametrize("family", ["qwen2", "mamba2"])
def test_a_row_of_one_sample_is_computed_as_it_is(family):
    model, samples = policy(family), build_samples(groups=1, generations=1)
    expected, _ = numbers(model, loss_of_rows(model, samples))
    with remove_padding(model, prefix_sharing=True) as handle:
        assert tree_loss(model, samples, fused=False).item() == pytest.approx(expected, rel=LOSS)
    assert handle.stats.forwards == 1


# -- what describes no tree, or more than a tree


@pytest.mark.parametrize(("family", "name"), [("qwen2", "tree_block_mask"), ("mamba2", "tree_enter")])
def test_an_unknown_tree_argument_is_an_error_with_its_name(family, name):
    model = policy(family)
    with remove_padding(model, prefix_sharing=True), pytest.raises(PaddingRemovalError, match=name):
        tree_loss(model, build_samples(), fused=False, **{name: torch.ones(3)})


NOT_COMPUTED = [
    ({"tree_cu_seqlens_q": None}, "is not a tree"),
    ({"tree_kv_index": None}, "is not a tree"),
    ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "with an attention mask"),
    ({"use_cache": True}, "use_cache"),
    ({"input_ids": torch.ones(2, 9, dtype=torch.long)}, "a tree is one row, the batch has 2"),
]


def test_a_tree_that_cannot_be_computed_is_an_error():
    call = tree_call(tree_row(build_samples()))
    with remove_padding(model := policy("qwen2"), prefix_sharing=True):
        for changes, message in NOT_COMPUTED:
            with pytest.raises(PaddingRemovalError, match=message):
                model(**call | changes)


TREE = {  # 0-1, then 2 and 3-4 behind it
    "tree_cu_seqlens_q": torch.tensor([0, 2, 3, 5]),
    "tree_cu_seqlens_k": torch.tensor([0, 2, 5, 9]),
    "tree_kv_index": torch.tensor([0, 1, 0, 1, 2, 0, 1, 3, 4]),
}


NO_TREE = [
    ({"tree_cu_seqlens_q": [0, 2, 3, 6]}, "ascend from 0 to 5"),
    ({"tree_cu_seqlens_q": [0, 2, 3, 5, -1]}, "Padding of a collator"),
    ({"tree_cu_seqlens_k": [0, 2, 4, 9]}, "does not end with the tokens of its segment"),
    ({"tree_kv_index": [0, 1, 0, 1, 2, 0, 1, 4, 3]}, "does not end with the tokens of its segment"),
    ({"tree_kv_index": [0, 1, 1, 0, 2, 0, 1, 3, 4]}, "do not form a tree"),
    ({"tree_kv_index": [0, 1, 0, 1, 2, 0, 9, 3, 4]}, "do not form a tree"),
]


def test_arguments_that_describe_no_tree_are_an_error():
    for changes, message in NO_TREE:
        with pytest.raises(ValueError, match=message):
            tree_layout(TREE | {name: torch.tensor(value) for name, value in changes.items()}, 5)
