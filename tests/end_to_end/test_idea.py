"""`docs/idea.py`: it runs, and computes what the engine computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from kit.tolerance import CONTROL, tolerance
from transformers import LlamaConfig, LlamaForCausalLM

from trl_padfix import remove_padding


PATH = Path(__file__).parents[2] / "docs" / "idea.py"


@pytest.fixture(scope="module")
def idea():
    spec = importlib.util.spec_from_file_location("idea", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(idea, weights, batch):
    """Log-probabilities, gradients and packed tokens of a Llama with these weights, computed by the package."""
    config = LlamaConfig(
        vocab_size=idea.VOCABULARY,
        hidden_size=idea.HIDDEN,
        intermediate_size=idea.MLP,
        num_hidden_layers=idea.LAYERS,
        num_attention_heads=idea.HEADS,
        num_key_value_heads=idea.KV_HEADS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).double()
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    ids_BL, mask_BL, completion_BL = batch
    with remove_padding(model, prefix_sharing=True) as removal:
        logits = model(input_ids=ids_BL, attention_mask=mask_BL).logits
        logps = idea.logps_of(logits, ids_BL, completion_BL)
        idea.dpo_loss(logps).backward()
        return (
            logps.detach(),
            {n: p.grad for n, p in model.named_parameters()},
            removal.stats.packed_tokens,
            logits.detach(),
        )


def off(got, exact) -> float:
    return float((got - exact).abs().max())


def test_it_prints_equal_results(idea, capsys):
    assert idea.main() == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["108", "89", "60"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_it_computes_what_the_engine_computes(idea, side):
    weights, batch = idea.new_weights(), idea.pairs()
    if side == "left":
        lengths = batch[1].sum(1).tolist()
        batch = tuple(torch.stack([row.roll(len(row) - n) for row, n in zip(x, lengths, strict=True)]) for x in batch)
    layout = idea.pack(*batch[:2], share=True)
    exact, exact_gradients, tokens, logits = engine(idea, weights, batch)
    logps, gradients, computed = idea.compute(weights, *batch, layout)
    assert computed == tokens < int(batch[1].sum())

    # transformers computes rotary angles and norms in float32.
    depth = 8 * idea.LAYERS
    allowed = tolerance(float(logits.abs().max()), terms=idea.MLP, depth=depth)
    # A segment border that is off by one: the first row loses its last query to the second.
    borders = layout.cu_seqlens_q.clone()
    borders[1] -= 1
    wrong, wrong_gradients, _ = idea.compute(weights, *batch, layout._replace(cu_seqlens_q=borders))
    assert off(logps, exact) <= allowed
    assert off(wrong, exact) > CONTROL * allowed
    assert gradients.keys() == exact_gradients.keys()
    ratios = {}
    for name, gradient in exact_gradients.items():
        bound = tolerance(float(gradient.abs().max()), terms=idea.MLP, depth=2 * depth)
        assert off(gradients[name], gradient) <= bound, name
        ratios[name] = off(wrong_gradients[name], gradient) / bound
    assert min(ratios.values()) > CONTROL, ratios
