"""KTO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl
import trl.trainer.kto_trainer as trl_kto

from ..collators import DataCollatorForUnpairedPreference
from .checks import require_columns
from .mixin import PaddingRemovalMixin


__all__ = ["KTOTrainer"]


class KTOTrainer(PaddingRemovalMixin, trl.KTOTrainer):
    """
    TRL's [`~trl.KTOTrainer`] without padding.

    Takes what TRL's takes. With `padding_free=True` in its configuration the decoder of policy and reference computes
    real tokens only, in the forward of the completions and in that of the mismatched completions of the KL term; with
    `prefix_sharing=True` no prompt twice in either. Batches are padded on the tokenizer's side, or on `padding_side`.
    Losses, metrics and gradients are those of the padded computation.

    Logs `perf/tokens_per_second`, `padfix/pad_fraction` and `padfix/shared_fraction` beside TRL's metrics, as
    [`DPOTrainer`] does; they count both forwards.

    Args:
        *args, **kwargs:
            As [`~trl.KTOTrainer`]. `args` may be this package's [`KTOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results, and for image data.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For missing columns, empty completions, and no pad token.
    """

    _collators = {trl_kto.DataCollatorForUnpairedPreference: DataCollatorForUnpairedPreference}
    _takes_images = False

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        require_columns(
            dataset,
            dataset_name,
            [{"prompt", "completion", "label"}, {"chosen", "rejected"}],
            "KTO needs `prompt`, `completion` and `label`, or pairs with `chosen` and `rejected`",
        )
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL computes these inside its `__init__`, before ours has attached.
        self._set_up_padding()
        return super()._precompute_ref_logps(*args, **kwargs)

    def _padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        batches = super()._padded_batches(inputs)
        if self.calculate_KL:
            batches.append({name: inputs[f"KL_{name}"] for name in ("input_ids", "attention_mask")})
        return batches
