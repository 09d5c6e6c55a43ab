"""
Outcomes of a family: exact, refused with the reason, or wrong, if the package has a mistake.

The reference is each row computed alone, without padding and without a mask: that is what a padded batch is meant to
give. How far the model's own padded computation is from it (learned positions under left padding) is recorded beside
the outcome. Router logits and the auxiliary loss of mixtures of experts are compared with the padded computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from kit.observe import each_row_alone
from torch import nn
from transformers import PreTrainedModel
from zoo.families import NotBuiltError, build
from zoo.models import real_logps

import trl_padfix.core.call.layout_of
from trl_padfix import Layout, padding_free_layout, prefix_sharing_layout, remove_padding
from trl_padfix.core.anatomy import Anatomy
from trl_padfix.core.errors import PaddingRemovalError
from trl_padfix.core.layout.layout import SegmentLengths
from trl_padfix.core.mixers.node_tree import NodeTree
from trl_padfix.core.refusals import refusal


__all__ = ["LEAK", "MODES", "TOLERANCE", "family_outcomes", "leaking_layouts", "trees_without_parents"]

MODES = {"padding_free": False, "prefix_sharing": True}
SIDES = ("left", "right")
TOLERANCE = 1e-4
"""For log-probabilities absolute, for gradients relative to the largest value of their parameter, in float32."""
LEAK = 1e-2
"""A layout that lets one row see another moves some log-probability by at least this."""

Reference = tuple[torch.Tensor, dict[str, torch.Tensor]]


def rows() -> list[torch.Tensor]:
    """Ragged rows, longer than every window, that share prefixes of several lengths; one is a prefix of another."""
    ids = torch.randint(3, 60, (5, 14), generator=torch.Generator().manual_seed(0))
    ids[1, :6], ids[2, :3], ids[3] = ids[0, :6], ids[0, :3], ids[0]
    return [row[:n] for row, n in zip(ids, (14, 9, 11, 7, 3), strict=True)]


TOKENS = {False: 14 + 9 + 11 + 7 + 3, True: 14 + 3 + 8 + 3}
"""Tokens of the rows, and tokens with a distinct prefix."""


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of the rows, padded on a side."""
    given = rows()
    length = max(len(row) for row in given)
    ids, mask = torch.zeros(2, len(given), length, dtype=torch.int64)
    for i, row in enumerate(given):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def family_outcomes(family: str) -> dict[str, Any]:
    """
    For both modes the `outcome` (`exact`, `refused`, `wrong`) of a family with its figures or reason, on both padding
    sides, with its default attention and the eager one; and how many `mixers` run in each way. Or `not_built`.
    """
    try:
        model = build(family)
    except NotBuiltError as reason:
        return {"not_built": str(reason)}
    implementations = list(dict.fromkeys([model.config._attn_implementation, "eager"]))
    result: dict[str, Any] = {"class": type(model).__name__, "implementations": implementations}
    anatomy = Anatomy.of(model)
    if refusal(anatomy) is None:
        result["mixers"] = dict(Counter(mixer.mode for mixer in anatomy.mixers.mixers))
    for implementation in implementations:
        model = build(family, implementation)
        with stable_topk():
            try:
                reference = alone(model)
            except Exception as error:
                return {"not_built": f"does not run by itself: {_line(error)}"}
            own = own_padding(model, reference)
            result.setdefault("own_padding", own)
            for mode, sharing in MODES.items():
                result[mode] = _merged(result.get(mode), _outcome(model, reference, sharing, own))
    return result


@contextmanager
def stable_topk() -> Iterator[None]:
    """
    Let `topk` choose the first among equal values, until the block ends.

    torch leaves open which it chooses, and its choice depends on how many values there are: in a longer row an indexer
    selects other keys for the same token. Scores of tiny random indexers are often equal, namely zero.
    """

    def topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with mock.patch.object(torch.Tensor, "topk", topk), mock.patch.object(torch, "topk", topk):
        yield


def alone(model: PreTrainedModel) -> Reference:
    """Log-probabilities of every row computed by itself, and the gradient of their weighted sum."""
    logps = each_row_alone(
        lambda row, ones: real_logps(model(row, use_cache=False).logits, row, ones), *padded("right")
    )
    return logps.detach(), gradients_of(model, weighted(logps))


def batched(model: PreTrainedModel, side: str) -> torch.Tensor:
    """Log-probabilities of the rows in one padded batch, row after row."""
    ids, mask = padded(side)
    return real_logps(model(ids, attention_mask=mask, use_cache=False).logits, ids, mask)


def own_padding(model: PreTrainedModel, reference: Reference) -> dict[str, Any]:
    """Difference between the model's own padded computation and rows computed alone, for each side."""
    differences = {}
    for side in SIDES:
        try:
            with torch.no_grad():
                differences[side] = _figure(_difference(batched(model, side), reference[0]))
        except Exception as error:
            differences[side] = _line(error)
    return differences


@contextmanager
def leaking_layouts() -> Iterator[None]:
    """Layouts whose first two rows are one: what a test of equality must not let pass."""

    def merged(values: tuple[int, ...], combine: Any) -> tuple[int, ...]:
        return (combine(values[:2]), *values[2:])

    def leak(layout: Layout) -> Layout:
        return replace(
            layout,
            queries=SegmentLengths.of(merged(layout.queries.lengths, sum)),
            keys=SegmentLengths.of(merged(layout.keys.lengths, sum)),
            spans=merged(layout.spans, sum),  # no hole in it
        )

    builders = {"padding_free_layout": padding_free_layout, "prefix_sharing_layout": prefix_sharing_layout}
    leaking = {name: lambda *args, build=build: leak(build(*args)) for name, build in builders.items()}
    with mock.patch.multiple(trl_padfix.core.call.layout_of, **leaking):
        yield


@contextmanager
def trees_without_parents() -> Iterator[None]:
    """Trees whose every node begins with no state: what a test of forked states must not let pass."""
    build_tree = NodeTree.__init__

    def without_parents(self: NodeTree, layout: Layout, prefix_states: Any) -> None:
        build_tree(self, layout, prefix_states)
        for levels, _ in map(self.order_of, (False, True)):
            levels[:] = [[block._replace(parents=None) for block in level] for level in levels]

    with mock.patch.object(NodeTree, "__init__", without_parents):
        yield


def _outcome(
    model: PreTrainedModel, reference: Reference, sharing: bool, own: dict[str, float | str]
) -> dict[str, Any]:
    figures = {"logps": 0.0, "gradients": 0.0}
    for side in SIDES:
        try:
            logp, gradient = _packed_difference(model, reference, sharing, side)
            # Router logits are compared with the padded computation, where that itself is right.
            padded_is_right = isinstance(own[side], float) and own[side] <= TOLERANCE
            routers = _router_difference(model, sharing, side) if padded_is_right else {}
        except PaddingRemovalError as refused:
            return {"outcome": "refused", "reason": str(refused)}
        except Exception as error:
            return {"outcome": "wrong", "reason": _line(error)}
        for name, value in {"logps": logp, "gradients": gradient, **routers}.items():
            figures[name] = max(figures.get(name, 0.0), value)
    exact = all(value <= TOLERANCE for value in figures.values())
    with leaking_layouts(), torch.no_grad(), remove_padding(model, prefix_sharing=sharing):
        figures["leak"] = _difference(batched(model, "right"), reference[0])
    return {"outcome": "exact" if exact else "wrong", **{name: _figure(v) for name, v in figures.items()}}


def _packed_difference(model: PreTrainedModel, reference: Reference, sharing: bool, side: str) -> tuple[float, float]:
    """Largest difference of a log-probability, and of a gradient."""
    logps, gradients = reference
    with remove_padding(model, prefix_sharing=sharing) as handle:
        packed = batched(model, side)
        packed_gradients = gradients_of(model, weighted(packed))
        # Some multimodal models hand their decoder the numbers of the columns: rows padded left then share nothing.
        expected = {TOKENS[sharing], TOKENS[sharing and (side == "right" or handle.multimodal is None)]}
        assert handle.stats.packed_tokens in expected, "the mode did not run"
    return _difference(packed.detach(), logps), gradient_difference(packed_gradients, gradients)


def _router_difference(model: PreTrainedModel, sharing: bool, side: str) -> dict[str, float]:
    """Differences of router logits, auxiliary loss and its gradients, where there are any, with padding left out."""
    if not hasattr(model.config, "output_router_logits"):
        return {}
    ids, mask = padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "output_router_logits": True}
    try:
        own = model(**inputs, position_ids=positions)
    except (AttributeError, RuntimeError):  # auxiliary losses of JetMoE in 4.57, of Qwen3-Next in 5.0
        return {}
    if not getattr(own, "router_logits", None):
        return {}
    expected = gradients_of(model, own.aux_loss) if own.aux_loss is not None else {}
    with remove_padding(model, prefix_sharing=sharing):
        packed = model(**inputs)
        gradients = gradients_of(model, packed.aux_loss) if own.aux_loss is not None else {}
    keep = mask.flatten().bool()
    pairs = [
        (packed_layer.view(len(keep), -1)[keep], layer.view(len(keep), -1)[keep])
        for packed_layer, layer in zip(packed.router_logits, own.router_logits, strict=True)
    ]
    found = {"router_logits": max(_difference(*pair) for pair in pairs)}
    if own.aux_loss is not None:
        found["aux_loss"] = _difference(packed.aux_loss, own.aux_loss)
        found["aux_gradients"] = gradient_difference(gradients, expected)
    return found


def _merged(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The worse of the outcomes of two attention implementations, and of their figures."""
    rank = ("exact", "refused", "wrong")
    if before is None or before["outcome"] == now["outcome"] == "exact":
        before = before or now
        figures = {name: max(before[name], now[name]) for name in now if name not in ("outcome", "leak")}
        return now | figures | ({"leak": min(before["leak"], now["leak"])} if "leak" in now else {})
    return max(before, now, key=lambda outcome: rank.index(outcome["outcome"]))


def weighted(logps: torch.Tensor) -> torch.Tensor:
    return (logps * torch.randn(logps.shape, generator=torch.Generator().manual_seed(2))).sum()


def gradients_of(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_difference(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative to the largest gradient of a parameter, or to a hundredth of the largest of all (some are zero)."""
    assert gradients.keys() == expected.keys(), "not the same parameters got a gradient"
    floor = max((g.abs().max().item() for g in expected.values()), default=0.0) / 100
    return max(
        (_difference(gradients[name], g) / max(g.abs().max().item(), floor, 1e-30) for name, g in expected.items()),
        default=0.0,
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a - b).abs().max().item()
    return difference if difference == difference else float("inf")  # a NaN is no agreement


def _figure(value: float) -> float:
    return float(f"{value:.1e}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
