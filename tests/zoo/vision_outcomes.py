"""
Outcomes of a vision-language type: exact, refused with the reason, or wrong.

As in `family_outcomes.py` the reference is each row computed alone, with its own images: without padding, and without
another row's image in the tower. Chosen and rejected rows repeat their images, some rows have two images and some
none, two have the same ids and another image.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from zoo.families import NotBuiltError
from zoo.family_outcomes import (
    MODES,
    SIDES,
    TOLERANCE,
    gradient_difference,
    gradients_of,
    leaking_layouts,
    stable_topk,
    weighted,
)
from zoo.models import real_logps
from zoo.vision_families import NOT_RUN, Batch, Row, VisionModel, build_vision, collate

from trl_padfix import PaddingRemovalError, remove_padding


__all__ = ["KINDS", "ROWS", "TEXT", "alone", "logps", "vision_outcomes"]

ROWS = [
    Row((3, 4, -1, 5, 6, 7, 8)),
    Row((3, 4, -2, 5)),
    Row((9, -3, 10, -1, 11)),
    Row((3, 4, 5, 6, 7, 8)),
    Row((3, 4, -1, 5, 6, 9)),
    Row((3, 4, -2, 5, 12, 13, 14)),
    Row((9, -3, 10, -1, 12, 13)),
    Row((3, 4, 5, 6, 7, 8, 20)),
]
"""Four pairs: one image, the same text and another image, two images, and none."""

TEXT = [Row((3, 4, 5, 6, 7, 8)), Row((3, 4, 9, 10, 11, 12, 13, 14, 15)), Row((7, 8))]

KINDS = {"images": ROWS, "text": TEXT}


def logps(model: PreTrainedModel, batch: Batch, **kwargs: Any) -> torch.Tensor:
    """Log-probabilities of the real tokens behind real tokens, row after row."""
    return real_logps(model(**batch.call(), **kwargs).logits, batch.ids, batch.mask)


def alone(vision: VisionModel, rows: list[Row]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of every row computed by itself, and the gradient of their weighted sum."""
    scores = torch.cat([logps(vision.model, collate(vision, [row]), use_cache=False) for row in rows])
    return scores.detach(), gradients_of(vision.model, weighted(scores))


def vision_outcomes(family: str) -> dict[str, Any]:
    """
    For `images` and `text`, in both modes, the `outcome` (`exact`, `refused`, `wrong`) of a type with its figures or
    reason, on both padding sides; `not_run` for batches that the model itself cannot be given here. Or `not_built`.
    """
    try:
        vision = build_vision(family)
    except NotBuiltError as reason:
        return {"not_built": str(reason)}
    result: dict[str, Any] = {"class": type(vision.model).__name__}
    try:
        remove_padding(vision.model).remove()
    except PaddingRemovalError as refused:
        outcome = {"outcome": "refused", "reason": str(refused)}
        return result | {kind: dict.fromkeys(MODES, outcome) for kind in KINDS}
    with stable_topk():
        return result | {kind: _outcomes(vision, kind, rows) for kind, rows in KINDS.items()}


def _outcomes(vision: VisionModel, kind: str, rows: list[Row]) -> dict[str, Any]:
    """Outcomes of one kind of batch in both modes."""
    if kind == "images" and vision.image is None:
        return {"not_run": NOT_RUN.get(vision.family, "None of the ways in which images are tried.")}
    with_images = [row for row in rows if row.images]  # some take no row without one
    for given in (rows, with_images) if with_images else (rows,):
        try:
            reference = alone(vision, given)
        except Exception:
            continue
        return {mode: _outcome(vision, given, reference, sharing) for mode, sharing in MODES.items()}
    return {"not_run": "It takes no such rows."}


def _outcome(vision: VisionModel, rows: list[Row], reference: Any, sharing: bool) -> dict[str, Any]:
    """The outcome in one mode; of a type whose own padded batch is not what its rows are alone, against that batch."""
    found = _compared(vision, rows, dict.fromkeys(SIDES, reference), sharing)
    if found["outcome"] == "wrong" and "reason" not in found:
        padded = {side: _padded(vision, rows, side) for side in SIDES}
        own = {
            "logps": max((own[0] - reference[0]).abs().max().item() for own in padded.values()),
            "gradients": max(gradient_difference(own[1], reference[1]) for own in padded.values()),
        }
        if max(own.values()) > TOLERANCE:
            own = {name: float(f"{value:.1e}") for name, value in own.items()}
            found = _compared(vision, rows, padded, sharing) | {"own_padding": own}
    return found


def _leak(vision: VisionModel, rows: list[Row], reference: Any) -> float | None:
    """The change of the scores under a layout whose rows see each other; `None` if it cannot be computed."""
    with leaking_layouts(), torch.no_grad(), remove_padding(vision.model):
        try:
            return (logps(vision.model, collate(vision, rows)) - reference[0]).abs().max().item()
        except Exception:  # such a layout names columns and segments that there are none of
            return None


def _padded(vision: VisionModel, rows: list[Row], side: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    scores = logps(vision.model, collate(vision, rows, side), use_cache=False)
    return scores.detach(), gradients_of(vision.model, weighted(scores))


def _compared(vision: VisionModel, rows: list[Row], references: dict[str, Any], sharing: bool) -> dict[str, Any]:
    worst = {"logps": 0.0, "gradients": 0.0}
    for side in SIDES:
        batch, reference = collate(vision, rows, side), references[side]
        try:
            with remove_padding(vision.model, prefix_sharing=sharing) as handle:
                scores = logps(vision.model, batch)
                found = gradients_of(vision.model, weighted(scores))
                assert handle.stats.packed_tokens < batch.mask.numel(), "the mode did not run"
        except PaddingRemovalError as refused:
            return {"outcome": "refused", "reason": str(refused)}
        except Exception as error:
            return {"outcome": "wrong", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        worst["logps"] = max(worst["logps"], (scores - reference[0]).abs().max().item())
        worst["gradients"] = max(worst["gradients"], gradient_difference(found, reference[1]))
    outcome = "exact" if all(value <= TOLERANCE for value in worst.values()) else "wrong"
    if not sharing and (leak := _leak(vision, rows, references["right"])) is not None:
        worst["leak"] = leak
    return {"outcome": outcome, **{name: float(f"{value:.1e}") for name, value in worst.items()}}
