"""The part that removes padding from the models of a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.logging import get_logger
from datasets import Dataset

from ...core.errors import PaddingRemovalError
from ...core.handle import PaddingRemoval, PrefixSharing
from ...core.model.find import find_decoder, find_multimodal, find_peft, find_pretrained
from ...core.model.patching import Attachment
from ...core.remove import attachments_of, attachments_on, number_padded_rows, remove_padding
from ...core.switch import is_off
from ..checks.arguments import check_vision, image_columns
from ..data.data_warnings import warn_or_raise
from ..data.row_checks import check_ids, image_token_ids
from ..data.tokenizers import tokenizer_of
from ..distributed import check_launch, datasets_of, is_zero, models_of, trains_on_images
from ..temporary_attributes import temporarily_set
from .attach_models import attach_to_models
from .neftune import prefix_sharing_with_neftune
from .part import Part


if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import TrainingArguments

    from .part import PaddingFreeTrainer


__all__ = ["RemovePadding"]

logger = get_logger(__name__)

A = TypeVar("A", bound=Attachment)


class RemovePadding(Part):
    """
    `padding_free`, `padding_side`: attaches to the models and sets up the collator.

    Before the first step it also checks token ids and images.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._prefix_sharing: PrefixSharing = False
        self._attachments: list[Attachment] = []
        self._models: list[Any] = []
        self._decoders: list[Any] = []

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        self._prefix_sharing = prefix_sharing_with_neftune(self.settings.prefix_sharing, config)

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[Any]:
        # Here the decoder packs. TRL's own `padding_free` would pack in the collator: since TRL 0.29 it warns that
        # this is off, and before it raises.
        values: dict[str, Any] = {"padding_free": False}
        if self.settings.padding_free and config is not None and config.torch_compile:
            # `_compile` compiles single layers. accelerate would compile the model whenever a backend is set, so
            # clearing the flag alone is not enough.
            values |= {"torch_compile": False, "torch_compile_backend": None}
        return temporarily_set(config, **values)

    def attach(self) -> None:
        self._set_up_collator()

    def attach_to_models(self) -> None:
        self.restore()
        # When a model is trained in stages, the trainer of the previous stage is still attached.
        for model in models_of(self.trainer):
            for attachment in attachments_of(model):
                if attachment.owned_by_trainer:
                    attachment.take_over()
        before, self._models = self._decoders, models_of(self.trainer)
        self._decoders = _decoders_of(self._models)
        if self._pads_left():  # also for calls that are computed padded
            for numbering in filter(None, map(number_padded_rows, self._models)):
                self._register(numbering)
        if self.settings.padding_free:
            attach_to_models(self.trainer, self._remove_padding)
        else:
            self._attach_to_packed_rows()
        if before != self._decoders:
            self._check_token_ids()
        if before and self.trainer.args.torch_compile:  # the first time `on_init_end` compiles
            self._compile()

    def is_outdated(self) -> bool:
        """Whether the trainer has other models than those attached to, or another trainer has taken them over."""
        padding, models = self.trainer.padding, models_of(self.trainer)
        if not padding.is_attached or padding.is_restored:
            return False
        # Another trainer takes over what is attached. Where this one has attached nothing, what it attached is found.
        if any(attachment.taken_over for attachment in self._attachments):
            return True
        if not self._attachments and any(a.owned_by_trainer for d in self._decoders for a in attachments_on(d)):
            return True
        if models == self._models:
            return False
        # FSDP wraps the model when training begins, and the wrapped model has the same decoder.
        self._models = models
        return _decoders_of(models) != self._decoders

    def _remove_padding(self, model: torch.nn.Module) -> PaddingRemoval:
        settings = self.settings
        handle = remove_padding(
            model,
            prefix_sharing=self._prefix_sharing,
            pool_last_token=settings.pool_last_token,
            strict=settings.strict,
            packed_multiple_of=settings.packed_multiple_of,
        )
        self.trainer.padding.handles.append(self._register(handle))
        return handle

    def _attach_to_packed_rows(self) -> None:
        """Without `padding_free`: keep packed sequences apart."""
        trainer, task = self.trainer, self.trainer.padding.task
        if is_off() or not task.packs_rows() or trainer.args.torch_compile:  # a compiled model stays TRL's
            return
        try:
            check_launch(self.trainer)
            handle = self._register(remove_padding(trainer.model))
        except PaddingRemovalError as error:
            logger.warning(f"Packed rows are left to the model's own attention. {error}")
            return
        handle.leave_padded_calls()
        logger.info(
            "The sequences of packed rows are kept apart. Where transformers lets them attend to one another (gpt-oss "
            "in 5.24), losses differ from TRL's."
        )
        trainer.padding.handles.append(handle)

    def _pads_left(self) -> bool:
        """Whether our collator pads on the left: rows are then numbered from their first token, as padded right."""
        collator = self.trainer.data_collator
        is_ours = type(collator) in self.trainer.padding.task.collators.values()
        return is_ours and collator.padding_side == "left"

    def _register(self, attachment: A) -> A:
        """Let [`RemovePadding.restore`], or the next trainer on the same model, remove an attachment."""
        attachment.hand_to_trainer()
        self._attachments.append(attachment)
        return attachment

    def _set_up_collator(self) -> None:
        """Replace TRL's collator by ours, on `padding_side`. Ours count invalid rows instead of raising errors."""
        trainer, collators = self.trainer, self.trainer.padding.task.collators
        collator = trainer.data_collator
        if type(collator) in collators:
            values = {f.name: vars(collator)[f.name] for f in fields(collator)}
            side = self._padding_side()
            collator = collators[type(collator)](**values, padding_side=side)
        if type(collator) in collators.values() and is_dataclass(collator):
            trainer.data_collator = replace(
                collator,
                for_trainer=True,
                strict=self.settings.strict,
                packed_rows=trainer.padding.task.packs_rows(),
                **self._id_limits(),
            )

    def _padding_side(self) -> str:
        """
        `padding_side`, or the tokenizer's side; TRL's for a model that reads padding at the beginning of a row.

        Raises:
            ValueError: For `padding_side='left'` with tokens that PEFT learns: it puts them before the padding.
        """
        asked = self.settings.padding_side
        side = asked or tokenizer_of(self.trainer.processing_class).padding_side
        peft_model: Any = find_peft(self.trainer.model)
        adapters = [] if peft_model is None else peft_model.peft_config.values()
        if side == "left" and any(adapter.is_prompt_learning for adapter in adapters):
            why = "PEFT puts its virtual tokens before the padding, farther from a row than they are in the row alone"
            if asked:
                raise ValueError(f"`padding_side='left'`: {why}. Leave `padding_side` out, or set it to 'right'.")
            logger.info(f"Rows are padded right, as in TRL: {why}.")
            return "right"
        pretrained = find_pretrained(self.trainer.model)
        if side == "left" and not asked and pretrained._is_stateful:
            logger.info(
                f"Rows are padded right, as in TRL: {type(pretrained).__name__} carries states from token to token, "
                "and padding before a row may change them. `padding_side='left'` pads left all the same."
            )
            return "right"
        return side

    def _id_limits(self) -> dict[str, Any]:
        """Limits of token ids for the collator; empty if all rows can be checked before the first step."""
        with_images = bool(trains_on_images(self.trainer))  # TRL's collator tokenizes these batches
        if not with_images and all(isinstance(d, Dataset) for d in datasets_of(self.trainer).values()):
            return {}
        stand_ins = image_token_ids(find_pretrained(self.trainer.model).config) if with_images else frozenset()
        return {"vocabulary": self._vocabulary(), "stand_ins": stand_ins}

    def _vocabulary(self) -> int | None:
        """Number of token embeddings of the model; `None` if it does not tell."""
        return getattr(find_pretrained(self.trainer.model).get_input_embeddings(), "num_embeddings", None)

    def _check_token_ids(self) -> None:
        """Refuse token ids without an embedding, which no model computes."""
        trainer = self.trainer
        size = None if trains_on_images(trainer) else self._vocabulary()
        if size is not None:
            for name, dataset in datasets_of(trainer).items():
                check_ids(dataset, name, size, self._used_columns())

    def _used_columns(self) -> Iterable[str] | None:
        """The columns that Trainer leaves for the collator; `None` if it removes none."""
        trainer = self.trainer
        if not trainer.args.remove_unused_columns:
            return None
        trainer._set_signature_columns_if_needed()
        return trainer._signature_columns

    def on_init_end(self) -> None:
        for name, dataset in datasets_of(self.trainer).items() if self.trainer.padding.task.takes_images else ():
            self._check_images(name, dataset)
        if self.trainer.args.torch_compile:
            self._compile()

    def _compile(self) -> None:
        args, handles = self.trainer.args, self.trainer.padding.handles
        if handles and is_zero(3, self.trainer.accelerator):
            raise PaddingRemovalError(
                "`torch_compile=True` makes one graph of each decoder layer, and DeepSpeed ZeRO-3 gathers weights "
                "module by module within it. Set `torch_compile=False`, or shard with ZeRO-2 or FSDP2."
            )
        from ...core.attention.compiled import compile_layers  # imports `torch._dynamo`, which takes seconds

        for handle in handles:
            compile_layers(handle, backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)

    def _check_images(self, name: str, dataset: Dataset | IterableDataset) -> None:
        """Refuse images if the model takes text only, or if their number differs from that of the placeholders."""
        if not (images := image_columns(dataset)):
            return
        if trains_on_images(self.trainer) is False:
            warn_or_raise(
                f"The {name} dataset has images ({images}) and the train dataset has none, so batches are made of "
                "text alone. Give both the column (an empty list where there is no image), or drop it.",
                self.settings.strict,
            )
            return
        pretrained = find_pretrained(self.trainer.model)
        if find_multimodal(pretrained, find_decoder(pretrained)) is None:
            raise ValueError(
                f"The {name} dataset has images ({images}), and {type(pretrained).__name__} takes text only. Pass "
                "a vision-language model, or drop the column to train on the text."
            )
        if isinstance(dataset, Dataset):  # the collator checks each batch of a stream
            check_vision(dataset, self.trainer.processing_class, name, self.settings.strict)

    def restore(self) -> None:
        for attachment in reversed(self._attachments):
            attachment.remove()
        self._attachments, self.trainer.padding.handles = [], []


def _decoders_of(models: list[Any]) -> list[Any]:
    return [find_decoder(find_pretrained(model)) for model in models]
