"""
Training batches by token budget.

A batch of the data loader is one optimizer step. The sampler deals its rows out to the processes with even work, the
collator splits those of a process into micro-batches, and `training_step` runs them one after another. A step has the
rows that it has without a budget, and each row weighs what it weighs in TRL's mean over micro-batches.

A loss that compares the rows of a forward, or balances experts over it, is computed from all rows of a process at
once, and its forwards are split (`sub_batches.py`), as are those of an evaluation. Where rows are compared without
gradients only (the KL term of KTO, the advantages of GRPO), the rest of the loss is computed in pieces of rows.
Forwards with images are never split: images go with their rows as long as their collator makes the batches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from accelerate.utils import gather as accelerate_gather
from datasets import Dataset

from ...core.model.find import find_pretrained
from ...core.model.patching import Attachment
from ..checks import column_names, rope_kind_beyond
from ..custom_loss import has_own_loss, has_replaced_loss
from ..data.batch_metadata import LayoutCollator
from ..distributed import datasets_of, is_zero_3, models_of, splitting_parallelism
from ..field_types import temporarily_set
from ..parts import Part, Step
from .config import check_token_budget
from .image_measures import ImageMeasure, check_images_of_processes, measure_images
from .micro_batches import MICRO_BATCHES, ONCE, WEIGHTS, BudgetCollator, Piece, halved
from .prefix_schedule import REPLAN, MicroBatchRunner, computes_once
from .sampler import StepDataset, StepOrder
from .step_metrics import StepMetrics
from .sub_batches import Splits, attach_splitting, joins_balancing_losses, running_pieces, splitting


__all__ = ["Budget", "Splitting"]

logger = get_logger(__name__)


class Splitting(Part):
    """Forwards that are split by `max_tokens_per_batch`."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._attached: list[Attachment] = []

    @property
    def budget(self) -> int | None:
        """
        Most tokens of a forward.

        Where `auto_find_batch_size` has lowered the batch size after a forward that did not fit into memory, it is
        lowered as much: what a forward needs goes by its tokens, and a step keeps its rows.
        """
        budget, args = self.settings.max_tokens_per_batch, self.trainer.args
        return budget and max(budget * self.trainer._train_batch_size // args.train_batch_size, 1)

    def check(self, config: Any, given: dict[str, Any]) -> None:
        check_token_budget(config)

    def attach(self) -> None:
        if self.settings.max_tokens_per_batch is None:
            return
        if reason := self.reason_not_to_split():
            raise ValueError(
                f"{reason}, so the loss of a batch is not the mean of the losses of its pieces, and "
                "`max_tokens_per_batch` cannot split it. Leave one of them out."
            )
        if has_own_loss(self.trainer):
            logger.warning(
                f"`max_tokens_per_batch`: whether the loss of {type(self.trainer).__name__} compares rows is unknown, "
                "so it is computed from all rows of a step at once. All pieces of its forward but one are computed "
                "again in the backward pass."
            )
        modules = map(self.trainer.padding.task.scoring_module, models_of(self.trainer))
        self._attached = [attach_splitting(module) for module in modules]

    def restore(self) -> None:
        for attachment in self._attached:
            attachment.remove()

    def reason_not_to_split(self) -> str | None:
        """Why the loss of a batch depends on which rows are in one forward, if it does."""
        trainer, task = self.trainer, self.trainer.padding.task
        if reason := task.reason_not_to_split():
            return reason
        if task.compares_rows() and trainer.is_deepspeed_enabled:
            return (
                "The loss compares rows (or is your own), and DeepSpeed does not compute forwards a second time "
                "within a backward"
            )
        if self.has_images() and task.compares_rows():
            return (
                "The loss compares rows (or is your own): its forwards are cut by rows, and which of the images in a "
                "batch belong to which row is not known there"
            )
        if getattr(trainer, "aux_loss_enabled", False) and not joins_balancing_losses():
            return (
                f"TRL {trl.__version__} takes the load-balancing loss of experts (`router_aux_loss_coef`) with the "
                "model's own loss, over a whole forward"
            )
        if splitting_parallelism(trainer.accelerator, "tp_size"):
            return "Under tensor parallelism several processes compute one batch"
        if kind := rope_kind_beyond(trainer.model, getattr(trainer.args, "max_length", None)):
            return f"The model's {kind!r} rotary embedding depends on the longest row of a forward"
        return None

    def has_images(self) -> bool:
        return any(column_names(dataset) & {"image", "images"} for dataset in datasets_of(self.trainer).values())

    def splitting(self, *joined: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """
        A block whose forwards are split by the budget, if there is one; those of rows with images are not.

        Where the loss is computed in pieces of rows, each of them is one forward: of the ids and the mask that it has
        `joined`, if they are not those of its batch.
        """
        running = running_pieces()
        if running is not None and joined:
            running.joined(*joined)
        if self.budget is None or self.has_images() or running is not None:
            return contextlib.nullcontext()
        return splitting(self._splits(self.budget))

    def _splits(self, budget: int) -> Splits:
        handle = self.trainer.padding.handle
        agree = self.most_over_processes if self._is_sharded else None
        return Splits(budget, bool(handle and handle.prefix_sharing), agree, self.once and agree is None)

    def compute_loss(self, compute: Callable, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """
        TRL's `compute_loss`, `compute`.

        A loss that is a sum over rows, once what it compares of them is known, is computed in pieces of rows: each has
        its forward and its backward, but for the last one, whose backward is Trainer's.
        """
        trainer, task = self.trainer, self.trainer.padding.task
        if self.budget is None or not self._is_sum_over_rows(inputs):
            return compute(model, inputs, *args, **kwargs)
        splits = self._splits(self.budget)
        known = splits.of(*task.padded_batches(inputs)[0].values())
        if len(known.rows) == 1 and trainer.accelerator.num_processes == 1:
            return compute(model, inputs, *args, **kwargs)
        with task.in_pieces(inputs, splits) as inputs:
            pieces = [_rows_of(inputs, rows, sum(map(len, known.rows))) for rows in known.rows]
            running = MicroBatchRunner(
                len(pieces), known.once, [tuple(task.padded_batches(piece)[0].values()) for piece in pieces]
            )
            loss = done = torch.zeros((), device=trainer.args.device)
            with self._running(running) as metrics:
                for i, piece in enumerate(pieces):
                    sizes, weight = task.metric_items(piece), task.loss_weight(piece, inputs)
                    with self._piece(running, model, i), metrics.piece(sizes, reduces=False):
                        loss = compute(model, piece, *args, **kwargs) * weight
                        if i < len(pieces) - 1:
                            with torch.autocast(loss.device.type, enabled=False):
                                trainer.accelerator.backward(loss)
                            done = done + loss.detach()
        metrics.join()
        return loss + done

    @contextlib.contextmanager
    def _running(self, pieces: MicroBatchRunner) -> Iterator[StepMetrics]:
        """A block with the pieces of a step, one after another."""
        with splitting(pieces):
            yield StepMetrics(self.trainer)
        pieces.check()
        if pieces.are_written:
            logger.warning_once(
                "Somebody wrote to a micro-batch after its step was planned: from there on each micro-batch of such a "
                "step computes the prefixes that it shares with others anew."
            )
        if pieces.planned is not None and self.trainer.state.global_step == 0:
            logger.info(pieces.planned.summary)

    @contextlib.contextmanager
    def _piece(self, running: MicroBatchRunner, model: Any, i: int) -> Iterator[None]:
        """A block with piece `i`: gradients are reduced over processes with those of the last one."""
        running.begin(i)
        accelerator, last = self.trainer.accelerator, i == running.count - 1
        state = accelerator.gradient_state
        each = state.plugin_kwargs.get("sync_each_batch", False)
        waits = not (last or each or accelerator.distributed_type == DistributedType.DEEPSPEED)
        saved = state.sync_gradients
        state._set_sync_gradients(saved and last)
        try:
            with accelerator.no_sync(model) if waits else contextlib.nullcontext():
                yield
        finally:
            state._set_sync_gradients(saved)

    def _is_sum_over_rows(self, inputs: dict[str, Any]) -> bool:
        """Whether the loss of a batch is the sum of those of its rows, with weights that are known."""
        trainer, task = self.trainer, self.trainer.padding.task
        if not (torch.is_grad_enabled() and trainer.model.training and task.compares_rows()) or self.has_images():
            return False
        is_known = not (has_own_loss(trainer) or has_replaced_loss(trainer))
        whole_step = trainer.args.gradient_accumulation_steps == 1
        return is_known and whole_step and task.loss_weight(inputs, inputs) is not None

    @cached_property
    def once(self) -> bool:
        """Whether prefixes are computed once in a step, and not by each piece; said once where they cannot be."""
        if self.budget is None:
            return False
        # Under FSDP2 processes agree on their forwards; ZeRO-3 and FSDP1 expect modules in one order.
        trainer, task = self.trainer, self.trainer.padding.task
        agrees = getattr(trainer.accelerator, "is_fsdp2", False) and not task.compares_rows()
        for model in map(task.scoring_module, models_of(trainer)):
            agrees = agrees and "logits_to_keep" in inspect.signature(type(find_pretrained(model)).forward).parameters
        return computes_once(trainer.padding.handles, trainer.args, self._is_sharded and not agrees)

    @property
    def _is_sharded(self) -> bool:
        """Whether processes meet in every forward, and not only at the end of the step."""
        return self.trainer.is_fsdp_enabled or is_zero_3(self.trainer.accelerator)

    def most_over_processes(self, count: int) -> int:
        if self.trainer.accelerator.num_processes == 1:
            return count
        counts = torch.tensor([count], device=self.trainer.args.device)
        return int(accelerate_gather(counts).max())

    def precomputing(self) -> contextlib.AbstractContextManager[None]:
        return self.splitting()


class Budget(Splitting):
    """Micro-batches of `max_tokens_per_batch`, in the steps of a [`StepOrder`]."""

    weight: float | None = None
    """Weight of the running micro-batch in the loss of its step, where its loss is a mean over its rows."""

    def check(self, config: Any, given: dict[str, Any]) -> None:
        super().check(config, given)
        if self.settings.max_tokens_per_batch is None:
            return
        if config.gradient_accumulation_steps > 1:
            raise ValueError(
                f"`max_tokens_per_batch` was set after the configuration was made, with "
                f"`gradient_accumulation_steps={config.gradient_accumulation_steps}`. The budget says in how many "
                "pieces a batch is computed: pass it to the configuration, which counts the batch of a step anew."
            )
        if config.accelerator_config.split_batches or not config.accelerator_config.even_batches:
            raise ValueError(
                "`max_tokens_per_batch` deals equally many rows to every process: leave `split_batches` and "
                "`even_batches` out of `accelerator_config`."
            )
        if config.neftune_noise_alpha is not None:
            raise ValueError(
                f"`neftune_noise_alpha={config.neftune_noise_alpha}` adds noise whose size depends on the length of a "
                "padded batch, and `max_tokens_per_batch` makes other batches. Leave one of them out."
            )
        if not isinstance(given.get("train_dataset"), Dataset | None):
            raise ValueError(
                f"`max_tokens_per_batch` plans an epoch by the lengths of all its rows, and the training dataset is a "
                f"`{type(given['train_dataset']).__name__}`. Give a `datasets.Dataset` (of a stream "
                "`Dataset.from_generator`), or leave the budget out."
            )

    @contextlib.contextmanager
    def loading(self, dataset: Any, is_training: bool) -> Iterator[None]:
        if not is_training or self.budget is None:
            yield
            return
        trainer, task, order = self.trainer, self.trainer.padding.task, self.trainer.padding.part(StepOrder)
        order.steps = order.plan()
        rows = trainer._remove_unused_columns(dataset, description="training")
        order.images = self._measured_images(rows) if self.has_images() else None
        how = {"whole": task.compares_rows(), "by_tokens": task.averages_tokens(), "once": self.once}
        how["plans"] = self.once and not self._is_sharded
        collator = BudgetCollator(trainer.data_collator, order.measure(), self.budget, order.steps, **how)
        # An item is a step of a process; the plan has left out the rows that are to be dropped.
        fields = {"train_dataset": StepDataset(rows, order.steps), "data_collator": collator, "_train_batch_size": 1}
        with contextlib.ExitStack() as stack:
            for name, value in fields.items():
                stack.enter_context(temporarily_set(trainer, name, value))
            stack.enter_context(temporarily_set(trainer.args, "dataloader_drop_last", False))
            yield

    def _measured_images(self, rows: Dataset) -> ImageMeasure:
        trainer, collator = self.trainer, self.trainer.data_collator
        measure = measure_images(
            rows,
            collator.collator if isinstance(collator, LayoutCollator) else collator,
            sharing=bool(self.settings.prefix_sharing),
            processes=(trainer.accelerator.process_index, trainer.accelerator.num_processes),
            workers=getattr(trainer.args, "dataset_num_proc", None),
        )
        if trainer.accelerator.num_processes > 1:
            check_images_of_processes(measure)
        return measure

    def training_step(self, train: Callable, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's `training_step`, `train`, on each micro-batch of a step, as [`BudgetCollator`] makes them."""
        pieces: list[Piece] = list(zip(inputs[MICRO_BATCHES], inputs[WEIGHTS], strict=True))
        task = self.trainer.padding.task
        if task.compares_rows():
            return train(model, pieces[0][0], *args, **kwargs)
        counts_tokens = any(value is not None for value in (*args, *kwargs.values()))
        pieces = halved(pieces, self.most_over_processes(len(pieces)), task.rows_per_item)
        loss = torch.zeros((), device=self.trainer.args.device)
        running = self._micro_batches(pieces, inputs)
        with self._running(running) as metrics, temporarily_set(self, "weight", None):
            for i, (batch, weight) in enumerate(pieces):
                # A piece without a weight only keeps step with the other processes.
                self.weight = None if counts_tokens and weight else weight
                sizes = self._sizes(batch, weight, counts_tokens)
                with self._piece(running, model, i), metrics.piece(sizes):
                    loss = loss + train(model, batch, *args, **kwargs)
        metrics.join(sum(int(batch["attention_mask"].sum()) for batch, weight in pieces if not weight))
        return loss

    def _sizes(self, batch: dict[str, Any], weight: float, counts_tokens: bool) -> dict[str, Any]:
        """Of how many items the metrics of a micro-batch are means."""
        task = self.trainer.padding.task
        rest = task.loss_items(batch) if counts_tokens else weight
        return {"": rest, **task.metric_items(batch)} if weight else {"": 0}

    def _micro_batches(self, pieces: list[Piece], inputs: dict[str, Any]) -> MicroBatchRunner:
        """The micro-batches of a step, which see each other's prefixes if they have any in common."""
        if not self.once or len(pieces) == 1:
            return MicroBatchRunner(len(pieces))
        planned = inputs.get(ONCE) if len(pieces) == len(inputs[MICRO_BATCHES]) else REPLAN
        gather = gather_object if self._is_sharded else None
        return MicroBatchRunner.of([batch for batch, _ in pieces], planned, self.budget, gather)

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        split = step.mode == "eval" or self.trainer.padding.task.compares_rows()
        with self.splitting() if split else contextlib.nullcontext():
            yield
        if self.weight is not None:
            step.result = step.result * self.weight


def _rows_of(inputs: dict[str, Any], rows: torch.Tensor, count: int) -> dict[str, Any]:
    """Some rows of a batch of `count`; what has no entry for each row stays whole."""
    found = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == count:
            found[name] = value[rows]
        elif isinstance(value, list) and len(value) == count:
            found[name] = [value[i] for i in rows.tolist()]
    return found
