"""
What becomes of a family: computed exactly, or refused with the reason, or, if there is a mistake in the package, wrong.

The reference is each row computed alone, without padding and without a mask. That is what a padded batch is meant to
give; where a model's own padded computation differs from it (learned positions under left padding), the difference is
recorded beside the outcome.
"""

from __future__ import annotations

from typing import Any

import torch
from families import NotBuilt, build
from torch import nn
from transformers import PreTrainedModel

from trl_padfix import remove_padding
from trl_padfix.attention import PaddingRemovalError


__all__ = ["LOGP_TOLERANCE", "MODES", "family_outcomes", "packed_difference", "rows"]

MODES = {"padding_free": False, "prefix_sharing": True}
LOGP_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-4


def rows() -> list[torch.Tensor]:
    """Ragged rows, longer than every window, that share prefixes of several lengths; one is a prefix of another."""
    ids = torch.randint(3, 60, (5, 14), generator=torch.Generator().manual_seed(0))
    ids[1, :6], ids[2, :3], ids[3] = ids[0, :6], ids[0, :3], ids[0]
    return [row[:n] for row, n in zip(ids, (14, 9, 11, 7, 3), strict=True)]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of the rows, padded on a side."""
    given = rows()
    length = max(len(row) for row in given)
    ids, mask = torch.zeros(2, len(given), length, dtype=torch.int64)
    for i, row in enumerate(given):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def family_outcomes(model_type: str) -> dict[str, Any]:
    """
    Outcomes of a type in both modes, on both padding sides, with its default attention and the eager one.

    Returns:
        `dict` with `padding_free` and `prefix_sharing`, each with an `outcome` (`exact`, `refused`, `wrong`) and its
        figures or reason; or with `not_built`.
    """
    try:
        model = build(model_type)
    except NotBuilt as reason:
        return {"not_built": str(reason)}
    implementations = [model.config._attn_implementation]
    if implementations != ["eager"]:
        implementations.append("eager")
    result: dict[str, Any] = {"class": type(model).__name__, "implementations": implementations}
    for implementation in implementations:
        model = build(model_type, implementation)
        try:
            reference = alone(model)
        except Exception as error:
            return {"not_built": f"does not run by itself: {_line(error)}"}
        result.setdefault("own_padding", own_padding(model, reference))
        for mode, sharing in MODES.items():
            outcome = _outcome(model, reference, sharing)
            result[mode] = _worse(result.get(mode), outcome)
    return result


def alone(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of every row computed by itself, and the gradient of their weighted sum."""
    model.zero_grad(set_to_none=True)
    logps = []
    for row in rows():
        logits = model(row[None], use_cache=False).logits[0].float()
        logps.append(logits[:-1].log_softmax(-1).gather(1, row[1:, None]).squeeze(1))
    return _with_gradients(model, torch.cat(logps))


def batched(model: PreTrainedModel, side: str, **inputs: Any) -> torch.Tensor:
    """Log-probabilities of the rows in one padded batch, row after row."""
    ids, mask = padded(side)
    logits = model(ids, attention_mask=mask, use_cache=False, **inputs).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return logps[(mask[:, 1:] * mask[:, :-1]).bool()]


def own_padding(model: PreTrainedModel, reference: tuple[torch.Tensor, Any]) -> dict[str, Any]:
    """How far the model's own padded computation is from the rows computed alone, on each side."""
    differences = {}
    for side in ("left", "right"):
        try:
            with torch.no_grad():
                differences[side] = _figure((batched(model, side) - reference[0]).abs().max().item())
        except Exception as error:
            differences[side] = _line(error)
    return differences


def packed_difference(
    model: PreTrainedModel, reference: tuple[torch.Tensor, dict[str, torch.Tensor]], sharing: bool, side: str
) -> tuple[float, float]:
    """Largest difference of a log-probability, and of a gradient relative to the largest of its parameter."""
    model.zero_grad(set_to_none=True)
    logps, gradients = reference
    ids, mask = padded(side)
    expected_tokens = 14 + 3 + 8 + 3 if sharing else int(mask.sum())
    with remove_padding(model, prefix_sharing=sharing) as handle:
        packed, packed_gradients = _with_gradients(model, batched(model, side))
        assert handle.stats.packed_tokens == expected_tokens, "the mode did not run"
    assert packed_gradients.keys() == gradients.keys(), "not the same parameters got a gradient"
    largest = max(g.abs().max().item() for g in gradients.values())
    error = 0.0
    for name, gradient in gradients.items():
        scale = max(gradient.abs().max().item(), 1e-3 * largest)
        error = max(error, (packed_gradients[name] - gradient).abs().max().item() / scale)
    return (packed - logps).abs().max().item(), error


def _outcome(model: PreTrainedModel, reference: Any, sharing: bool) -> dict[str, Any]:
    worst = (0.0, 0.0)
    for side in ("left", "right"):
        try:
            logp, gradient = packed_difference(model, reference, sharing, side)
        except PaddingRemovalError as refused:
            return {"outcome": "refused", "reason": str(refused)}
        except Exception as error:
            return {"outcome": "wrong", "reason": _line(error)}
        worst = max(worst[0], logp), max(worst[1], gradient)
    exact = worst[0] <= LOGP_TOLERANCE and worst[1] <= GRADIENT_TOLERANCE
    figures = {"logps": _figure(worst[0]), "gradients": _figure(worst[1])}
    return {"outcome": "exact" if exact else "wrong", **figures}


def _worse(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    if before is None or before["outcome"] == now["outcome"] == "exact":
        before = before or now
        figures = {name: max(before[name], now[name]) for name in ("logps", "gradients") if name in now}
        return {**now, **figures}
    return before if before["outcome"] == "wrong" or now["outcome"] == "exact" else now


def _with_gradients(model: nn.Module, logps: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(2))
    (logps * weights).sum().backward()
    return logps.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _figure(value: float) -> float:
    return float(f"{value:.1e}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
