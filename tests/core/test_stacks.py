"""
The parity suite of a stack: what `nox` runs on every pair of versions that the package names.

Compact on purpose. The decoder in every mode against each row computed alone, memory, and a DPO run of five steps.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
import transformers
from kit.cells import by_turns, slow_but
from kit.observe import each_row_alone, entered_tokens
from kit.tolerance import assert_close, tolerance
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo.families import families
from zoo.family_outcomes import MODES, family_outcomes, leaking_layouts
from zoo.stack_models import CASES, ROWS, backward, build, logps, pad, relative_error

from trl_padfix import PaddingRemovalError, check_parity, remove_padding


pytestmark = [pytest.mark.stacks, pytest.mark.usefixtures("flash")]

REAL, DISTINCT = 29, 20  # tokens of `ROWS`


def scores_of(model):
    """Log-probabilities of a batch, as a caller that knows nothing of packing computes them."""
    return lambda ids, mask: logps(model(ids, attention_mask=mask).logits, ids, mask)


CELLS = by_turns(CASES, [True, False], [False, True])
"""All of them on older versions; on the newest `remove/test_numbers.py` has more, `test_mixers.py` of `HYBRIDS`."""


@pytest.mark.parametrize(("name", "implementation", "sharing", "checkpointing"), slow_but([], CELLS))
def test_packed_rows_equal_rows_alone(name, implementation, checkpointing, sharing):
    model = build(name, implementation).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for side in ("left", "right"):
        ids, mask = pad(ROWS, side)
        expected = each_row_alone(scores_of(model), ids, mask)
        expected_gradient = backward(model, expected)
        with remove_padding(model, prefix_sharing=sharing), entered_tokens(model) as entered:
            found = scores_of(model)(ids, mask)
            gradient = backward(model, found)
        # Before transformers 5, recomputation of a checkpointed layer runs its hooks again, on the same tokens.
        tokens = DISTINCT if sharing else REAL
        assert entered in ([tokens], [tokens] * (1 + checkpointing))
        assert_close(found.detach(), expected.detach(), terms=64, depth=16)
        assert relative_error(gradient, expected_gradient) < tolerance(1, terms=64, depth=32)


NOT_HANDED = {  # a layout: neither by their decoders to their layers nor, in older versions, by what checkpoints these
    "Mamba": {"state_size": 8},
    "XGLM": {"ffn_dim": 48, "attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0},
    "Bert": {
        "num_attention_heads": 4,
        "is_decoder": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}


@pytest.mark.parametrize(("name", "reentrant"), [("Mamba", False), ("XGLM", True), ("Bert", False)])
def test_layers_that_are_not_handed_the_layout_are_recomputed_with_it_or_padded(name, reentrant):
    shape = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**shape, **NOT_HANDED[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    ids, mask = pad(ROWS, "right")
    expected = each_row_alone(scores_of(model), ids, mask)
    expected_gradient = backward(model, expected)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with remove_padding(model) as handle:
        found = scores_of(model)(ids, mask)
        assert relative_error(backward(model, found), expected_gradient) < tolerance(1, terms=64, depth=32)
        assert_close(found.detach(), expected.detach(), terms=64, depth=16)
    stats = handle.stats
    assert stats.forwards + stats.padded_forwards == 1
    if stats.padded_forwards:  # before transformers 5.23
        assert Version(transformers.__version__) < Version("5.23")
        assert stats.packed_tokens == 0
        with remove_padding(model, strict=True), pytest.raises(PaddingRemovalError, match="checkpointed from outside"):
            scores_of(model)(ids, mask)
        gc.collect()  # in torch 2.6 the error keeps the hooks of the checkpoint that it has left


def test_negative_control_rows_that_see_each_other_fail():
    model = build()
    ids, mask = pad(ROWS, "right")
    expected = each_row_alone(scores_of(model), ids, mask)
    with leaking_layouts(), remove_padding(model), torch.no_grad():
        assert (scores_of(model)(ids, mask) - expected).abs().max() > 0.1
        assert not check_parity(model, {"input_ids": ids, "attention_mask": mask}).ok


class LargestSquare(TorchDispatchMode):
    """Notes the largest `n` such that an `(..., n, n)` tensor was made: the side of the largest mask or scores."""

    side = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dim() >= 2:
                self.side = max(self.side, min(x.shape[-2:]))
        return out


@pytest.mark.parametrize(("name", "implementation"), CASES[::4])
def test_memory_is_not_quadratic_in_the_packed_tokens(name, implementation):
    draw = random.Random(0)
    rows = [[draw.randrange(2, 38) for _ in range(n)] for n in (60, 50, 40, 45, 55, 58)]
    ids, mask = pad(rows, "left")
    model = build(name, implementation).train()
    with remove_padding(model), LargestSquare() as largest:
        model(ids, attention_mask=mask).logits.sum().backward()
    assert largest.side <= 96 < sum(map(len, rows))  # rows have up to 60 tokens; GPT-2 makes 96 features of each
    # What would have been seen: all rows as one, attended with a dense mask.
    packed = ids[mask.bool()][None]
    model = build(name, "eager", **{"n_positions" if name == "gpt2" else "max_position_embeddings": 512})
    with LargestSquare() as largest:
        model(packed)
    assert largest.side >= packed.shape[1]


def test_generation_and_a_second_model_are_left_alone():
    model, other = build("qwen2"), build("qwen2")
    ids, mask = pad(ROWS, "left")
    settings = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    expected = model.generate(ids, **settings)
    logits = other(ids, attention_mask=mask).logits
    before = set(vars(model.model)), vars(model.config).copy()
    for _ in range(3):
        with remove_padding(model):
            assert torch.equal(model.generate(ids, **settings), expected)
            model(ids, attention_mask=mask)
            assert torch.equal(other(ids, attention_mask=mask).logits, logits)
    assert (set(vars(model.model)), vars(model.config)) == before
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)


@pytest.mark.parametrize("implementation", slow_but(["flash_attention_2"], ["sdpa", "flash_attention_2"]))
def test_a_window_of_some_layers_is_what_the_version_makes_of_it(implementation):
    """transformers 4.52 gives it to all layers with `sdpa` and `eager`; FlashAttention and later versions do not."""
    model = build("qwen2", implementation, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ids, mask = pad(ROWS, "right")
    with remove_padding(model, prefix_sharing=True):
        found = scores_of(model)(ids, mask)
    expected = each_row_alone(scores_of(model), ids, mask)
    assert_close(found.detach(), expected.detach(), terms=64, depth=16)


HYBRIDS = {
    "mamba": "exact",
    "bamba": "exact",
    "bloom": "exact",
    "lfm2": "exact",
    "qwen3_next": "exact",
    "llama4_text": "exact",
    "ministral3": "exact",
    "recurrent_gemma": "exact" if Version(transformers.__version__) >= Version("5.10") else "refused",
}


@pytest.mark.parametrize(("family", "expected"), slow_but([], HYBRIDS.items()))
def test_layers_that_one_packed_row_cannot_serve_are_exact_or_refused(family, expected):
    if family not in families():
        pytest.skip("not in this version of transformers")
    outcomes = family_outcomes(family)
    if "not_built" in outcomes:
        pytest.skip(outcomes["not_built"])
    assert [outcomes[mode]["outcome"] for mode in MODES] == [expected] * 2, outcomes
