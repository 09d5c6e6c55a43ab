"""
Whether packed batches are computed right on this machine: what a report on its speed begins with.

Each check compares a figure with a limit, and the figure of a computation that is wrong on purpose must be beyond the
limit: a check that passes whatever it is given would prove nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix.core.attention import attention
from trl_padfix.core.attention.segments import sum_by_token
from trl_padfix.core.attention.varlen import torch_varlen_is_complete
from trl_padfix.core.call.batch_metadata import BatchFacts, Known, share_layouts
from trl_padfix.core.call.layout_of import LayoutKey
from trl_padfix.core.layout.build import padding_free_layout, prefix_sharing_layout
from trl_padfix.core.remove import remove_padding


__all__ = ["Check", "check_device"]


@dataclass(frozen=True)
class Check:
    """What was found, the most that it may be, and what a wrong computation gives; `None` where things are counted."""

    name: str
    figure: float
    limit: float
    control: float | None = None

    @property
    def ok(self) -> bool:
        told_apart = self.control is None or not self.control <= self.limit
        return bool(self.figure <= self.limit) and told_apart

    def __str__(self) -> str:
        control = "" if self.control is None else f"; a wrong layout gives {self.control:.2e}"
        return f"{'ok' if self.ok else 'WRONG'}: {self.name}: {self.figure:.2e} (at most {self.limit:.2e}{control})"


def check_device(device: str, *, toy: bool = False, backend: str | None = "inductor") -> Iterator[Check]:
    """Packed beside padded computations on a device; without a `backend` no layers are compiled."""
    ids, mask = _pairs(device, rows=8, columns=24 if toy else 700)
    exact = _Figures.of(_model(device, toy), ids, mask)
    limits: dict[str, float] = {}
    for precision in ("float32", "autocast", "bfloat16"):
        padded = _Figures.of(_model(device, toy, precision), ids, mask, precision)
        rounding = padded.distance(exact)
        limits[precision] = 1e-4 if precision == "float32" else 1.5 * rounding + 1e-3
        leaking = _Figures.of(_model(device, toy, precision), ids, mask, precision, "leaking").distance(exact)
        for mode in ("padding-free", "prefix sharing"):
            found = _Figures.of(_model(device, toy, precision), ids, mask, precision, mode)
            name = f"{mode}, {precision}: distance of log-probabilities and gradients from padded float32"
            yield Check(name, found.distance(exact), limits[precision], leaking)
            if device == "cuda" and precision != "float32" and torch_varlen_is_complete():
                missing = len(found.layers) - found.varlen
                yield Check(f"{mode}, {precision}: layers without torch's variable-length attention", missing, 0)
        if backend is not None:
            found = _Figures.of(_model(device, toy, precision), ids, mask, precision, "prefix sharing", backend)
            name = f"prefix sharing, {precision}, layers compiled with {backend}: the same distance"
            yield Check(name, found.distance(exact), limits[precision], leaking)
    yield from _check_sums(ids, mask)


def _check_sums(ids: torch.Tensor, mask: torch.Tensor) -> Iterator[Check]:
    """The gradients of what rows share: one sum in float32, the same in every run."""
    layout = prefix_sharing_layout(ids, mask)
    index: Any = layout.key_index
    draw = torch.Generator().manual_seed(0)
    upstream = torch.randn(index.numel(), 2, 64, generator=draw).to(ids.device, torch.bfloat16)
    zeros = torch.zeros(layout.packed_tokens, 2, 64, device=ids.device, dtype=torch.float64)
    want = zeros.index_add(0, index, upstream.double())
    order, offsets = layout.key_order

    def error(order: torch.Tensor) -> float:
        return ((sum_by_token(upstream, order, offsets).double() - want).norm() / want.norm()).item()

    control = error(order.roll(1))
    yield Check("gradients of shared keys in bfloat16: distance from their sum", error(order), 2e-3, control)
    first = sum_by_token(upstream, order, offsets)
    differing = sum(not torch.equal(sum_by_token(upstream, order, offsets), first) for _ in range(10))
    yield Check("runs, of ten, in which the gradients of shared keys come out otherwise", differing, 0)


@dataclass
class _Figures:
    """Log-probabilities and gradient of a forward and backward, and how many layers ran on which kernel."""

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
            if mode == "leaking":
                whole = padding_free_layout(mask.reshape(1, -1))  # all rows as one: each sees those before it
                wrong = BatchFacts(replace(whole, batch_shape=tuple(mask.shape)))
                stack.enter_context(share_layouts([Known.of(LayoutKey(ids, mask), wrong)], deferred_checks=[]))
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == "autocast"):
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
            logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            logps = logps * (mask[:, 1:] * mask[:, :-1])
            (logps * torch.linspace(-1, 1, logps.numel(), device=ids.device).view_as(logps)).sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        return cls(logps.detach(), gradient, model.model.layers, calls.call_count)

    def distance(self, exact: _Figures) -> float:
        """The larger of the relative differences of log-probabilities and gradients."""
        both = ((self.logps, exact.logps), (self.gradient, exact.gradient))
        return max(((a - b).norm() / b.norm()).item() for a, b in both)


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
    if precision == "bfloat16":  # as a checkpoint is loaded: the frequencies of rotary embeddings stay in float32
        frequencies = model.model.rotary_emb.inv_freq.clone()
        model.bfloat16().model.rotary_emb.inv_freq = frequencies
    return model.to(device)


def _pairs(device: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows of which the second half begins as the first does, and all begin with the same few tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 512, (rows, columns), generator=draw)
    ids[rows // 2 :, : columns // 2] = ids[: rows // 2, : columns // 2]
    ids[:, : columns // 6] = ids[0, : columns // 6]
    lengths = torch.randint(columns // 2 + 2, columns, (rows, 1), generator=draw)
    lengths[0] = columns
    mask = (torch.arange(columns) < lengths).long()
    return ids.to(device), mask.to(device)
