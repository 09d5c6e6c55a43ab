"""Padding removed from the models of a trainer: what is attached to them, and what its users see of it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from accelerate.logging import get_logger
from datasets import Dataset

from ..core.errors import PaddingRemovalError
from ..core.handle import PaddingRemoval, PaddingStats
from ..core.layout.layout import Layout
from ..core.model.find import find_decoder, find_multimodal, find_pretrained
from ..core.model.patching import Attachment
from ..core.parity.report import ParityReport
from ..core.remove import attachments_of, number_padded_rows, remove_padding
from .checks import check_vision, image_columns, tokenizer_of
from .data.row_checks import check_ids, image_token_ids
from .distributed import check_launch, datasets_of, is_zero_3, models_of, named_models_of, refuse_whole_rows
from .field_types import temporarily_set
from .metrics.finite_values import check_weights
from .parts import Part, Settings, Step, entered
from .task import Task


__all__ = ["Packing", "Padding"]

logger = get_logger(__name__)

A = TypeVar("A", bound=Attachment)
P = TypeVar("P", bound=Part)


class Padding:
    """
    What removes the padding of a trainer, as `trainer.padding`.

    Attributes:
        settings ([`Settings`]):
            Our fields of its configuration.
        handles (`list[PaddingRemoval]`):
            What is attached to the policy, and to the reference or teacher if there is one; empty without
            `padding_free`.
        layouts (`dict[str, Layout]`):
            Layouts that came with the batch of the last step, by the prefix of the names of their ids and masks (`""`,
            and `"KL_"` in KTO); empty where they are built by the forwards.
        parity (`dict[str, list[ParityReport]]`):
            What the parity check has found, on the first batch of `"train"` and of `"eval"`, of each model.
        task ([`Task`]):
            What the rows of the trainer are, and what its loss makes of them.
        parts (`tuple[Part, ...]`):
            What the trainer does beside TRL's, in order.

    Example:

    ```python
    trainer = DPOTrainer(model, args=DPOConfig("runs/dpo", padding_free=True), train_dataset=pairs)
    trainer.train()
    trainer.padding.stats.pad_fraction  # share of the padded batches that was never computed
    trainer.padding.parity["train"]  # packed against padded, on the first batch
    trainer.padding.restore()
    ```
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.handles: list[PaddingRemoval] = []
        self.layouts: dict[str, Layout] = {}
        self.parity: dict[str, list[ParityReport]] = {}
        self.task: Task
        self.parts: tuple[Part, ...] = ()
        self.is_attached = False
        self.running: Step | None = None
        self.predicted: dict[str, Any] | None = None  # the batch of the running `prediction_step`

    @property
    def handle(self) -> PaddingRemoval | None:
        """Handle of the policy; `None` before padding is removed."""
        return self.handles[0] if self.handles else None

    @property
    def stats(self) -> PaddingStats | None:
        """Token counts of the packed forwards of the policy."""
        return self.handles[0].stats if self.handles else None

    @property
    def is_removed(self) -> bool:
        """Whether padded batches are packed now."""
        return self.settings.padding_free and bool(self.handles)

    def part(self, kind: type[P]) -> P:
        """The part of that class."""
        return next(part for part in self.parts if isinstance(part, kind))

    def restore(self) -> None:
        """Detach from the models, as `trainer.restore_padding()` does."""
        for part in self.parts:
            part.restore()


class Packing(Part):
    """Attaches to the models, and sets the collator's side; looks at weights, ids and images before the first step."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._undo = contextlib.ExitStack()

    def constructing(self, config: Any) -> contextlib.AbstractContextManager[Any]:
        # TRL warns that its own padding-free is off (0.29 and later) or refuses it; the decoder does it here.
        values: dict[str, Any] = {"padding_free": False}
        if self.settings.padding_free and getattr(config, "torch_compile", False):
            # Layers are compiled, no model as a whole; accelerate goes by the backend, whatever the flag says.
            values |= {"torch_compile": False, "torch_compile_backend": None}
        return entered(temporarily_set(config, name, value) for name, value in values.items())

    def attach(self) -> None:
        self._set_up_collator()
        # A trainer before this one may have left its own on the models, as training in stages does.
        for attachment in (a for model in models_of(self.trainer) for a in attachments_of(model) if a.is_trainers):
            attachment.remove()
        if self.settings.padding_free:
            self._remove_padding()
        else:
            self._attach_to_rows()
        self._check_values()

    def _remove_padding(self) -> None:
        trainer, sharing, pools = self.trainer, self.settings.prefix_sharing, self.settings.pool_last_token
        if sharing == "auto" and getattr(trainer.args, "neftune_noise_alpha", None):
            logger.info("prefix_sharing='auto': nothing is shared, since NEFTune's noise tells all rows apart.")
            sharing = False
        check_launch(self.trainer)
        for model in models_of(trainer):
            handle = self._kept(remove_padding(model, prefix_sharing=sharing, pool_last_token=pools))
            trainer.padding.handles.append(handle)
            if trainer.is_fsdp_enabled or is_zero_3(trainer.accelerator):
                refuse_whole_rows(handle)

    def _attach_to_rows(self) -> None:
        """Without `padding_free`: left-padded rows count their positions, and packed ones are kept apart."""
        trainer, task = self.trainer, self.trainer.padding.task
        is_ours = type(trainer.data_collator) in task.collators.values()
        if is_ours and trainer.data_collator.padding_side == "left":
            for numbering in filter(None, map(number_padded_rows, models_of(trainer))):
                self._kept(numbering)
        if not task.packs_rows() or trainer.args.torch_compile:  # a compiled model stays TRL's
            return
        try:
            check_launch(self.trainer)
            handle = self._kept(remove_padding(trainer.model))
        except PaddingRemovalError as error:
            logger.warning(f"Packed rows are left to the model's own attention. {error}")
            return
        handle.packs_padded = False
        trainer.padding.handles.append(handle)

    def _kept(self, attachment: A) -> A:
        """What is removed again by [`Packing.restore`], or by the next trainer on the same model."""
        attachment.is_trainers = True
        return self._undo.enter_context(attachment)

    def _set_up_collator(self) -> None:
        """Replace TRL's default collator by ours, on the wanted side; one of ours leaves odd rows to the trainer."""
        trainer, collators = self.trainer, self.trainer.padding.task.collators
        collator, ours = trainer.data_collator, collators.get(type(trainer.data_collator))
        if ours is not None:
            side = self.settings.padding_side or tokenizer_of(trainer.processing_class).padding_side
            given = {f.name: getattr(collator, f.name) for f in fields(collator)}
            trainer.data_collator = ours(**given, padding_side=side, for_trainer=True, **self._known_ids())
        elif type(collator) in collators.values() and is_dataclass(collator):
            trainer.data_collator = replace(collator, for_trainer=True, **self._known_ids())

    def _known_ids(self) -> dict[str, Any]:
        """Id limits for rows that are not there before the first step, checked in the collator."""
        with_images = getattr(self.trainer, "_is_vision_dataset", False)  # they are tokenized batch by batch
        if not with_images and all(isinstance(d, Dataset) for d in datasets_of(self.trainer).values()):
            return {}
        stand_ins = image_token_ids(find_pretrained(self.trainer.model).config) if with_images else frozenset()
        return {"vocabulary": self._vocabulary(), "stand_ins": stand_ins}

    def _vocabulary(self) -> int | None:
        """How many token ids the model has embeddings for, if it says."""
        pretrained = find_pretrained(self.trainer.model)
        embeddings = pretrained.get_input_embeddings() if hasattr(pretrained, "get_input_embeddings") else None
        return getattr(embeddings, "num_embeddings", None)

    def _check_values(self) -> None:
        """Before the first step, refuse weights that are not finite, and token ids that the model does not have."""
        trainer = self.trainer
        ram_efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() in ("true", "1")
        if not (trainer.is_fsdp_enabled and ram_efficient and trainer.args.local_process_index):  # weights come later
            for which, model in named_models_of(trainer).items():
                check_weights(model, which)
        size = None if getattr(trainer, "_is_vision_dataset", False) else self._vocabulary()
        if size is not None:
            for name, dataset in datasets_of(trainer).items():
                check_ids(dataset, name, size)

    def ready(self) -> None:
        for name, dataset in datasets_of(self.trainer).items() if self.trainer.padding.task.takes_images else ():
            self._check_images(name, dataset)
        self._keep_padding_side()
        if self.trainer.args.torch_compile:
            self._compile()

    def _compile(self) -> None:
        args, handles = self.trainer.args, self.trainer.padding.handles
        if handles and is_zero_3(self.trainer.accelerator):
            raise PaddingRemovalError(
                "`torch_compile=True` makes one graph of each decoder layer, and DeepSpeed ZeRO-3 gathers weights "
                "module by module within it. Set `torch_compile=False`, or shard with ZeRO-2 or FSDP2."
            )
        from ..core.attention.compiled import compile_layers

        for handle in handles:
            compile_layers(handle, backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)

    def _check_images(self, name: str, dataset: Any) -> None:
        """Before the first step, refuse images that the model cannot take, or that are not where the text says."""
        if not (images := image_columns(dataset)):
            return
        if not getattr(self.trainer, "_is_vision_dataset", True):  # trainers that generate ask each of their batches
            raise ValueError(
                f"The {name} dataset has images ({images}) and the train dataset has none, so batches are made of "
                "text alone. Give both the column (an empty list where there is no image), or drop it."
            )
        pretrained = find_pretrained(self.trainer.model)
        if find_multimodal(pretrained, find_decoder(pretrained)) is None:
            raise ValueError(
                f"The {name} dataset has images ({images}), and {type(pretrained).__name__} takes text only. Pass "
                "a vision-language model, or drop the column to train on the text."
            )
        if isinstance(dataset, Dataset):  # of a stream the collator checks each batch
            check_vision(dataset, self.trainer.processing_class, name)

    def _keep_padding_side(self) -> None:
        """Put `padding_side` back after each event: TRL's `LogCompletionsCallback` sets it to left, and leaves it."""
        handler, processing = self.trainer.callback_handler, self.trainer.processing_class
        call_event = handler.call_event

        def call(*args: Any, **kwargs: Any) -> Any:
            with temporarily_set(processing, "padding_side", getattr(processing, "padding_side", None)):
                return call_event(*args, **kwargs)

        self._undo.enter_context(temporarily_set(handler, "call_event", call))

    def restore(self) -> None:
        self._undo.close()
        self.trainer.padding.handles = []
