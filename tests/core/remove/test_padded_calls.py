"""A call that cannot be packed is computed padded, as it came: said once, counted, and an error if `strict`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
import transformers
from kit.tolerance import assert_close
from torch import nn
from zoo.families import build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core.model.patching import patches_on
from trl_padfix.core.remove import number_padded_rows


FAMILIES = ("qwen2", "mamba2", "qwen3_moe")
"""Attention, a state-space scan, experts."""

ATTENTION = ("qwen2", "gpt2")
RECURRENT = ("bloom", "mamba2", "qwen3_next")
"""Mixers that padding within a row changes."""

LENGTHS = (9, 5, 7)
L = max(LENGTHS)
REAL = sum(LENGTHS)


def batch(side: str = "left") -> dict[str, torch.Tensor]:
    """Rows that begin with the same three tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (len(LENGTHS), L), generator=generator)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(LENGTHS):
        begin = L - n if side == "left" else 0
        ids[row, begin : begin + 3] = torch.tensor([11, 12, 13])
        mask[row, begin : begin + n] = 1
    return {"input_ids": ids, "attention_mask": mask}


def by_position(module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that adds to the states of the last column of the batch."""
    states = output[0] if isinstance(output, tuple) else output
    bonus = torch.zeros_like(states)
    bonus[:, -1] = 0.5
    return (states + bonus, *output[1:]) if isinstance(output, tuple) else states + bonus


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def replace_layer(model: nn.Module) -> Callable[[], None]:
    """Replace the last layer by a copy with other weights; returns a function that puts the layer back."""
    layers = layers_of(model)
    if "spare" not in vars(model):  # copied before there are patches, which would be copied, too
        vars(model)["spare"] = [copy.deepcopy(layers[-1])]  # a list: no module of the model
        with torch.no_grad():
            next(p for p in model.spare[0].parameters() if p.dim() == 2).mul_(0.5)
    old, layers[-1] = layers[-1], model.spare[0]
    return lambda: layers.__setitem__(-1, old)


def append_to_mlp(model: nn.Module) -> Callable[[], None]:
    """Let statistics of the batch follow the MLP of the first layer; returns a function that puts the MLP back."""
    layer = layers_of(model)[0]
    mlp = layer.mlp
    layer.mlp = nn.Sequential(mlp, *STATISTICS)
    return lambda: setattr(layer, "mlp", mlp)


STATISTICS = (nn.Flatten(0, 1), nn.BatchNorm1d(32, track_running_stats=False), nn.Unflatten(0, (len(LENGTHS), L)))


@dataclass(frozen=True)
class Kind:
    """A kind of call: arguments beside those of a plain call, and a change of the model, which returns its undoing."""

    arguments: Callable[[dict[str, torch.Tensor]], dict[str, Any]] = lambda inputs: {}
    change: Callable[[nn.Module], Callable[[], None]] | None = None
    families: tuple[str, ...] = FAMILIES
    message: str = ""
    attention: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def square_mask(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A prepared mask `(B, 1, L, L)` in which every token sees two tokens at most."""
    two = torch.ones(L, L, dtype=torch.bool).tril().triu(-1)
    return {"attention_mask": (two & inputs["attention_mask"][:, None, None].bool()) | torch.eye(L, dtype=torch.bool)}


def with_hole(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"attention_mask": inputs["attention_mask"].index_put((torch.tensor(0), torch.tensor(4)), torch.tensor(0))}


def with_empty_row(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"attention_mask": inputs["attention_mask"].index_fill(0, torch.tensor(1), 0)}


KINDS = {
    "attention weights": Kind(
        lambda inputs: {"output_attentions": True},
        families=("qwen2", "bloom"),
        message="`output_attentions=True`",
        attention="eager",
    ),
    "4-D mask": Kind(square_mask, families=ATTENTION, message=r"mask of \(3, 1, 9, 9\)"),
    "weighted mask": Kind(
        lambda inputs: {"attention_mask": inputs["attention_mask"] * 0.5}, families=("mamba2",), message="holds .*0.5"
    ),
    "mask of another shape": Kind(
        lambda inputs: {"attention_mask": inputs["attention_mask"][:1]},
        families=("mamba2",),
        message=r"shape \(1, 9\)",
    ),
    "holes": Kind(with_hole, families=RECURRENT, message="masked tokens between real ones"),
    "empty row": Kind(with_empty_row, message=r"Rows \[1\]"),
    "no value per token": Kind(
        lambda inputs: {"temperatures": torch.ones(3)}, families=("qwen2",), message="`temperatures` of"
    ),
    "shifted labels at padding": Kind(
        lambda inputs: {
            "labels": torch.full_like(inputs["input_ids"], -100),  # in place of which the loss takes the others
            "shift_labels": inputs["input_ids"].roll(-1, 1),
        },
        families=("qwen2",),
        message="labels whose previous token",
    ),
    "encoder states": Kind(
        lambda inputs: {"encoder_hidden_states": torch.linspace(-1, 1, 3 * 4 * 32).view(3, 4, 32)},
        families=("gpt2",),
        message="`encoder_hidden_states`",
        settings={"add_cross_attention": True},
    ),
    "hook of a layer": Kind(
        change=lambda model: layers_of(model)[0].register_forward_hook(by_position).remove, message="`by_position`"
    ),
    "hook of the embedding": Kind(
        change=lambda model: model.get_input_embeddings().register_forward_hook(by_position).remove,
        message="`by_position`",
    ),
    "replaced layer": Kind(change=replace_layer, message="replaced after padding removal"),
    "statistics of the batch": Kind(change=append_to_mlp, families=("qwen2",), message="was added, removed"),
}


def build_for(kind: Kind, family: str) -> nn.Module:
    if not kind.settings:
        return build(family, kind.attention)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **kind.settings)
    ).eval()


def numbers(model: nn.Module, **call: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """All tensors in the output of a call but its cache, and the gradient of each parameter."""
    model.zero_grad(set_to_none=True)
    output = model(**call)
    values = (
        [output]
        if isinstance(output, tuple)
        else [v for k, v in output.items() if "cache" not in k and "past" not in k]
    )
    tensors = [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    logits = next(x for x in tensors if x.dim() == 3 and x.shape[-1] == 64)
    loss = (logits.log_softmax(-1)[..., 7] * torch.linspace(0.5, 1.5, logits.shape[1])).sum()
    (loss + (tensors[0] if tensors[0].dim() == 0 else 0)).backward()
    return [x.detach() for x in tensors], [p.grad for p in model.parameters()]


def assert_same(got: Any, expected: Any) -> None:
    """The same computation, of the same shapes: only that of gradients may add up in another order."""
    for found, exact in zip(got[0] + got[1], expected[0] + expected[1], strict=True):
        assert (found is None) == (exact is None)
        if exact is not None:
            assert_close(found, exact, terms=64)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_that_cannot_be_packed_is_computed_as_it_came(name, caplog):
    kind = KINDS[name]
    for family in kind.families:
        inputs = batch()
        caplog.clear()
        model = build_for(kind, family)
        call = inputs | kind.arguments(inputs)
        undo = kind.change(model) if kind.change else lambda: None
        expected = numbers(model, **call)
        undo()
        with remove_padding(model, prefix_sharing=True) as handle:
            undo = kind.change(model) if kind.change else lambda: None
            for n in (1, 2):
                assert_same(numbers(model, **call), expected)
                assert (handle.stats.packed_tokens, handle.stats.padded_forwards) == (0, n)
            # The first of the two calls says it, and only that one.
            said = [r.getMessage() for r in caplog.records if "runs padded" in r.getMessage()]
            assert len(said) == 1
            assert re.search(kind.message, said[0])
            # A plain call is packed again: the mode is that of one call.
            undo()
            model(**inputs)
            assert 0 < handle.stats.packed_tokens <= REAL
            assert handle.stats.padded_forwards == 2
        with remove_padding(model, prefix_sharing=True, strict=True) as handle:
            undo = kind.change(model) if kind.change else lambda: None
            with pytest.raises(PaddingRemovalError, match=kind.message):
                model(**call)
            assert (handle.stats.packed_tokens, handle.stats.padded_forwards) == (0, 0)
            undo()


@pytest.mark.parametrize("pool_last_token", [False, True])
def test_a_classifier_pools_the_same_token_in_a_padded_call(pool_last_token):
    torch.manual_seed(0)
    config = build("qwen2").config
    config.pad_token_id, config.num_labels = 60, 2
    model = transformers.Qwen2ForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    inputs = batch("right")
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 60)
    with torch.no_grad(), remove_padding(model, pool_last_token=pool_last_token) as handle:
        packed = model(**inputs).logits
        padded = model(**inputs, output_attentions=True).logits
    assert_close(padded, packed, terms=64, depth=24)
    assert handle.stats.padded_forwards == 1


def test_adapters_chosen_row_by_row_are_those_of_the_rows():
    inputs = batch()
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("qwen2"), settings, adapter_name="one")
    model.add_adapter("two", settings)
    model.eval()
    call = inputs | {"adapter_names": ["one", "two", "__base__"]}
    with torch.no_grad():
        expected = model(**call).logits
        with remove_padding(model, prefix_sharing=True) as handle:
            assert torch.equal(model(**call).logits, expected)
            assert handle.stats.padded_forwards == 1
            model(**inputs)
    assert 0 < handle.stats.packed_tokens < REAL
    assert handle.stats.padded_forwards == 1


def test_ids_with_three_dimensions_run_as_they_came():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = transformers.GPT2DoubleHeadsModel(config).eval()
    inputs = {k: v[None].repeat(2, 1, 1) for k, v in batch("right").items()}
    call = inputs | {"mc_token_ids": torch.full((2, 3), 4), "labels": inputs["input_ids"]}
    with torch.no_grad():
        expected = model(**call)
        with remove_padding(model) as handle:
            got = model(**call)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.mc_logits, expected.mc_logits)
    assert torch.equal(got.loss, expected.loss)
    assert handle.stats.padded_forwards == 1


@pytest.mark.slow
def test_a_compiled_model_is_packed_between_graph_breaks(caplog):
    model, inputs = build("qwen2"), batch()
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        with remove_padding(model) as handle:
            compiled = torch.compile(model, backend="eager")
            real = inputs["attention_mask"].bool()
            assert_close(compiled(**inputs, use_cache=False).logits[real], expected[real], terms=64, depth=24)
            assert (handle.stats.packed_tokens, handle.stats.padded_forwards) == (REAL, 0)
            assert "compiles nothing of Qwen2ForCausalLM" in caplog.text
            exec(re.search(r"`(for .*?)`", caplog.text)[1], {"model": model})
            assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
            torch.compiler.reset()
            with pytest.raises(RuntimeError, match="trl_padfix"):  # one graph has no place for packing
                torch.compile(model, backend="eager", fullgraph=True)(**inputs, use_cache=False)
        torch.compiler.reset()


def test_numbered_rows_do_not_keep_a_padded_model_from_being_compiled():
    model, graphs = build("qwen2"), []
    number_padded_rows(model)
    with torch.no_grad():
        torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)(**batch(), use_cache=False)
    torch.compiler.reset()
    assert max(len(graph.graph.nodes) for graph in graphs) > 100


def compile_layers(model: nn.Module, **options: Any) -> None:
    for layer in layers_of(model):
        layer.compile(backend="eager", **options)


def replace_layers(model: nn.Module, **options: Any) -> None:
    layers = layers_of(model)
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend="eager", **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "mamba"])
@pytest.mark.parametrize("compile_each", [compile_layers, replace_layers])
def test_compiled_layers_are_packed(compile_each, family):
    torch.compiler.reset()
    model = build(family)
    before = {name for name, module in model.named_modules() if "forward" in vars(module)}
    with torch.no_grad():
        expected = model(**batch(), use_cache=False).logits
        compile_each(model)
        with remove_padding(model) as handle:
            found = [model(**batch(), use_cache=False).logits for _ in range(2)]
        model(**batch(), use_cache=False)
    real = batch()["attention_mask"].bool()
    for logits in found:
        assert_close(logits[real], expected[real], terms=64, depth=24)
    assert (handle.stats.forwards, handle.stats.padded_forwards) == (2, 0)
    assert {n.replace("._orig_mod", "") for n, m in model.named_modules() if patches_on(m)} == before


@pytest.mark.slow
def test_a_traced_model_is_padded_for_every_mask():
    model, given = build("qwen2").requires_grad_(False), batch()
    other = given["attention_mask"].flip(0)

    class Logits(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    module, ids = Logits(), given["input_ids"]
    module.model = model
    arguments, expected = (ids, given["attention_mask"]), module(ids, other)
    with remove_padding(model):
        run = torch.jit.trace(module, arguments, check_trace=False)
    real = other.bool()
    assert_close(run(ids, other)[real], expected[real], terms=64, depth=24)


def set_forward(model: nn.Module) -> Callable[[], None]:
    mlp = layers_of(model)[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: by_position(mlp, (), forward(states))
    return lambda: delattr(mlp, "forward")


def set_class(model: nn.Module) -> Callable[[], None]:
    mlp = layers_of(model)[0].mlp
    kind, forward = type(mlp), mlp.forward
    mlp.__class__ = type("Own", (kind,), {"forward": lambda self, states: by_position(self, (), forward(states))})
    return lambda: setattr(mlp, "__class__", kind)


def hook_all(model: nn.Module) -> Callable[[], None]:
    kind = type(layers_of(model)[0].mlp)
    hook = lambda module, args, output: by_position(module, args, output) if type(module) is kind else None  # noqa: E731
    return nn.modules.module.register_module_forward_hook(hook).remove


@pytest.mark.parametrize("change", [set_forward, set_class, hook_all])
def test_a_model_that_was_changed_after_attachment_is_computed_padded(change):
    model, inputs = build("qwen2"), batch("right")
    with torch.no_grad(), remove_padding(model) as handle:
        undo = change(model)
        try:
            got = model(**inputs).logits
            with handle.disabled():
                expected = model(**inputs).logits
            handle.accept_hooks()
            wrong = model(**inputs).logits  # the control: packed
        finally:
            undo()
        assert (handle.stats.padded_forwards, handle.stats.forwards) == (1, 1)
        model(**inputs)
        assert handle.stats.forwards == 2
    assert torch.equal(got, expected)
    assert (wrong - expected)[inputs["attention_mask"].bool()].abs().max() > 0.01


class Normalized(nn.Module):
    """An MLP whose states are normalized over all tokens of a batch."""

    def __init__(self, mlp: nn.Module, size: int):
        super().__init__()
        self.mlp, self.norm = mlp, nn.BatchNorm1d(size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mlp(states).transpose(1, 2)).transpose(1, 2)


def test_statistics_of_a_batch_are_those_of_the_padded_batch():
    model, inputs = build("qwen2"), batch()
    layer = layers_of(model)[0]
    layer.mlp = Normalized(layer.mlp, model.config.hidden_size)
    model.train()
    plain = copy.deepcopy(model)
    with remove_padding(model) as handle:
        assert_same(numbers(model, **inputs), numbers(plain, **inputs))
        assert torch.equal(layers_of(model)[0].mlp.norm.running_mean, layers_of(plain)[0].mlp.norm.running_mean)
        assert (handle.stats.packed_tokens, handle.stats.padded_forwards) == (0, 1)
        model.eval()  # the control: with kept statistics a token does not depend on others
        model(**inputs)
        assert handle.stats.packed_tokens > 0
