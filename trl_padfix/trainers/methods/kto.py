"""KTO without padding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import trl
import trl.trainer.kto_trainer as trl_kto
from accelerate.utils import reduce

from ...core.context import context, temporarily_set, within
from ..base import PaddingFreeMixin
from ..data.collators import UnpairedMixin
from ..task import Task


__all__ = ["DataCollatorForUnpairedPreference", "KTOTrainer"]


@dataclass
class DataCollatorForUnpairedPreference(UnpairedMixin, trl_kto.DataCollatorForUnpairedPreference):
    """
    TRL's collator for unpaired preferences, padding on the side you choose.

    It collates `B` rows into `input_ids`, `attention_mask` and `completion_mask`, each a `torch.Tensor` of shape
    `(B, L)`, and `label`, of `B` entries. Rows with `KL_completion_ids` also give `KL_input_ids` and its masks.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        max_length (`int`, *optional*):
            Longest sequence; longer ones are truncated before padding.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`, also for the mismatched completions of the KL term.

    Raises:
        ValueError: For an invalid `padding_side`.

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


@dataclass
class DataCollatorForVisionUnpairedPreference(UnpairedMixin, trl_kto.DataCollatorForVisionUnpairedPreference):
    """TRL's collator for unpaired preferences with images, padding on `padding_side`, also for the KL term."""


class KTOTask(Task):
    """Rows are completions with a label; the KL term has rows with completions of other prompts."""

    generates_rows = False
    collators = {
        trl_kto.DataCollatorForUnpairedPreference: DataCollatorForUnpairedPreference,
        trl_kto.DataCollatorForVisionUnpairedPreference: DataCollatorForVisionUnpairedPreference,
    }
    sequences = (("prompt_ids", "completion_ids"),)

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        batches = super().padded_batches(inputs)
        if self.trainer.calculate_KL:
            batches.append({name: inputs[f"KL_{name}"] for name in ("input_ids", "attention_mask")})
        return batches

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        return len(chunk["input_ids"]) / len(batch["input_ids"])

    @contextlib.contextmanager
    def around_chunks(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Compute the KL term once, with the first chunk, from all rows of all processes."""
        trainer, compute, of_all_rows = self.trainer, self.trainer._compute_kl_logps, context().runner
        kl_means: dict[bool, torch.Tensor] = {}  # the policy's under `True`, the reference's under `False`

        def mean(logps: torch.Tensor) -> torch.Tensor:
            return reduce(logps.mean(), "mean")[None]

        def kl_logps(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            of_policy = torch.is_grad_enabled()  # TRL computes the reference without gradients
            if of_policy not in kl_means:
                with within(runner=of_all_rows):
                    kl_means[of_policy] = mean(compute(model, inputs))
            return kl_means[of_policy]

        if not trainer.calculate_KL:
            yield inputs
            return
        batch = inputs
        if (precomputed := inputs.get("ref_KL_logps")) is not None:
            # TRL takes the mean of these values over the rows of a chunk. Each value is the mean of all rows, so every
            # chunk gets that mean.
            batch = {**inputs, "ref_KL_logps": mean(precomputed).expand(len(precomputed))}
        with temporarily_set(trainer, _compute_kl_logps=kl_logps):
            yield batch

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        tokens = batch["completion_mask"][:, 1:].sum(1)
        chosen = torch.as_tensor(batch["label"], dtype=torch.bool, device=tokens.device)
        items = {"": torch.tensor(len(chosen)), "entropy": tokens.sum()}
        for name, rows in (("chosen", chosen), ("rejected", ~chosen)):
            items |= {f"rewards/{name}": rows.sum(), f"logps/{name}": rows.sum(), f"logits/{name}": tokens[rows].sum()}
        return items

    def merge_metrics(self, means: dict[str, float]) -> dict[str, float]:
        chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
        if chosen is not None and rejected is not None:  # a chunk with rows of one kind has no margins
            means["rewards/margins"] = chosen - rejected
        return means

    def parity_inputs(self, inputs: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        if batch["input_ids"] is not inputs.get("KL_input_ids"):
            return inputs
        return inputs | {k.removeprefix("KL_"): v for k, v in inputs.items() if k.startswith("KL_")}


class KTOTrainer(PaddingFreeMixin, trl.KTOTrainer):
    """
    TRL's [`~trl.KTOTrainer`] without padding, like [`DPOTrainer`].

    The forward of the mismatched completions of the KL term is packed, too, and the logged `padfix/` metrics count it.
    `prefix_sharing` shares prefixes within each of the two forwards.

    Args:
        *args, **kwargs:
            As [`~trl.KTOTrainer`]. `args` may be this package's [`KTOConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`].
        ValueError, KeyError: TRL's, for missing columns, and no pad token.

    Example:

    ```python
    from trl_padfix import KTOConfig, KTOTrainer

    args = KTOConfig(output_dir="runs/kto", padding_free=True, prefix_sharing="auto")
    trainer = KTOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=judged)
    trainer.train()  # columns of the data: prompt, completion, label
    ```
    """

    task_class = KTOTask
