"""
A model whose tokens see later ones is refused, whichever setting makes it so; with the setting turned it is taken.

A type of each attention with a causal switch is built in both positions. Whether it is causal is found out here in
another way than in the package: the first tokens of a row alone are to have the logits that they have in the whole
row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.cells import slow_but
from kit.tolerance import rounding
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.models.auto import modeling_auto
from zoo.families import build, build_type

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core import refusals
from trl_padfix.core.model.find import find_decoder
from trl_padfix.core.refusals import change_of_earlier_states


AUTO = [
    (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    (AutoModel, modeling_auto.MODEL_MAPPING_NAMES),
]
IS_DECODER = {"is_decoder": (False, True)}
SWITCHES = {
    "xlm": {"causal": (False, True)},
    "gemma3_text": {"use_bidirectional_attention": (False, True)},
    "bert": IS_DECODER,
    "roformer": IS_DECODER,
    # Attention of their own; other types have that of one of these.
    **dict.fromkeys(("bart", "big_bird", "bigbird_pegasus", "convbert", "gpt_neox", "prophetnet"), IS_DECODER),
    **dict.fromkeys(("rembert", "tapas", "trocr", "xmod"), IS_DECODER),
    "gemma4_text": {"use_bidirectional_attention": ("all", None)},  # whose masks depend on images too
    "xlnet": {"attn_type": ("bi", "uni")},
}
"""The setting of a type by which its tokens see later ones or do not, with both values."""
ENCODERS = ["deberta", "layoutlm", "yoso", "longformer", "squeezebert"]
"""Types without a switch, and with nothing in their attention that says that it is not causal."""


def auto_class(model_type: str) -> Any:
    return next((auto for auto, names in AUTO if model_type in names), None)


def is_causal(model: PreTrainedModel) -> bool:
    model.config.use_cache = False
    ids = torch.randint(3, 59, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole, first = (model(x)[0] for x in (ids, ids[:, :8]))
    return bool((whole[:, :8] - first).abs().max() <= rounding(whole))


def refused(model: nn.Module) -> str:
    try:
        remove_padding(model, prefix_sharing="auto").remove()
    except PaddingRemovalError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model_type", slow_but([*SWITCHES][:4], SWITCHES))
def test_a_causal_switch_is_heeded_in_both_positions(model_type):
    ((name, values),) = SWITCHES[model_type].items()
    for value in values:
        model = build_type(model_type, {name: value}, auto=auto_class(model_type))
        reason = refused(model)
        if is_causal(model):
            assert "see later ones" not in reason
        else:
            assert reason
            assert model_type != "xlm" or "`config.causal=False` lets its tokens see later ones" in reason


@pytest.mark.parametrize("model_type", slow_but(ENCODERS[:3], ENCODERS))
def test_encoders_without_a_switch_are_refused(model_type, monkeypatch):
    model = build_type(model_type, {}, auto=auto_class(model_type))
    assert not is_causal(model)
    assert "another last token moves the states before it" in refused(model)
    monkeypatch.setattr(refusals, "change_of_earlier_states", lambda decoder: 0.0)
    assert not refused(model), "negative control: nothing but the forward tells"


def test_trying_leaves_mode_gradients_and_random_state_as_they_are():
    model = build_type("xlm", {"causal": False}).bfloat16()
    model.train()
    model.transformer.layer_norm_emb.eval()
    before, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    assert change_of_earlier_states(find_decoder(model)) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_nothing_changes_in_causal_decoders():
    for family in ("gpt_neox", "mamba", "rwkv", "roberta", "dbrx"):
        for dtype in (torch.float32, torch.bfloat16):
            assert change_of_earlier_states(find_decoder(build(family).to(dtype))) == 0, family


def test_what_cannot_be_run_is_not_tried():
    with torch.device("meta"):
        assert change_of_earlier_states(XLMWithLMHeadModel(XLMConfig(emb_dim=32, n_layers=1)).transformer) == 0
    model = build_type("layoutlm", {}, auto=AutoModel)
    model.forward = lambda *args, **kwargs: 1 / 0
    assert change_of_earlier_states(model) == 0
