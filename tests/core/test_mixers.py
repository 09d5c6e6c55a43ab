"""
Decoders whose layers one packed row cannot serve: each module that mixes tokens runs packed, forked or on rows.

The reference is each row computed alone, as in `test_families.py`; here rows are also longer than the chunks of scans,
layers are checkpointed, and handles removed before backward.
"""

from __future__ import annotations

import functools
import gc
import random
from collections import Counter
from typing import Any

import pytest
import torch
from kit.cells import MATRIX, by_turns
from kit.tolerance import assert_close, assert_gradients_close
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointError
from transformers.models.qwen3_5 import modeling_qwen3_5
from zoo import family_outcomes
from zoo.families import build, build_type
from zoo.family_outcomes import (
    LEAK,
    alone,
    batched,
    gradients_of,
    leaking_layouts,
    rows,
    stable_topk,
    trees_without_parents,
    weighted,
)

from trl_padfix import prefix_sharing_layout, remove_padding
from trl_padfix.core.call import calls
from trl_padfix.core.mixers import row_buckets
from trl_padfix.core.mixers.node_tree import NodeTree


KINDS = {
    "qwen3_5_text": {"forked": 1, "direct": 1},  # gated delta rule
    "mamba2": {"forked": 2},  # state-space scan with a state that carries gradients
    "jamba": {"forked": 1, "direct": 1},  # and one without
    "lfm2": {"forked": 1, "direct": 1},  # short convolution
    "bloom": {"rows": 2},  # ALiBi
    "glm_moe_dsa": {"rows": 2},  # indexer, whose choice the next layer uses too
    "stablelm": {"direct": 2},  # layers that do not hand keyword arguments down
    "zamba2": {"forked": 3, "direct": 2},  # layers in layers, checkpointed twice
}
OTHERS = ("kimi_linear", "nemotron_h", "deepseek_v4", "recurrent_gemma", "rwkv", "xlstm")
"""More at night; `-m families` computes every family."""
WAYS = ("plain", "checkpointed", "reentrant", "removed")


@pytest.fixture(autouse=True)
def _stable_choices():
    with stable_topk():
        yield


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def build_trained(family):
    """Without dropout; xLSTM has 32 blocks by default, and the tolerances are those of two layers."""
    return without_dropout(build_type(family, {"num_blocks": 2}) if family == "xlstm" else build(family))


@functools.cache
@torch.enable_grad()
def reference(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return alone(build_trained(family))


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def assert_exact(logps, gradients, expected) -> None:
    assert_close(logps.detach(), expected[0], terms=64, depth=24)
    assert_gradients_close(gradients, expected[1], terms=64, depth=48)


# The tree


def summed(chunks, initial, with_states, cu_seqlens):
    """A recurrence: the sum so far. In a block the values beyond the ends of nodes are zero."""
    (x,) = chunks
    if cu_seqlens is not None:
        nodes = x[0].split(cu_seqlens.diff().tolist())
        before = [0.0] * len(nodes) if initial is None else initial
        sums = [node.cumsum(0) + b for node, b in zip(nodes, before, strict=True)]
        return torch.cat(sums)[None], torch.stack([s[-1] for s in sums])
    sums = x.cumsum(1) + (0.0 if initial is None else initial[:, None])
    return sums, sums[:, -1]


@pytest.mark.parametrize("seed", range(3))
def test_each_token_of_a_tree_is_computed_once(seed):
    chance = random.Random(seed)
    rows = [[chance.randint(1, 2) for _ in range(chance.randint(4, 12))] for _ in range(12)]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    layout = prefix_sharing_layout(ids, (ids > 0).long())
    x = torch.randn(1, layout.packed_tokens, 1, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_()
    mask, weights = layout.dense_mask().float(), torch.linspace(-1, 1, layout.packed_tokens)[:, None]
    for is_varlen in (False, True):
        found = NodeTree(layout).scan(summed, [x], is_varlen=is_varlen)[0]
        assert_close(found, mask @ x[0], terms=12)
        assert_close(torch.autograd.grad(found, x, weights)[0][0], mask.T @ weights, terms=12)
        assert largest(found, mask.tril(-1) @ x[0]) > 1e-2  # the control: each token without itself


# Whole models


def test_each_mixer_runs_in_its_mode():
    for family, ways in KINDS.items():
        with remove_padding(build(family)) as handle:
            assert Counter(mixer.mode for mixer in handle.anatomy.mixers.mixers) == ways, family


@pytest.mark.parametrize(
    ("family", "how", "sharing"),
    [
        *by_turns([(family, WAYS[i % 4]) for i, family in enumerate(KINDS)], [False, True]),
        *(
            pytest.param(*cell, marks=MATRIX)
            for cell in by_turns([(f, WAYS[i % 4]) for i, f in enumerate(OTHERS)], [True])
        ),
    ],
)
def test_rows_computed_alone_give_the_same_numbers_in_training(family, sharing, how):
    model, expected = build_trained(family).train(), reference(family)
    if how != "plain":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
    if how == "reentrant":
        model.enable_input_require_grads()
    handle = remove_padding(model, prefix_sharing=sharing)
    logps = batched(model, "left")
    if how == "removed":
        handle.remove()
    gradients = gradients_of(model, weighted(logps))
    handle.remove()
    assert_exact(logps, gradients, expected)
    del logps
    gc.collect()
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


def checkpoint_around(model: nn.Module, kind: str, of: type[nn.Module]) -> None:
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl[kind])
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: isinstance(module, of))


# A mixer, or a layer whose decoder passes it no layout, is computed padded; other layers get the layout.
@pytest.mark.parametrize("kind", ["REENTRANT", "NO_REENTRANT"])
@pytest.mark.parametrize(
    ("family", "wrapped", "when", "is_padded"),
    [
        ("mamba", "mixer", "before", True),
        ("mamba", "", "after", True),
        ("rwkv", "feed_forward", "before", True),
        ("bloom", "", "before", True),
        ("stablelm", "self_attn", "before", True),
        ("recurrent_gemma", "", "before", False),
        ("mamba2", "mixer", "before", False),
    ],
)
def test_a_checkpoint_wrapper_of_a_user_leaves_gradients_exact(family, wrapped, when, is_padded, kind, monkeypatch):
    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
        model = build_trained(family).train()
        layer = next(blocks for blocks in model.modules() if isinstance(blocks, nn.ModuleList))[0]
        of = type(layer.get_submodule(wrapped))
        if when == "before":
            checkpoint_around(model, kind, of)
        handle = remove_padding(model)
        if when == "after":
            checkpoint_around(model, kind, of)
        logps = batched(model, "right")
        found = gradients_of(model, weighted(logps))
        return logps, {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in found.items()}, handle

    logps, gradients, handle = run()
    assert_exact(logps, gradients, reference(family))
    assert (handle.stats.padded_forwards, handle.stats.forwards) == ((1, 0) if is_padded else (0, 1))
    if is_padded:  # the control: packed in the forward, and not in the recomputation
        monkeypatch.setattr(calls, "checkpoint_state", lambda: ())
        with pytest.raises((AssertionError, CheckpointError, RuntimeError, TypeError)):
            assert_exact(*run()[:2], reference(family))


@pytest.mark.parametrize("outputs", [{"RwkvBlock": 3}, {}])
def test_a_decoder_that_unpacks_an_unknown_number_of_outputs_is_computed_padded(outputs, monkeypatch):
    monkeypatch.setattr(row_buckets, "OUTPUTS", outputs)
    model = build("rwkv")
    with torch.no_grad(), remove_padding(model) as handle:
        assert_close(batched(model, "right"), reference("rwkv")[0], terms=64, depth=24)
    assert (handle.stats.padded_forwards, handle.stats.forwards) == ((0, 1) if outputs else (1, 0))


FAULTS = [("lfm2", False, leaking_layouts), ("zamba2", True, leaking_layouts)]
FAULTS += [(family, True, trees_without_parents) for family in ("qwen3_5_text", "mamba2")]


@pytest.mark.parametrize(("family", "sharing", "fault"), FAULTS)
def test_a_leak_and_a_state_that_does_not_fork_would_be_seen(family, sharing, fault):
    model = build(family)
    with fault(), torch.no_grad(), remove_padding(model, prefix_sharing=sharing):
        assert largest(batched(model, "right"), reference(family)[0]) >= LEAK


# The decoder of BLOOM is not given positions, from which packed rows are recognised.
@pytest.mark.parametrize(("family", "sharing"), [("qwen3_5_text", True), ("mamba2", False), ("glm_moe_dsa", False)])
def test_sequences_that_arrive_packed_are_kept_apart(family, sharing):
    model, sequences = build(family), rows()
    positions = torch.cat([torch.arange(len(row)) for row in sequences])[None]
    with remove_padding(model, prefix_sharing=sharing) as handle:
        logits = model(torch.cat(sequences)[None], position_ids=positions, use_cache=False).logits[0].float()
        assert handle.stats.packed_tokens == family_outcomes.TOKENS[sharing]
    parts = zip(logits.split([len(row) for row in sequences]), sequences, strict=True)
    logps = torch.cat([part[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0] for part, row in parts])
    assert_exact(logps, gradients_of(model, weighted(logps)), reference(family))


def test_no_function_of_transformers_is_replaced_for_other_models():
    space = vars(modeling_qwen3_5)
    before = dict(space)
    model, other = build("qwen3_5_text"), build("qwen3_5_text")
    seen: list[Any] = []
    other.model.layers[0].linear_attn.register_forward_hook(lambda *a: seen.append(dict(space)))
    with torch.no_grad(), remove_padding(model):
        model.model.layers[0].linear_attn.norm.register_forward_hook(lambda *a: (other(rows()[0][None]), None)[1])
        batched(model, "left")
    assert seen
    assert all(inside == before for inside in seen)
