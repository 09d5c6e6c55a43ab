"""The part that pads rows on the tokenizer's side."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

from accelerate.logging import get_logger

from ...core.anatomy import outermost_pretrained, peft_configs_in
from ...core.remove import number_padded_rows
from ..checks.user_code import custom_loss_name
from ..data.chat_templates import tokenizer_of
from ..data.collators import SidedCollator
from .part import Part


__all__ = ["PaddingSide"]

logger = get_logger(__name__)

VIRTUAL_TOKENS = "PEFT puts its virtual tokens before the padding, farther from the row than without padding"


class PaddingSide(Part):
    """
    `padding_side`: replaces TRL's collator by ours, and numbers the tokens of a left-padded row from its first one.

    If none of our fields is set, it acts only for a tokenizer, or a collator of ours, that pads left.
    """

    def acts(self) -> bool:
        collator = self.trainer.data_collator
        is_known = self.trainer.padding.task.knows(collator)
        if not is_known or self.settings.changed:
            return is_known
        side = collator.padding_side if isinstance(collator, SidedCollator) else self._padding_side()
        return side == "left"

    def attach(self) -> None:
        """
        Replace TRL's collator.

        Raises:
            ValueError: If rows with PEFT's virtual tokens would be padded left: PEFT puts these tokens before the
            padding.
        """
        trainer, collators = self.trainer, self.trainer.padding.task.collators
        collator = trainer.data_collator
        if type(collator) in collators:
            values = {f.name: vars(collator)[f.name] for f in fields(collator)}
            collator = collators[type(collator)](**values, padding_side=self._padding_side())
        if is_dataclass(collator):
            trainer.data_collator = replace(collator, packed_rows=trainer.padding.task.packs_rows())

        if trainer.data_collator.padding_side == "left" and self._has_virtual_tokens():
            raise ValueError(
                f"`padding_side='left'`: {VIRTUAL_TOKENS}. Leave `padding_side` out, or set it to 'right'."
            )

    def _has_virtual_tokens(self) -> bool:
        return any(config.is_prompt_learning for config in peft_configs_in(self.trainer.model))

    def attach_to_models(self) -> None:
        self.restore()
        if self.trainer.data_collator.padding_side == "left":  # also for calls that are computed padded
            padding = self.trainer.padding
            padding.numberings = [a for a in map(number_padded_rows, padding.pretrained) if a is not None]

    def _padding_side(self) -> str:
        """`padding_side`, or the tokenizer's side; TRL's for a model that reads padding at the beginning of a row."""
        asked = self.settings.padding_side
        side = asked or tokenizer_of(self.trainer.processing_class).padding_side
        if side == "right":
            return side
        if self._has_virtual_tokens() and not asked:
            logger.info(f"Rows are padded right, as in TRL: {VIRTUAL_TOKENS}.")
            return "right"
        stateful = [m for m in outermost_pretrained(self.trainer.model) if m._is_stateful]
        if stateful and not asked:
            logger.info(
                f"Rows are padded right, as in TRL: {type(stateful[0]).__name__} carries states from token to token, "
                "and padding before a row may change them. `padding_side='left'` still pads left."
            )
            return "right"
        if not asked and (name := custom_loss_name(self.trainer)):
            logger.warning_once(
                f"Rows are padded left, as the tokenizer pads. TRL pads them right: if `{name}` expects that, set "
                "`padding_side='right'`, or `tokenizer.padding_side`."
            )
        return side

    def restore(self) -> None:
        for attachment in self.trainer.padding.numberings:
            attachment.remove()
        self.trainer.padding.numberings = []
