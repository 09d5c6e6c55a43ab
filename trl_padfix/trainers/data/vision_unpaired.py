"""TRL's collator for unpaired preferences with images, honouring the padding side; not every TRL has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trl.trainer.kto_trainer as trl_kto

from .vision_collators import VisionCollator, on_side_with_kl


__all__ = ["DataCollatorForVisionUnpairedPreference"]


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator, trl_kto.DataCollatorForVisionUnpairedPreference):
    """TRL's collator for unpaired preferences with images, padding on `padding_side`, also for the KL term."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        self.refuse_cut(batch, len(examples), "examples")
        return on_side_with_kl(self, batch)
