"""KTO without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import trl
import trl.trainer.kto_trainer as trl_kto

from .attention_choice import AttentionChoiceMixin
from .base import PaddingRemovalMixin
from .checks import require_columns
from .collators import check_padding_side, check_prompts, pad_left


__all__ = ["DataCollatorForUnpairedPreference", "KTOTrainer"]


@dataclass
class DataCollatorForUnpairedPreference(trl_kto.DataCollatorForUnpairedPreference):
    """
    TRL's collator for unpaired preferences, padding on the side you choose.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        max_length (`int`, *optional*):
            Longest sequence; longer ones are truncated before padding.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`, also of the mismatched completions of the KL term.

    Raises:
        ValueError: For another `padding_side`, for an empty completion, and for a left-padded row without a prompt
            token (its first token would be scored from padding).

    Example:

    ```python
    >>> from trl_padfix import DataCollatorForUnpairedPreference

    >>> collator = DataCollatorForUnpairedPreference(pad_token_id=0, padding_side="left")
    >>> batch = collator([
    ...     {"prompt_ids": [1, 2], "completion_ids": [3, 4], "label": True},
    ...     {"prompt_ids": [5], "completion_ids": [6], "label": False},
    ... ])
    >>> batch["input_ids"]
    tensor([[1, 2, 3, 4],
            [0, 0, 5, 6]])

    ```
    """

    padding_side: str = "right"

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        for i, example in enumerate(examples):
            if len(example["completion_ids"]) == 0:
                raise ValueError(
                    f"The completion of example {i} of the batch has no token: its log-probability would be 0 "
                    "whatever the model does. Drop the example, or end completions with an EOS token."
                )
        batch = super().torch_call(examples)
        if self.padding_side == "left":
            for prefix in ("", "KL_"):
                names = [f"{prefix}{name}" for name in ("input_ids", "attention_mask", "completion_mask")]
                if names[0] in batch:
                    # The two batches may have one shape, so each is moved by its own mask.
                    moved = pad_left({name.removeprefix(prefix): batch[name] for name in names})
                    check_prompts(moved, "every example", "")
                    batch |= {f"{prefix}{name}": value for name, value in moved.items()}
        return batch


class KTOTrainer(AttentionChoiceMixin, PaddingRemovalMixin, trl.KTOTrainer):
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
