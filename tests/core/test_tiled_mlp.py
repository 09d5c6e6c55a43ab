"""MLPs in tiles: the numbers of rows computed alone, fewer states held, and what cannot be tiled."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from kit.methods import make_trainer
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from zoo.families import build
from zoo.family_outcomes import LEAK, alone, batched, gradient_difference, gradients_of, padded, weighted

import trl_padfix
from trl_padfix import PaddingRemovalError, remove_padding, tile_mlps
from trl_padfix.core import tiled_mlp
from trl_padfix.core.attention.compiled import compile_layers
from trl_padfix.core.model.patching import ForwardPatch
from trl_padfix.core.tiled_mlp import TiledMLPPatch


TILE = 5
FAMILIES = ["qwen2", "gemma3_text", "gpt2", "qwen3_5_text", "lfm2", "phi3"]


def largest(a, b):
    return (a - b).abs().max().item()


def tiles_of(handle):
    return [patch for patch in handle._patches if isinstance(patch, TiledMLPPatch)]


@pytest.fixture
def sizes(monkeypatch):
    """Tokens of each tile that an MLP computed."""
    found: list[int] = []
    wrapped = TiledMLPPatch.wrapped.fget

    def recorded(self):
        def forward(states):
            found.append(states.shape[-2])
            return wrapped(self)(states)

        return forward

    monkeypatch.setattr(TiledMLPPatch, "wrapped", property(recorded))
    return found


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("how", ["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_give_the_numbers_of_rows_computed_alone(family, how, sharing, sizes):
    model = build(family).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = alone(model)
    if how != "plain":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    with remove_padding(model, prefix_sharing=sharing) as handle:
        tile_mlps(handle, TILE)
        logps = batched(model, "left")
        gradients = gradients_of(model, weighted(logps))
        assert len(tiles_of(handle)) == len(handle.mixers.layers)
    assert largest(logps.detach(), expected[0]) <= 1e-4
    assert gradient_difference(gradients, expected[1]) <= 1e-4
    assert set(sizes) == {TILE, handle.stats.packed_tokens % TILE}
    del logps
    gc.collect()
    assert not any("forward" in vars(module) for module in model.modules())


def test_tiles_in_another_order_would_be_seen(monkeypatch):
    model = build("qwen2")
    expected = alone(model)
    swapped = SimpleNamespace(
        cat=lambda tiles, dim: torch.cat([*tiles[1:], tiles[0]], dim), is_grad_enabled=torch.is_grad_enabled
    )
    with torch.no_grad(), remove_padding(model) as handle:
        tile_mlps(handle, TILE)
        monkeypatch.setattr(tiled_mlp, "torch", swapped)
        assert largest(batched(model, "left"), expected[0]) >= LEAK


def test_adapters_get_the_same_gradients():
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(build("qwen2"), settings).eval()
    expected = alone(model)
    with remove_padding(model) as handle:
        tile_mlps(handle, TILE)
        logps = batched(model, "right")
        assert gradient_difference(gradients_of(model, weighted(logps)), expected[1]) <= 1e-4


def test_a_row_of_one_tile_is_computed_whole(sizes):
    model, (ids, mask) = build("qwen2"), padded("right")
    with remove_padding(model) as handle:
        tile_mlps(handle, TILE)
        model(ids[:1, :TILE], attention_mask=mask[:1, :TILE], use_cache=False)
    assert set(sizes) == {TILE}


class Peak(TorchDispatchMode):
    """The most bytes that live tensors had, of those that were made within the mode."""

    def __init__(self):
        super().__init__()
        self.live, self.sizes, self.most = 0, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return out

    def add(self, storage):
        key = storage.data_ptr()
        if key in self.sizes or not storage.nbytes():
            return
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.drop, key).atexit = False

    def drop(self, key):
        self.live -= self.sizes.pop(key)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_tiles_bound_what_an_mlp_holds(is_checkpointed):
    """The peak of a step with a wide MLP over one long row, by the storages that are alive."""
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model, ids = Qwen2ForCausalLM(config).train(), torch.randint(1, 64, (2, 256))
    if is_checkpointed:
        model.gradient_checkpointing_enable()

    def peak(tile):
        with remove_padding(model) as handle:
            if tile:
                tile_mlps(handle, tile)
            with Peak() as found:
                model(ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
        return found.most

    peak(None)  # gradients are there in the others
    state = 512 * 1024 * 4  # bytes of one intermediate state of the row
    assert peak(None) - peak(32) > (2 if is_checkpointed else 6) * state


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_experts_are_not_tiled(family):
    with remove_padding(build(family)) as handle, pytest.raises(PaddingRemovalError, match="experts behind a router"):
        tile_mlps(handle, TILE)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_hook_that_appears_within_an_mlp_gets_whole_rows(rows):
    """It is computed padded from there on; in tiles its mean would be another."""

    def subtract_mean(module, args, output):
        return output - output.mean(1, keepdim=True)

    model, (ids, mask) = build("qwen2").eval(), padded("right")
    call = {"input_ids": ids[:rows], "attention_mask": mask[:rows], "use_cache": False}
    with torch.no_grad(), remove_padding(model) as handle:
        tile_mlps(handle, TILE)
        model(**call)
        hook = model.model.layers[0].mlp.down_proj.register_forward_hook(subtract_mean)
        found = model(**call).logits
        handle.remove()
        expected = model(**call).logits
        hook.remove()
        without = model(**call).logits
    real = mask[:rows].bool()
    assert largest(found[real], expected[real]) <= 1e-5
    assert largest(found[real], without[real]) > 1e-2


class _Mean(nn.Module):
    """An MLP that is not token-wise: it subtracts the mean over all tokens."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, states):
        return self.mlp(states - states.mean(1, keepdim=True))


def test_an_mlp_that_mixes_tokens_is_refused():
    model = build("qwen2")
    for layer in model.model.layers:
        layer.mlp = _Mean(layer.mlp)
    with remove_padding(model) as handle:
        with pytest.raises(
            PaddingRemovalError, match=r"`layers\.0\.mlp` \(_Mean\) does not compute each token by its"
        ):
            tile_mlps(handle, TILE)
        assert tiles_of(handle) == []


@pytest.mark.parametrize("tokens", [0, -1, True, 2.0, "8"])
def test_a_tile_is_a_positive_number_of_tokens(tokens):
    with remove_padding(build("qwen2")) as handle, pytest.raises(ValueError, match="`mlp_tile_tokens` is a positive"):
        tile_mlps(handle, tokens)


def test_compiled_layers_have_no_tiles():
    with remove_padding(build("qwen2")) as handle:
        compile_layers(handle, backend="eager")
        with pytest.raises(PaddingRemovalError, match="compiled layer has no tiles"):
            tile_mlps(handle, TILE)


def test_a_trainer_tiles_its_models(tmp_path):
    given = {"max_steps": 2, "padding_free": True, "prefix_sharing": True}
    tiled, whole = (
        make_trainer(trl_padfix, "DPO", tmp_path / str(tile), **given, mlp_tile_tokens=tile) for tile in (TILE, None)
    )
    for trainer in (tiled, whole):
        trainer.train()
    logs = [[e for e in t.state.log_history if "loss" in e] for t in (tiled, whole)]
    for ours, theirs in zip(*logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert [len(tiles_of(handle)) for handle in tiled.padding.handles] == [2, 2]  # policy and reference
    with pytest.raises(ValueError, match="needs `padding_free=True`"):
        trl_padfix.DPOConfig(str(tmp_path), mlp_tile_tokens=8)


def test_a_model_that_a_trainer_refuses_to_tile_is_left_untouched(tmp_path):
    model = build("qwen2_moe")
    with pytest.raises(PaddingRemovalError, match="experts behind a router"):
        make_trainer(trl_padfix, "SFT", tmp_path, model=model, padding_free=True, mlp_tile_tokens=8)
    # TRL has a method of its own on the model, for its fused head.
    assert not any(isinstance(vars(module).get("forward"), ForwardPatch) for module in model.modules())
