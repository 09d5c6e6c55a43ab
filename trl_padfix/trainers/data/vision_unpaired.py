"""TRL's collator for unpaired preferences with images, honouring the padding side; not every TRL has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trl.trainer.kto_trainer as trl_kto

from .collators import EMPTY
from .vision_collators import VisionCollator, on_side_with_kl


__all__ = ["DataCollatorForVisionUnpairedPreference"]


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator, trl_kto.DataCollatorForVisionUnpairedPreference):
    """
    TRL's collator for unpaired preferences with images, padding on `padding_side`, also for the KL term.

    Raises:
        ValueError: For another `padding_side`, and, unless `for_trainer`, for an example whose images are not as many
            as its placeholders and for an empty completion.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        rows = (batch["completion_mask"].sum(1) == 0).nonzero().flatten().tolist()
        self.refuse_or_count(
            rows,
            f"The completions of examples {rows} of the batch have no token (within `max_length={self.max_length}`): "
            "their log-probability would be 0 whatever the model does. Drop the examples, or raise `max_length`.",
            EMPTY,
        )
        return on_side_with_kl(self, batch)
