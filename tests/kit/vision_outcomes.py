"""
What becomes of a vision-language type: computed exactly, or refused with the reason. Or wrong.

As in `family_outcomes.py` the reference is each row computed alone, with its own images: without padding, and without
another row's image in the tower. Chosen and rejected rows repeat their images, some rows have two images and some
none, two have the same ids and another image.
"""

from __future__ import annotations

from typing import Any

import torch
from kit.families import NotBuiltError
from kit.family_outcomes import MODES, SIDES, TOLERANCE, gradient_difference, gradients_of, stable_topk, weighted
from kit.vision_families import Batch, Row, VisionModel, build_vision, collate
from transformers import PreTrainedModel

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
    logits = model(**batch.call(), **kwargs).logits.float()
    scores = logits[:, :-1].log_softmax(-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
    return scores[(batch.mask[:, 1:] * batch.mask[:, :-1]).bool()]


def alone(vision: VisionModel, rows: list[Row]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of every row computed by itself, and the gradient of their weighted sum."""
    scores = torch.cat([logps(vision.model, collate(vision, [row]), use_cache=False) for row in rows])
    return scores.detach(), gradients_of(vision.model, weighted(scores))


def vision_outcomes(family: str) -> dict[str, Any]:
    """
    Outcomes of a type with images and on text alone, in both modes, on both padding sides.

    Returns:
        `dict` with `images` and `text`, each with `padding_free` and `prefix_sharing`, each with an `outcome`
        (`exact`, `refused`, `wrong`) and its figures or reason; or with `not_built`. A kind of batch that the model
        itself cannot be given here has `not_run`.
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
        return {"not_run": "none of the ways in which images are tried"}
    try:
        reference = alone(vision, rows)
    except Exception as error:
        return {"not_run": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    return {mode: _outcome(vision, rows, reference, sharing) for mode, sharing in MODES.items()}


def _outcome(vision: VisionModel, rows: list[Row], reference: Any, sharing: bool) -> dict[str, Any]:
    worst = {"logps": 0.0, "gradients": 0.0}
    for side in SIDES:
        batch = collate(vision, rows, side)
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
    return {"outcome": outcome, **{name: float(f"{value:.1e}") for name, value in worst.items()}}
