"""
Checks that packed batches are computed correctly on this machine, run before anything is timed.

Each check compares a figure with a limit. A computation that is wrong on purpose must exceed the limit: otherwise the
check would pass for any computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix import prefix_sharing_layout, remove_padding
from trl_padfix.core.attention import attention
from trl_padfix.core.attention.segments import sum_by_token
from trl_padfix.core.attention.varlen import torch_varlen_is_complete


__all__ = ["Check", "check_device"]


@dataclass(frozen=True)
class Check:
    """A figure, its limit, and the figure of a wrong computation; `None` for counts."""

    name: str
    figure: float
    limit: float
    control: float | None = None

    @property
    def ok(self) -> bool:
        detects_errors = (
            self.control is None or not self.control <= self.limit
        )  # NaN of a wrong computation is an error
        return bool(self.figure <= self.limit) and detects_errors

    def __str__(self) -> str:
        control = "" if self.control is None else f"; a wrong layout gives {self.control:.2e}"
        return f"{'ok' if self.ok else 'WRONG'}: {self.name}: {self.figure:.2e} (at most {self.limit:.2e}{control})"


def check_device(device: str, *, toy: bool = False, backend: str | None = "inductor") -> Iterator[Check]:
    """Compare packed with padded computations on a device; without a `backend` no layers are compiled."""
    ids, mask = _pairs(device, rows=8, columns=24 if toy else 700)
    exact = _Figures.of(_model(device, toy), ids, mask)
    limits: dict[str, float] = {}
    for precision in ("float32", "autocast", "bfloat16"):
        padded = _Figures.of(_model(device, toy, precision), ids, mask, precision)
        rounding = padded.distance(exact)
        # In half precision a packed forward may be as far from float32 as the padded one, with half of it to spare.
        limits[precision] = 1e-4 if precision == "float32" else 1.5 * rounding + 1e-3
        leaking = _Figures.of(_model(device, toy, precision), ids, mask, precision, "leaking").distance(exact)
        for mode in ("padding-free", "prefix sharing"):
            packed = _Figures.of(_model(device, toy, precision), ids, mask, precision, mode)
            name = f"{mode}, {precision}: distance of log-probabilities and gradients from padded float32"
            yield Check(name, packed.distance(exact), limits[precision], leaking)
            if device == "cuda" and precision != "float32" and torch_varlen_is_complete():
                missing = len(packed.layers) - packed.varlen
                yield Check(f"{mode}, {precision}: layers without torch's variable-length attention", missing, 0)
        if backend is not None:
            compiled = _Figures.of(_model(device, toy, precision), ids, mask, precision, "prefix sharing", backend)
            name = f"prefix sharing, {precision}, layers compiled with {backend}: the same distance"
            yield Check(name, compiled.distance(exact), limits[precision], leaking)
    yield from _check_sums(ids, mask)


def _check_sums(ids: torch.Tensor, mask: torch.Tensor) -> Iterator[Check]:
    """Check the gradients of shared keys: summed in float32, and equal in every run."""
    layout = prefix_sharing_layout(ids, mask)
    index: Any = layout.key_index
    draw = torch.Generator().manual_seed(0)
    upstream = torch.randn(index.numel(), 2, 64, generator=draw).to(ids.device, torch.bfloat16)
    zeros = torch.zeros(layout.packed_tokens, 2, 64, device=ids.device, dtype=torch.float64)
    exact = zeros.index_add(0, index, upstream.double())
    order, offsets = layout.key_sort_order

    def error(order: torch.Tensor) -> float:
        return ((sum_by_token(upstream, order, offsets).double() - exact).norm() / exact.norm()).item()

    control = error(order.roll(1))  # each gradient is added to the neighbour of its key
    yield Check("gradients of shared keys in bfloat16: distance from their sum", error(order), 2e-3, control)
    first = sum_by_token(upstream, order, offsets)
    changed_runs = sum(not torch.equal(sum_by_token(upstream, order, offsets), first) for _ in range(10))
    yield Check("runs, of ten, in which the gradients of shared keys differ", changed_runs, 0)


@dataclass
class _Figures:
    """Log-probabilities `(B, L - 1)` and flat gradient of a step, its layers, and calls of torch's varlen op."""

    logps: torch.Tensor
    gradient: torch.Tensor
    layers: Any
    varlen: int

    @classmethod
    def of(
        cls,
        model: Qwen2ForCausalLM,
        ids: torch.Tensor,
        mask: torch.Tensor,
        precision: str = "float32",
        mode: str | None = None,
        backend: str | None = None,
    ) -> _Figures:
        calls = mock.Mock(side_effect=attention.attend_torch_varlen)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(attention, "attend_torch_varlen", calls))
            if mode is not None:
                handle = stack.enter_context(remove_padding(model, prefix_sharing=mode == "prefix sharing"))
                if backend is not None:
                    from trl_padfix.core.attention.compiled import compile_layers

                    compile_layers(handle, backend=backend)
            # "leaking": all rows as one, so that each attends to those before it.
            shape = (1, -1) if mode == "leaking" else ids.shape
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == "autocast"):
                logits = model(
                    input_ids=ids.reshape(shape), attention_mask=mask.reshape(shape), use_cache=False
                ).logits.float()
            logits = logits.reshape(*ids.shape, -1)
            logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            logps = logps * (mask[:, 1:] * mask[:, :-1])
            # Another weight for each token: errors of two tokens cannot cancel in the gradient.
            (logps * torch.linspace(-1, 1, logps.numel(), device=ids.device).view_as(logps)).sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        return cls(logps.detach(), gradient, model.model.layers, calls.call_count)

    def distance(self, exact: _Figures) -> float:
        """Larger of the relative differences of log-probabilities and gradients."""
        pairs = ((self.logps, exact.logps), (self.gradient, exact.gradient))
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def _model(device: str, toy: bool, precision: str = "float32") -> Qwen2ForCausalLM:
    sizes = (64, 96, 2) if toy else (256, 512, 4)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    config: Any = Qwen2Config(
        **dict(zip(names, sizes, strict=True)),
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.08,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(config)
    if precision == "bfloat16":  # as `from_pretrained` does: the frequencies of rotary embeddings stay in float32
        frequencies = model.model.rotary_emb.inv_freq.clone()
        model.bfloat16().model.rotary_emb.inv_freq = frequencies
    return model.to(device)


def _pairs(device: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows: row `i + rows / 2` shares half of its columns with row `i`, and all rows share a sixth."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 512, (rows, columns), generator=draw)
    ids[rows // 2 :, : columns // 2] = ids[: rows // 2, : columns // 2]
    ids[:, : columns // 6] = ids[0, : columns // 6]
    lengths = torch.randint(columns // 2 + 2, columns, (rows, 1), generator=draw)
    lengths[0] = columns  # the longest row: no column is empty
    mask = (torch.arange(columns) < lengths).long()
    return ids.to(device), mask.to(device)
