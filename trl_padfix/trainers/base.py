"""
The mixin that removes padding from a TRL trainer.

It attaches `remove_padding` to the policy and the reference, lets the default collator honour the padding side,
runs the parity check on the first batches and counts tokens. Losses, metrics and the loop are TRL's.

A new trainer is one file with a class `class XTrainer(PaddingRemovalMixin, trl.XTrainer)`, and one line in `_MODULES`
of `trl_padfix/__init__.py`. It fills in what differs from the defaults:

- `_collators`: TRL's collators and ours for them, if the padding side is to be honoured.
- `_takes_images`: `False` if data with images is refused.
- `_check_before(config, given)`: errors that are better raised before a model is loaded.
- `_prepare_dataset(...)` (TRL's): errors and warnings about the data, before and after TRL has tokenized it.
- `_padded_batches(inputs)`: ids and mask of each forward of the policy, if the batch names them differently.
- `_takes_layouts`: `True` if every forward of a step, and of an evaluation, is within `compute_loss`.
- `_wrap_model_for_loss(model)`: if TRL's loss hands the model something that it must not see.
- `_packing_options()`: more arguments of `remove_padding`.
- `observe_step(model, inputs)`: a context for the forwards of a step, if TRL computes them outside `compute_loss`.
- `_loss_items`, `_metric_items`, `_rows_per_item`: only for `ExactEvalMixin` and `BudgetMixin`.
- `_compares_rows()`: only for `SplittingMixin`, which splits forwards for `max_tokens_per_batch`.
- `_row_measure()`, `_averages_tokens()`: only for `BudgetMixin`, with which come micro-batches and `group_by_prefix`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset

from ..core.call.layout_of import step_layouts
from ..core.errors import PaddingRemovalError
from ..core.handle import PaddingRemoval
from ..core.layout.layout import Layout
from ..core.model.find import find_decoder, find_multimodal, find_pretrained
from ..core.model.patching import Attachment
from ..core.parity import check_parity
from ..core.remove import attachments_of, number_padded_rows, remove_padding
from .cards import card_tags, describe_in_card
from .checks import (
    check_model,
    check_settings,
    check_tokenizer,
    check_vision,
    column_names,
    explain_missing_flash_attention,
    is_zero_3,
    refuse_images,
    refuse_whole_rows,
    require_rows,
    splitting_parallelism,
)
from .compilation import CompilationMixin
from .data.batch_layouts import LayoutLoadingMixin, without_layouts
from .data.row_checks import check_ids, image_token_ids
from .field_types import check_field_types, check_processing_class, temporarily_set
from .saving.whole_checkpoints import WholeCheckpointsMixin
from .watch.finite import FiniteMixin, check_weights
from .watch.token_counts import TokenCounter, TokenCountsMixin


__all__ = ["PaddingRemovalMixin"]

logger = get_logger(__name__)


class PaddingRemovalMixin(TokenCountsMixin, LayoutLoadingMixin, CompilationMixin, WholeCheckpointsMixin, FiniteMixin):
    """
    Padding removal for a TRL trainer; stands in front of TRL's class.

    A configuration of this package switches it with its fields; a plain one of TRL's is taken as it is, its
    `padding_free` honoured.
    """

    _collators: dict[type, type] = {}
    """TRL's collators, and the collators of this package that replace them."""

    _takes_images = True
    """Whether image data is left to TRL and to `remove_padding` to accept or refuse."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `inspect.signature`, `help` and notebooks show the parameters of TRL's class; so does pyright, which does not
        # see the `__init__` of the mixins.
        package = __name__.partition(".")[0]
        owner = next(c for c in cls.__mro__ if "__init__" in vars(c) and c.__module__.partition(".")[0] != package)
        if owner is not object:
            signature = inspect.signature(owner.__init__)
            cls.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
            config = given.get("args")
            self._handles: list[PaddingRemoval] = []
            self._attachments: list[Attachment] = []
            self._parity_pending = {"train", "eval"}
            self._token_counters = {"train": TokenCounter(), "eval": TokenCounter()}
            self._is_observing = False
            self._undo_call_event = contextlib.ExitStack()
            self._removes_padding = bool(getattr(config, "padding_free", False))
            self._check_before(config, given)
            try:
                # TRL warns that its own padding-free is off (0.29 and later) or refuses it; the decoder does it here.
                with temporarily_set(config, "padding_free", False), self._without_whole_compilation(config):
                    super().__init__(*args, **kwargs)
                self.padding_free = self._removes_padding
                self._set_up_padding()
                self._compile_layers()
                self._check_images()
                self._check_values()
                self._keep_padding_side()
            except BaseException as error:
                self.restore_padding()
                if isinstance(error, ImportError):
                    explain_missing_flash_attention(error)
                raise

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        """Errors that are better raised before a model is loaded. `given` are the arguments of `__init__` by name."""
        check_field_types(config)
        check_processing_class(given.get("processing_class"))
        check_settings(config, given.get("data_collator"), self._collators)
        check_model(given.get("model"), self._removes_padding)
        check_tokenizer(given.get("processing_class"))
        require_rows(given.get("train_dataset"), "train")
        if self._removes_padding and not self._takes_images:
            refuse_images(given.get("train_dataset"))

    def _set_up_padding(self) -> None:
        """Attach, and set the collator's side. Called again after `__init__`, where TRL needed it earlier."""
        models = [m for m in (self.model, getattr(self, "ref_model", None)) if m is not None]
        self._set_up_collator()
        if self._handles or self._attachments:
            return
        # A trainer before this one may have left its own on the models, as training in stages does.
        for attachment in (a for model in models for a in attachments_of(model) if a.is_trainers):
            attachment.remove()
        if not self._removes_padding:
            is_ours = type(self.data_collator) in self._collators.values()
            if is_ours and self.data_collator.padding_side == "left":
                self._attachments = [n for n in map(number_padded_rows, models) if n is not None]
            for numbering in self._attachments:
                numbering.is_trainers = True
            return
        self._check_launch()
        for model in models:
            self._handles.append(remove_padding(model, **self._packing_options()))
            self._handles[-1].is_trainers = True
            if self._shards_parameters():
                refuse_whole_rows(self._handles[-1])

    def _set_up_collator(self) -> None:
        """Replace TRL's default collator by ours, on the wanted side; one of ours leaves odd rows to the trainer."""
        collator, ours = self.data_collator, self._collators.get(type(self.data_collator))
        if ours is not None:
            tokenizer = getattr(self, "_tokenizer", self.processing_class)
            side = getattr(self.args, "padding_side", None) or tokenizer.padding_side
            given = {f.name: getattr(collator, f.name) for f in fields(collator)}
            self.data_collator = ours(**given, padding_side=side, for_trainer=True, **self._known_ids())
        elif type(collator) in self._collators.values() and is_dataclass(collator):
            self.data_collator = replace(collator, for_trainer=True, **self._known_ids())

    def _known_ids(self) -> dict[str, Any]:
        """What rows are looked at for as they come, where they cannot be before the first step."""
        with_images = getattr(self, "_is_vision_dataset", False)  # they are tokenized batch by batch
        if not with_images and all(isinstance(d, Dataset) for d in self._datasets().values() if d is not None):
            return {}
        stand_ins = image_token_ids(find_pretrained(self.model).config) if with_images else frozenset()
        return {"vocabulary": self._vocabulary(), "stand_ins": stand_ins}

    def _packing_options(self) -> dict[str, Any]:
        """Keyword arguments of `remove_padding`."""
        sharing = getattr(self.args, "prefix_sharing", False)
        if sharing == "auto" and getattr(self.args, "neftune_noise_alpha", None):
            logger.info("prefix_sharing='auto': nothing is shared, since NEFTune's noise tells all rows apart.")
            sharing = False
        return {"prefix_sharing": sharing}

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL computes these inside its `__init__`, before ours has attached.
        self._set_up_padding()
        self._check_values()
        return super()._precompute_ref_logps(*args, **kwargs)

    def _check_values(self) -> None:
        """Before the first step, refuse weights that are not finite, and token ids that the model does not have."""
        ram_efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() in ("true", "1")
        if not (self.is_fsdp_enabled and ram_efficient and self.args.local_process_index):  # there weights come later
            for which, model in (("model", self.model), ("reference model", getattr(self, "ref_model", None))):
                if model is not None:
                    check_weights(model, which)
        size = None if getattr(self, "_is_vision_dataset", False) else self._vocabulary()
        if size is not None:
            for name, dataset in self._datasets().items():
                check_ids(dataset, name, size)

    def _datasets(self) -> dict[str, Any]:
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        return {"train": self.train_dataset, **evaluated}

    def _vocabulary(self) -> int | None:
        """How many token ids the model has embeddings for, if it says."""
        pretrained = find_pretrained(self.model)
        embeddings = pretrained.get_input_embeddings() if hasattr(pretrained, "get_input_embeddings") else None
        return getattr(embeddings, "num_embeddings", None)

    def _shards_parameters(self) -> bool:
        """Whether each process has a part of the parameters, and modules gather them when they are called."""
        return self.is_fsdp_enabled or is_zero_3(self.accelerator)

    def _check_launch(self) -> None:
        """
        Raises:
            PaddingRemovalError: If the model is copied, or rows are split over processes.
        """
        if self.args.n_gpu > 1:
            raise PaddingRemovalError(
                f"`nn.DataParallel` on {self.args.n_gpu} GPUs runs copies of the model that share one decoder. Launch "
                "with `accelerate launch`, or show one GPU with `CUDA_VISIBLE_DEVICES`."
            )
        size = splitting_parallelism(self.accelerator, "cp_size", "sp_size")
        if size is not None:
            raise PaddingRemovalError(
                f"`{size}` splits every padded row over processes, and a packed batch has no such rows. Set "
                "`padding_free=False`, or train without context and sequence parallelism."
            )

    def _keep_padding_side(self) -> None:
        """Put `padding_side` back after each event: TRL's `LogCompletionsCallback` sets it to left, and leaves it."""
        handler = self.callback_handler
        call_event = handler.call_event

        def call(*args: Any, **kwargs: Any) -> Any:
            with kept_padding_side(self.processing_class):
                return call_event(*args, **kwargs)

        undo = self._undo_call_event
        if "call_event" in vars(handler):
            undo.callback(setattr, handler, "call_event", call_event)
        else:
            undo.callback(vars(handler).pop, "call_event", None)
        handler.call_event = call

    def _check_images(self) -> None:
        """Before the first step, refuse images that the model cannot take, or that are not where the text says."""
        for name, dataset in self._datasets().items() if self._takes_images else ():
            images = ", ".join(map(repr, sorted(column_names(dataset) & {"image", "images"})))
            if not images:
                continue
            if not getattr(self, "_is_vision_dataset", True):  # trainers that generate ask each of their batches
                raise ValueError(
                    f"The {name} dataset has images ({images}) and the train dataset has none, so batches are made of "
                    "text alone. Give both the column (an empty list where there is no image), or drop it."
                )
            pretrained = find_pretrained(self.model)
            if find_multimodal(pretrained, find_decoder(pretrained)) is None:
                raise ValueError(
                    f"The {name} dataset has images ({images}), and {type(pretrained).__name__} takes text only. Pass "
                    "a vision-language model, or drop the column to train on the text."
                )
            check_vision(dataset, self.processing_class, name)

    def restore_padding(self) -> None:
        """
        Detach from the models and from the callbacks: they are as they were before this trainer was made.

        After training they stay attached, until this is called or another trainer of this package takes them over.
        """
        for attachment in (*self._handles, *self._attachments):
            attachment.remove()
        self._undo_call_event.close()
        self._handles, self._attachments, self._removes_padding = [], [], False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs, layouts = without_layouts(inputs)
        with self.observe_step(model, inputs, layouts):
            result = super().compute_loss(self._wrap_model_for_loss(model), inputs, *args, **kwargs)
        self._see_loss(result, self._padded_batches(inputs))
        return result

    @contextlib.contextmanager
    def observe_step(
        self, model: Any, inputs: dict[str, Any], layouts: dict[str, Layout] | None = None
    ) -> Iterator[None]:
        """Check parity before the first forwards, and count the tokens of the forwards within the block."""
        if self._is_observing:
            yield
            return
        mode = "train" if self.model.training else "eval"
        batches = self._padded_batches(inputs)
        if mode in self._parity_pending and self._handles and getattr(self.args, "parity_check", True):
            for batch in batches:
                if self._handles[0].layout_of(batch) is not None:
                    self._parity_pending.discard(mode)
                    self._check_parity(model, self._parity_inputs(inputs, batch))
        # The reference's forward takes the layouts of the policy's.
        with self._counting(mode, batches), step_layouts(self._known_layouts(inputs, layouts or {})):
            self._is_observing = True
            try:
                yield
            finally:
                self._is_observing = False

    def _wrap_model_for_loss(self, model: Any) -> Any:
        """Wraps the model passed to TRL's loss."""
        return model

    def _parity_inputs(self, inputs: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the parity check runs for one of the [`_padded_batches`] of a step."""
        return batch | self._multimodal_inputs(inputs)

    def _multimodal_inputs(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Arguments of a multimodal model's forward beside ids, mask and labels: pixels, grids, token types."""
        multimodal = self._handles[0].multimodal if self._handles else None
        if multimodal is None:
            return {}
        known = inspect.signature(multimodal.forward).parameters.keys() - {"input_ids", "attention_mask", "labels"}
        return {name: value for name, value in inputs.items() if name in known}

    def _check_parity(self, model: Any, inputs: dict[str, Any]) -> None:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        for target in (model, getattr(self, "ref_model", None)):
            if target is None:
                continue
            report = check_parity(target if sharded else self.accelerator.unwrap_model(target), inputs, dtype=dtype)
            report.raise_if_failed()
            if report.compared:
                self.accelerator.print(report)  # one line: what was compared, the figure, the limit
            else:
                logger.warning(str(report))

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        handle = self._handles[0] if self._handles else None
        given = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*given, *card_tags(handle)])
        if self.is_world_process_zero():
            describe_in_card(Path(self.args.output_dir) / "README.md", handle)


@contextlib.contextmanager
def kept_padding_side(processing_class: Any) -> Iterator[None]:
    """`padding_side` of a tokenizer, or of a processor and its tokenizer, is the same when the block ends."""
    holders = [h for h in (processing_class, getattr(processing_class, "tokenizer", None)) if hasattr(h, "__dict__")]
    saved = [vars(holder).get("padding_side") for holder in holders]
    try:
        yield
    finally:
        for holder, side in zip(holders, saved, strict=True):
            if side is None:
                vars(holder).pop("padding_side", None)
            else:
                holder.padding_side = side
