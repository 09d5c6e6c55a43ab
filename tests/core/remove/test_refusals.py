"""What cannot be packed exactly is refused, with the reason."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook
from kit.cells import slow_but
from kit.tolerance import assert_close, assert_gradients_close, rounding
from simulated_gpu.simulated_cuda import to_simulated
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
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from zoo.families import build as build_family
from zoo.families import build_type
from zoo.family_outcomes import leaking_layouts
from zoo.gpu_models import build as build_for_gpu
from zoo.model_numbers import DISTINCT, REAL, TINY, gradients
from zoo.models import batch, build, inputs, real_logps

from trl_padfix import PaddingRemovalError, check_parity, remove_padding, split_rows
from trl_padfix.core import refusals, remove
from trl_padfix.core.anatomy import find_decoder
from trl_padfix.core.model.patching import patches_on
from trl_padfix.core.probes import change_of_earlier_states


def test_a_mask_that_cannot_be_read_is_refused_by_a_strict_handle():
    model, ids = build("qwen2"), torch.tensor([[5, 6, 7, 8], [5, 6, 9, 3]])
    with remove_padding(model, strict=True), pytest.raises(PaddingRemovalError, match="mask of dict"):
        model(ids, attention_mask={"full_attention": None})


def test_it_takes_exactly_one_model():
    two = torch.nn.ModuleList([build("gpt2"), build("qwen2")])
    for model, message in (
        ("gpt2", "`model` must be a `Module`, got `str`"),
        (torch.nn.Linear(1, 1), "`Linear` contains none"),
        (two, "contains GPT2LMHeadModel, Qwen2ForCausalLM. If there are several, attach to each"),
    ):
        with pytest.raises(TypeError, match=message):
            remove_padding(model)
        with pytest.raises(TypeError, match=message):
            check_parity(model, {"input_ids": torch.tensor([[5, 6]])})
    with pytest.raises(TypeError, match="`handle` must be a `PaddingRemoval`, got `ModuleList`"):
        split_rows(two)


def test_models_that_share_a_decoder_are_packed_by_it():
    actor, critic = build("qwen2"), build("qwen2", auto=transformers.AutoModelForTokenClassification, num_labels=1)
    critic.model = actor.model
    ids, mask = batch("left")
    call = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        expected = [model(**call).logits for model in (actor, critic)]
        with remove_padding(actor.model) as handle:
            found = [model(**call).logits for model in (actor, critic)]
    for a, b in zip(found, expected, strict=True):
        assert_close(a[mask.bool()], b[mask.bool()], terms=64, depth=24)
    assert handle.stats.forwards == 2


NOT_EXACT = [
    (
        "T5ForSequenceClassification",
        {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
        | {"is_encoder_decoder": False},
        "it is an encoder-decoder model",
    ),
    (
        "T5EncoderModel",
        {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
        "uses bidirectional or cross-attention|it is an encoder-decoder model",
    ),
    (
        "BertForMaskedLM",
        {k: v for k, v in TINY.items() if k != "num_key_value_heads"},
        r"layer `encoder.layer.0.attention` \(BertAttention\) uses bidirectional or cross-attention",
    ),
    ("Qwen2ForCausalLM", TINY | {"attn_implementation": "flex_attention"}, "`flex_attention`.*'sdpa'"),
]


def test_models_without_an_exact_packed_forward_are_refused():
    for model, config, message in NOT_EXACT:
        cls = getattr(transformers, model)
        network = cls(cls.config_class(**config))
        with pytest.raises(PaddingRemovalError, match=rf"Padding cannot be removed from {model}: .*{message}"):
            remove_padding(network)
        assert not any("forward" in vars(module) for module in network.modules())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}, "a cache"),
        ("LoraConfig", {"target_modules": ["q_proj"], "alora_invocation_tokens": [1, 2]}, "padded row"),
        ("LilyConfig", {"target_modules": ["q_proj"]}, "padding included"),
    ],
)
def test_adapters_that_look_at_more_than_a_token_are_refused(name, settings, message):
    config = vars(peft).get(name)
    if config is None or not settings.keys() <= inspect.signature(config).parameters.keys():
        pytest.skip("this PEFT has no such adapter")
    with pytest.raises(PaddingRemovalError, match=f"{name} .*{message}"):
        remove_padding(peft.get_peft_model(build("qwen2"), config(task_type="CAUSAL_LM", **settings)))


@pytest.mark.parametrize(
    ("config", "name", "sharing"),
    [
        (peft.PromptTuningConfig, "qwen2", True),
        (peft.PromptTuningConfig, "gpt2", False),
        (peft.PromptEncoderConfig, "qwen2", True),
    ],
)
def test_virtual_tokens_are_packed(config, name, sharing):
    settings = {"encoder_hidden_size": 16} if config is peft.PromptEncoderConfig else {}
    torch.manual_seed(0)
    model = peft.get_peft_model(build(name), config(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)).eval()
    found: dict[bool, Any] = {}
    for side in ("left", "right"):
        ids, mask = batch(side)
        for packed in (False, True):
            with remove_padding(model, prefix_sharing=sharing) as handle:
                with nullcontext() if packed else handle.disabled():
                    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, 3:]
                # Virtual tokens are a prefix of all rows. Left padding is behind them, so that rows part there.
                shared = {"right": DISTINCT + 3, "left": handle.stats.packed_tokens}[side]
                tokens = shared if sharing else REAL + 3 * len(mask)
                assert handle.stats.packed_tokens == (tokens if packed else 0)
                assert handle.stats.padded_forwards == 0
            scores = real_logps(logits, ids, mask)
            model.zero_grad(set_to_none=True)
            scores.sum().backward()
            found[packed] = scores.detach(), gradients(model)
        assert_close(found[True][0], found[False][0], terms=64, depth=24)
        assert len(found[True][1]) > 0
        assert_gradients_close(found[True][1], found[False][1], terms=64, depth=48)
        report = check_parity(model, {"input_ids": ids, "attention_mask": mask}, prefix_sharing=sharing)
        assert report.ok
        assert report.compared
        with leaking_layouts():
            wrong = check_parity(model, {"input_ids": ids, "attention_mask": mask}, prefix_sharing=sharing)
            assert not wrong.ok
        assert {p.dtype for p in model.parameters()} == {torch.float32}  # rows alone were computed in float64


def test_an_attention_that_was_changed_after_attachment_is_refused():
    ids, mask = batch("mixed")
    model = build("qwen2")
    remove_padding(model)
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(PaddingRemovalError, match="flex_attention"):
        model(ids, attention_mask=mask)


# -- layers on several devices


def test_layers_on_several_devices_are_refused(gpu):
    model = build_for_gpu()
    to_simulated(model.model.layers[1])
    with pytest.raises(PaddingRemovalError, match=r"several devices \(cpu, cuda:0\).*without `device_map`"):
        remove_padding(model)
    remove_padding(to_simulated(model)).remove()


def test_copies_that_share_a_decoder_are_refused():
    with pytest.raises(PaddingRemovalError, match="one process per GPU"):
        remove_padding(nn.DataParallel(build_for_gpu()))


def test_layers_that_are_sent_to_several_gpus_are_refused():
    model = build_for_gpu()
    for index, layer in enumerate(model.model.layers):
        layer._hf_hook = AlignDevicesHook(execution_device=index)
    with pytest.raises(PaddingRemovalError, match="cuda:0, cuda:1"):
        remove_padding(model)


# -- A model whose tokens see later ones is refused, whichever setting makes it so; with the setting turned it is taken
#
# A type of each attention with a causal switch is built in both positions. Whether it is causal is found out here in
# another way than in the package: the first tokens of a row alone are to have the logits that they have in the whole
# row.

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
            assert change_of_earlier_states(find_decoder(build_family(family).to(dtype))) == 0, family


def test_what_cannot_be_run_is_not_tried():
    with torch.device("meta"):
        assert change_of_earlier_states(XLMWithLMHeadModel(XLMConfig(emb_dim=32, n_layers=1)).transformer) == 0
    model = build_type("layoutlm", {}, auto=AutoModel)
    model.forward = lambda *args, **kwargs: 1 / 0
    assert change_of_earlier_states(model) == 0


class Shift(torch.nn.Module):
    """A module of a user's that adds half of the token before, and takes no mask."""

    def __init__(self, inner, past=0.5):
        super().__init__()
        self.inner, self.past = inner, past

    def forward(self, states, **kwargs):
        before = torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
        return self.inner(states + self.past * before)


class Mean(Shift):
    """It adds a share of the mean over all tokens that it receives."""

    def forward(self, states, **kwargs):
        return self.inner(states + self.past * states.mean(1, keepdim=True))


class BothWays(Qwen2Attention):
    """Attention to all tokens of the row, in disguise."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        states, weights = super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        return states + hidden_states.flip(1), weights


class Nameless(Qwen2Attention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs)


class ShiftOnRows(Shift):
    def forward(self, states, attention_mask=None, **kwargs):
        return super().forward(states)


def test_a_module_that_mixes_tokens_in_disguise_is_refused(monkeypatch):
    def shifted(kind, past):
        model = build("qwen2")
        model.model.layers[1].mlp = kind(model.model.layers[1].mlp, past)
        return model

    arguments = inputs()
    real = arguments["attention_mask"].bool()
    for kind, past in ((Shift, 0.0), (ShiftOnRows, 0.5)):
        model = shifted(kind, past)
        expected = model(**arguments).logits[real]
        with remove_padding(model) as handle:
            found = model(**arguments).logits[real]
            assert handle.stats.packed_tokens == real.sum()
        assert_close(found, expected, terms=64, depth=16)
    for kind, past in ((Mean, 0.1), (Shift, 0.02), (Shift, 0.5)):
        model = shifted(kind, past)
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(PaddingRemovalError, match=r"row in front of it\. .* these: Shift\.|see later ones"):
                remove_padding(model.to(dtype))
    assert not patches_on(find_decoder(model))
    monkeypatch.setattr(remove, "change_beside_another_row", lambda handle: (0.0, []))
    with remove_padding(model.float()):
        leaked = model(**arguments).logits[real]
    assert_close(leaked, leaked, terms=64, depth=16, control=model(**arguments).logits[real])


@pytest.mark.parametrize(
    ("kind", "message"),
    [(BothWays, "another last token moves"), (Nameless, "name .* `attention_mask` of `Qwen2Att.* Or leave")],
)
def test_attention_of_a_users_own_is_refused_where_it_cannot_be_packed(kind, message):
    model = build("qwen2")
    model.model.layers[1].self_attn.__class__ = kind
    with pytest.raises(PaddingRemovalError, match=message):
        remove_padding(model, prefix_sharing=True)
