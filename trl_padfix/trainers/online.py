"""
What trainers have in common that generate completions, and then score them together with their prompt.

The forwards that score them are packed. Generation is not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from datasets import Dataset
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..core.call.batch_metadata import Known, with_known_batch
from ..core.call.layout_of import LayoutKey
from .attention_choice import AttentionChoice
from .base import PaddingFreeMixin
from .batching.token_budget import Splitting
from .checkpoints.whole_checkpoints import WholeCheckpoints
from .checks import check_vocabulary, column_names, require_columns
from .context_parallel import ContextParallel
from .data.batch_metadata import attach_metadata
from .data.columns import blank_texts
from .data.precomputed_layouts import PrecomputedLayouts
from .data.row_checks import sound_rows
from .distributed import datasets_of
from .metrics.finite_values import FiniteValues
from .metrics.token_counts import TokenCounts
from .packing import Packing
from .parity import Parity
from .parts import entered
from .task import Task


__all__ = ["OnlineTask", "OnlineTrainer", "trained_tokens"]

logger = get_logger(__name__)


def trained_tokens(batch: dict[str, Any]) -> torch.Tensor:
    """How many tokens of completions are trained on; what tools answered is not."""
    mask = batch["completion_mask"]
    return (mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]).sum()


class OnlineTask(Task):
    """Rows are prompts with a completion each, in groups with one prompt."""

    layout_policy = False  # the data loader has prompts; see `OnlineLayouts`
    generates_for_groups = True

    scores = "_get_per_token_logps_and_entropies"
    """TRL's method with the forwards that score completions."""

    def check(self, config: Any, given: dict[str, Any]) -> None:
        splits = self.trainer.padding.settings.max_tokens_per_batch is not None
        if splits and not hasattr(super(OnlineTrainer, self.trainer), self.scores):
            raise ValueError(
                f"`max_tokens_per_batch` splits the forwards of `{self.scores}`, and TRL {trl.__version__} has no "
                "such method. Update TRL, or leave the budget out."
            )
        dataset = given.get("train_dataset")
        if dataset is not None and column_names(dataset) and given.get("environment_factory") is None:
            require_columns(dataset, "train", [{"prompt"}], "Completions are generated from `prompt`")

    def attached(self) -> None:
        trainer = self.trainer
        check_vocabulary(trainer.processing_class)
        trainer.train_dataset = sound_rows(trainer.train_dataset, "train", ("prompt",))
        for name, dataset in datasets_of(trainer).items():
            if name != "train":
                sound_rows(dataset, name, ("prompt",))
            self._check_prompts_of(dataset, name)

    def _check_prompts_of(self, dataset: Any, name: str) -> None:
        """
        Raises:
            ValueError: If texts of the dataset are no token, of those with nothing but white space.
        """
        if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
            return
        rows = blank_texts(dataset, "prompt")
        texts = dataset.select(rows)["prompt"] if len(rows) else []
        empty = [
            int(row)
            for row, text in zip(rows, texts, strict=True)
            if not self.trainer.processing_class(text=text)["input_ids"]
        ]
        if empty:
            raise ValueError(
                f"Prompts {empty[:5]} of the {name} dataset have no token ({len(empty)} in all): the first token of "
                "their completions would be sampled and scored from padding. Drop them, or give every prompt at least "
                "a BOS token."
            )

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return [{"input_ids": ids, "attention_mask": mask}]

    def compares_rows(self) -> bool:
        return True  # by the advantages of a generation; a step is one batch, whose forwards are split

    def loss_weight(self, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        balanced = getattr(self.trainer, "aux_loss_enabled", False)
        return None if balanced else len(piece["prompt_ids"]) / len(whole["prompt_ids"])

    def metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"": trained_tokens(batch)}

    def sums_over_rows(self) -> bool:
        """Whether the weight of a row in the loss is independent of the other rows of its micro-batch."""
        return True

    def may_group(self) -> bool:
        """
        Whether rows may change places between the micro-batches of one optimizer step.

        TRL shuffles the rows of a generation over its micro-batches, which scatters the completions of a prompt. An
        optimizer step is the same whichever of its micro-batches a row is in, as long as its loss is a sum over rows
        with weights that do not depend on their micro-batch, and the micro-batches of a generation fill whole steps.
        """
        trainer = self.trainer
        accumulated = trainer.args.gradient_accumulation_steps
        steps = getattr(trainer.args, "steps_per_generation", accumulated)
        whole = steps % accumulated == 0 or accumulated % steps == 0
        sharing = trainer.padding.is_removed and trainer.padding.settings.prefix_sharing
        balanced = getattr(trainer, "aux_loss_enabled", False)  # TRL 1.0 had no such loss in RLOO
        return bool(sharing and whole and self.sums_over_rows() and not balanced)


class OnlineLayouts(PrecomputedLayouts):
    """Layouts of rows that are generated: the host looks once for all micro-batches of a generation."""

    def rows(self, ids: torch.Tensor, mask: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """What the running step came with is known of these rows: TRL joins prompts and completions anew."""
        step = self.trainer.padding.running
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        key = LayoutKey.read({"input_ids": ids, "attention_mask": mask}, prefix_sharing=self.shares_by_ids())
        if (
            step is not None
            and step.batch_metadata is not None
            and step.batch_metadata.are_unwritten(step.inputs, *names)
        ):
            facts = step.batch_metadata.facts[""]
            if key is not None and tuple(ids.shape) == facts.layout.batch_shape:
                return with_known_batch(Known.of(key, facts))
        return contextlib.nullcontext()

    def with_layouts(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Micro-batches of a generation with their layouts: the host looks once, and in none of their steps."""
        padding = self.trainer.padding
        if not padding.handles or self.settings.max_tokens_per_batch is not None:
            return batches  # the budget computes them in pieces
        rows = [(*padding.task.padded_batches(b)[0].values(), b["completion_ids"].shape[1]) for b in batches]
        return attach_metadata(batches, rows, self.shares_by_ids())


class OnlineTrainer(PaddingFreeMixin):
    """[`PaddingFreeMixin`] for a TRL trainer that generates its completions; stands in front of TRL's class."""

    task_class = OnlineTask
    part_classes = (
        AttentionChoice, Packing, ContextParallel, Parity, OnlineLayouts, Splitting, TokenCounts, FiniteValues,
        WholeCheckpoints,
    )  # fmt: skip

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        if empty := sum(len(ids) == 0 for ids in tokenized[0]):
            logger.warning(
                f"{empty} prompts of the batch have no token: the first token of their completions is sampled and "
                "scored from padding, as TRL does it. Drop them, or give every prompt at least a BOS token."
            )
        return tokenized

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        # Cached calls would pass through; this leaves generation without a cache and paged generation alone too.
        with entered(handle.disabled() for handle in self.padding.handles):
            completed = super()._generate_single_turn(*args, **kwargs)
        return self.padding.part(ContextParallel).broadcast_from_first(completed)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.padding.part(ContextParallel).generating(inputs):
            return super()._generate_and_score_completions(inputs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if (size := self.padding.part(ContextParallel).size) > 1:
            sampler.batch_size //= size  # TRL counts the prompts of all processes
        return sampler

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self.padding.part(Splitting).budget is not None:
            batch_size = len(input_ids)  # the budget says how many rows are computed at once
        with self.scoring(input_ids, attention_mask):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs
            )

    @contextlib.contextmanager
    def scoring(self, ids: torch.Tensor, mask: torch.Tensor) -> Iterator[None]:
        """A block with a forward that scores completions: with the layout of the running step, split by the budget."""
        with self.padding.part(Splitting).splitting(ids, mask), self.padding.part(OnlineLayouts).rows(ids, mask):
            yield

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self.padding.part(TokenCounts).counters["train" if self.model.training else "eval"].start()
        task, layouts = self.padding.task, self.padding.part(OnlineLayouts)
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before:
            return inputs if self.model.training else layouts.with_layouts([inputs])[0]
        if task.may_group():
            window = min(self.args.gradient_accumulation_steps, len(self._buffered_inputs))
            self._buffered_inputs = group_prompts(self._buffered_inputs, window)
        self._buffered_inputs = layouts.with_layouts(self._buffered_inputs)
        return self._buffered_inputs[self._step % len(self._buffered_inputs)]


def group_prompts(batches: list[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """
    Bring rows with one prompt, and the same images, together within each `window` of micro-batches.

    Args:
        batches (`list[dict]`):
            Micro-batches with `prompt_ids` of shape `(B, P)`; every value that is no scalar has `B` rows, but for the
            images of TRL's batches, of which each row has as many as `num_images` says.
        window (`int`):
            Micro-batches of one optimizer step; divides their number.

    Returns:
        `list[dict]`: as many micro-batches of the same sizes.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix.trainers.online import group_prompts

    >>> batches = [{"prompt_ids": torch.tensor([[1], [2]])}, {"prompt_ids": torch.tensor([[2], [1]])}]
    >>> [batch["prompt_ids"].tolist() for batch in group_prompts(batches, window=2)]
    [[[1], [1]], [[2], [2]]]

    ```
    """
    grouped: list[dict[str, Any]] = []
    for begin in range(0, len(batches), window):
        step = [split_pixel_values_by_grid(batch) for batch in batches[begin : begin + window]]
        keys = torch.cat([torch.cat([b["prompt_ids"], _image_keys(b)], dim=1) for b in step])
        order = keys.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
        rows = [len(b["prompt_ids"]) for b in step]
        columns = {}
        for name, value in step[0].items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                columns[name] = torch.cat([b[name] for b in step])[order].split(rows)
            elif isinstance(value, list):
                joined = [v for b in step for v in b[name]]
                columns[name] = _split([joined[i] for i in order.tolist()], rows)
            else:
                columns[name] = [b[name] for b in step]
        parted = ({name: values[i] for name, values in columns.items()} for i in range(len(step)))
        grouped += [unsplit_pixel_values_by_grid(batch) for batch in parted]
    return grouped


def _image_keys(batch: dict[str, Any]) -> torch.Tensor:
    """A number for the images of each row of a batch that was split by rows, `(B, 1)`; 0 without any."""
    ids, pixels = batch["prompt_ids"], batch.get("pixel_values")
    if pixels is None or len(pixels) != len(ids):
        return ids.new_zeros(len(ids), 1)
    sums = [row.double().sum() for row in pixels]
    return torch.stack(sums).view(torch.int64).to(ids)[:, None]


def _split(values: list[Any], sizes: list[int]) -> list[list[Any]]:
    iterator = iter(values)
    return [[next(iterator) for _ in range(size)] for size in sizes]
