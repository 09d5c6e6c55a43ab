"""Layers compiled one by one: the numbers of uncompiled ones, one graph for all lengths, and what stays uncompiled."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from kit.cells import slow_but
from kit.tolerance import assert_close, tolerance
from simulated_gpu.varlen_reference import compile_on_cpu
from zoo.gpu_models import build, pairs, step

import trl_padfix.core.patches.compiled
from trl_padfix import remove_padding
from trl_padfix.core.model.patching import ForwardPatch
from trl_padfix.core.patches.compiled import compile_layers


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of which no two have the same shape, and rows of which pairs begin alike."""
    return [pairs(4 + 2 * (n % 5), 12 + 3 * n, common=6 + n) for n in range(count)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_on_cpu(monkeypatch)
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    """Graphs that were compiled, and breaks in them."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def assert_same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Log-probabilities and gradients of two steps."""
    assert_close(got[0], want[0], terms=96, depth=16)
    assert (got[1] - want[1]).norm() / want[1].norm() < tolerance(1, terms=96, depth=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sharing"), slow_but([("aot_eager", False)], [("aot_eager", False), ("inductor", True)])
)
def test_twenty_shapes_are_one_graph_with_the_same_numbers(backend, sharing):
    plain, compiled = build().train(), build().train()
    with remove_padding(plain, prefix_sharing=sharing), remove_padding(compiled, prefix_sharing=sharing) as handle:
        assert compile_layers(handle, backend=backend) == {}
        for ids, mask in batches(20):
            assert_same(step(compiled, ids, mask), step(plain, ids, mask))
    assert graphs() == (1, 0)


def test_a_layer_is_one_graph_within_ddp_however_small_its_buckets_are(monkeypatch):
    """Dynamo cuts a model that it compiles within DDP at the buckets of its gradients; a layer is small enough."""
    ids, mask = batches(2)[1]
    plain, compiled = build().train(), build().train()
    with remove_padding(plain, prefix_sharing=True), remove_padding(compiled, prefix_sharing=True) as handle:
        want, compilations = step(plain, ids, mask), []

        def backend(graph, inputs):
            compilations.append(graph)
            return graph

        compile_layers(handle, backend=backend)
        ddp = SimpleNamespace(bucket_bytes_cap=1024)
        monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", ddp)
        got = step(compiled, ids, mask)
    assert_same(got, want)
    assert len(compilations) == 1
    assert graphs() == (1, 0)


@pytest.mark.slow
def test_a_wrong_layout_gives_other_numbers(monkeypatch):
    model, (ids, mask) = build(), batches(1)[0]
    want = step(model, ids, mask)
    segments_of = trl_padfix.core.patches.compiled._segments

    def rolled(call, mask):
        segments = segments_of(call, mask)
        index, *order = segments.keys
        return segments._replace(keys=(index.roll(1), *order))

    monkeypatch.setattr(trl_padfix.core.patches.compiled, "_segments", rolled)
    with remove_padding(model, prefix_sharing=True) as handle:
        compile_layers(handle, backend="aot_eager")
        assert not torch.allclose(step(model, ids, mask)[0], want[0], atol=1e-3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"attention_dropout": 0.1}, "`attention_dropout=0.1`: there is no operator for attention with dropout"),
        ({"implementation": "eager"}, "`attn_implementation='eager'` is not compiled; load the model with 'sdpa'"),
    ],
    ids=["dropout", "eager"],
)
def test_what_cannot_be_compiled_runs_uncompiled_and_is_named(config, reason, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trl_padfix.core.patches.compiled.logger.setLevel("WARNING")
    model, (ids, mask) = build(**config), batches(1)[0]
    with torch.no_grad(), remove_padding(model) as handle:
        uncompiled = compile_layers(handle, backend="aot_eager")
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    assert list(uncompiled) == ["layers.0", "layers.1"]
    assert all(reason in why for why in uncompiled.values())
    assert f"2 of 2 layers run uncompiled (layers.0 to layers.1): {reason}" in caplog.text
    assert graphs()[0] == 0


def test_without_the_kernel_of_a_gpu_layers_run_uncompiled(caplog, monkeypatch):
    monkeypatch.undo()
    model, (ids, mask) = build(), batches(1)[0]
    with torch.no_grad(), remove_padding(model) as handle:
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        compile_layers(handle, backend="aot_eager")
        assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, want)
    assert graphs()[0] == 0
    assert "needs half precision on a CUDA GPU" in caplog.text


def test_layers_with_patches_of_another_kind_are_left_as_they_are():
    class RowsPatch(ForwardPatch):
        def packed(self, *args, **kwargs):
            return self.wrapped(*args, **kwargs)

    model = build()
    with remove_padding(model) as handle:
        handle.attach([RowsPatch(model.model.layers[1].mlp, handle)])
        uncompiled = compile_layers(handle, backend="aot_eager")
    assert uncompiled == {"layers.1": "`Qwen2MLP` does not run in direct mode (RowsPatch)"}


def test_removing_and_disabling_leave_a_model_uncompiled():
    model, (ids, mask) = build().eval(), batches(1)[0]
    keys = list(model.state_dict())
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        with remove_padding(model) as handle:
            compile_layers(handle, backend="aot_eager")
            with handle.disabled():
                assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, want)
            assert list(model.state_dict()) == keys
            clone = copy.deepcopy(model)
        assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, want)
        assert all("forward" not in vars(layer) for layer in model.model.layers)
        assert graphs()[0] == 0
        for parameter in clone.parameters():
            parameter.zero_()
        assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, want)
