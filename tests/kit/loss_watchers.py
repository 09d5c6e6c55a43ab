"""Watch the batches of a loss. Under a token budget any other function in place of the loss is a user's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_padfix.trainers.checks import custom_loss


custom_loss.TRUSTED += (__name__,)  # what stands here calls the loss and leaves its value as it is


def before_loss(trainer: Any, look: Callable[[dict[str, Any]], Any]) -> None:
    """Call `look` with each batch, before the loss is computed of it."""
    compute_loss = trainer.compute_loss

    def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        look(inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched
