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
from datasets import Dataset

from .base import PaddingFreeMixin
from .batching.measures import UnpairedMeasure
from .batching.sub_batches import splitting
from .data.collators import SidedCollator
from .data.vision_collators import VisionCollator, on_side_with_kl
from .field_types import temporarily_set
from .task import Task


__all__ = ["DataCollatorForUnpairedPreference", "KTOTrainer"]


@dataclass
class DataCollatorForUnpairedPreference(SidedCollator, trl_kto.DataCollatorForUnpairedPreference):
    """
    TRL's collator for unpaired preferences, padding on the side you choose.

    Of `B` rows it makes `input_ids`, `attention_mask` and `completion_mask`, each a `torch.Tensor` of shape `(B, L)`,
    and `label`, of `B` entries; of rows with `KL_completion_ids` also `KL_input_ids` and its masks.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        max_length (`int`, *optional*):
            Longest sequence; longer ones are truncated before padding.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`, also of the mismatched completions of the KL term.
        for_trainer (`bool`, *optional*, defaults to `False`):
            Whether rows that cannot be scored as they should be are counted in `odd_rows` and warned about, instead of
            being errors. Trainers, which have checked their data before the first step, set it.

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

    texts, example = {"completion_ids": "completion"}, "example"

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        examples = self.without_unknown_ids(examples)
        self.refuse_empty(examples)
        return on_side_with_kl(self, super().torch_call(examples))


@dataclass
class DataCollatorForVisionUnpairedPreference(VisionCollator, trl_kto.DataCollatorForVisionUnpairedPreference):
    """TRL's collator for unpaired preferences with images, padding on `padding_side`, also for the KL term."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        self.refuse_cut(batch, len(examples), "examples")
        return on_side_with_kl(self, batch)


class KTOTask(Task):
    """Completions with a verdict, and those of other prompts for the KL term."""

    columns = [{"prompt", "completion", "label"}, {"chosen", "rejected"}]
    needs = "KTO needs `prompt`, `completion` and `label`, or pairs with `chosen` and `rejected`"
    texts = ("prompt", "completion", "chosen", "rejected")
    layout_policy = True
    collators = {
        trl_kto.DataCollatorForUnpairedPreference: DataCollatorForUnpairedPreference,
        trl_kto.DataCollatorForVisionUnpairedPreference: DataCollatorForVisionUnpairedPreference,
    }
    measure = UnpairedMeasure

    def check_prepared(self, prepared: Dataset, rows: int, given: Any) -> None:
        DataCollatorForUnpairedPreference.refuse_empty_in(prepared, given.dataset_name)

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        batches = super().padded_batches(inputs)
        if self.trainer.calculate_KL:
            batches.append({name: inputs[f"KL_{name}"] for name in ("input_ids", "attention_mask")})
        return batches

    def compares_rows(self) -> bool:
        return True  # by the KL term, a mean over all of them

    def loss_weight(self, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        return None if self.trainer.aux_loss_enabled else len(piece["input_ids"]) / len(whole["input_ids"])

    @contextlib.contextmanager
    def in_pieces(self, inputs: dict[str, Any], splits: Any) -> Iterator[dict[str, Any]]:
        """The KL term is that of all rows, of all processes: its log-probabilities are taken with the first piece."""
        trainer, compute = self.trainer, self.trainer._compute_kl_logps
        found: dict[bool, torch.Tensor] = {}

        def mean(logps: torch.Tensor) -> torch.Tensor:
            return reduce(logps.mean(), "mean")[None]

        def of_all_rows(model: Any, batch: dict[str, Any]) -> torch.Tensor:
            of_policy = torch.is_grad_enabled()  # TRL asks for those of the reference without
            if of_policy not in found:
                with splitting(splits):
                    found[of_policy] = mean(compute(model, inputs))
            return found[of_policy]

        if not trainer.calculate_KL:
            yield inputs
            return
        known = inputs.get("ref_KL_logps")
        with temporarily_set(trainer, "_compute_kl_logps", of_all_rows):
            yield inputs if known is None else {**inputs, "ref_KL_logps": mean(known).expand(len(known))}

    def metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        tokens = batch["completion_mask"][:, 1:].sum(1)
        chosen = torch.as_tensor(batch["label"], dtype=torch.bool, device=tokens.device)
        items = {"": torch.tensor(len(chosen)), "entropy": tokens.sum()}
        for name, rows in (("chosen", chosen), ("rejected", ~chosen)):
            items |= {f"rewards/{name}": rows.sum(), f"logps/{name}": rows.sum(), f"logits/{name}": tokens[rows].sum()}
        return items

    def joined_metrics(self, means: dict[str, float]) -> dict[str, float]:
        chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
        if chosen is not None and rejected is not None:  # a piece with one kind of rows has no margins
            means["rewards/margins"] = chosen - rejected
        return means

    def parity_inputs(self, inputs: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        if batch["input_ids"] is not inputs.get("KL_input_ids"):
            return inputs
        return inputs | {k.removeprefix("KL_"): v for k, v in inputs.items() if k.startswith("KL_")}


class KTOTrainer(PaddingFreeMixin, trl.KTOTrainer):
    """
    TRL's [`~trl.KTOTrainer`] without padding, as [`DPOTrainer`] is: also in the forward of the mismatched completions
    of the KL term, which the logged `padfix/` metrics count, too. `prefix_sharing=True` shares within each of both.

    Args:
        *args, **kwargs:
            As [`~trl.KTOTrainer`]. `args` may be this package's [`KTOConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`].
        ValueError: For missing columns, empty completions, and no pad token.

    Example:

    ```python
    from trl_padfix import KTOConfig, KTOTrainer

    args = KTOConfig(output_dir="runs/kto", padding_free=True, prefix_sharing=True)
    trainer = KTOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=judged)
    trainer.train()  # columns of the data: prompt, completion, label
    ```
    """

    task_class = KTOTask
