"""TRL's collator for unpaired preferences with images, honouring the padding side; not every TRL has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trl.trainer.kto_trainer as trl_kto

from .collators import EMPTY
from .vision_collators import VisionCollator, on_side_with_kl


__all__ = ["DataCollatorForVisionUnpairedPreference"]


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator, trl_kto.DataCollatorForVisionUnpairedPreference):
    """
    TRL's collator for unpaired preferences with images, padding on the side you choose.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Tokenizes the text and prepares the images.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`, also of the mismatched completions of the KL term.
        for_trainer (`bool`, *optional*, defaults to `False`):
            Whether odd rows are counted in `odd_rows` and warned about, instead of being errors. Trainers set it.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For another `padding_side`, for an example whose images are not as many as its placeholders, and
            for an empty completion.
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

    def collated(self, by_trl: Callable[[Any], Any], examples: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(by_trl(examples))
