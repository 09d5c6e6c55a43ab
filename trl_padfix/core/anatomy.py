"""The parts of a model that padding removal works on, found once for each model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from .mixers.mixers import Mixers
from .model.find import find_decoder, find_multimodal, find_pretrained, peft_configs_in
from .model.inspection import pools_by_token_id
from .model.positions import length_dependent_ropes, position_embeddings


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["Anatomy"]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """
    The parts of a model that padding removal works on.

    The properties search the model when they are first read: a model may be refused before a search that would fail.

    Attributes:
        pretrained ([`~transformers.PreTrainedModel`]):
            The transformers model, without a PEFT or other wrapper around it.
        decoder (`torch.nn.Module`):
            The text decoder between embeddings and head: the only part that runs packed.
        multimodal (`torch.nn.Module`, *optional*):
            The module around the decoder that turns images and other inputs into embeddings.
        peft_configs (`tuple`):
            Configurations of the PEFT adapters in the wrapper.
    """

    pretrained: PreTrainedModel
    decoder: Any  # an `nn.Module` with a `config`; transformers has no type for it
    multimodal: PreTrainedModel | None = None
    peft_configs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """
        The anatomy of `model`: a transformers model, or a module that contains one.

        The wrapper itself is not stored: handles keep the anatomy, and a deep copy of the model would copy it.

        Raises:
            TypeError: If there is no transformers model in `model`, or more than one.
        """
        pretrained = find_pretrained(model)
        decoder = find_decoder(pretrained)
        return cls(pretrained, decoder, find_multimodal(pretrained, decoder), peft_configs_in(model))

    @cached_property
    def mixers(self) -> Mixers:
        """The modules of the decoder that mix tokens."""
        return Mixers.of(self.decoder)

    @cached_property
    def position_tables(self) -> list[nn.Embedding]:
        """Embeddings that a decoder without `position_ids` calls with the positions of its columns."""
        return position_embeddings(self.decoder)

    @cached_property
    def length_dependent_ropes(self) -> list[nn.Module]:
        """Rotary embeddings whose frequencies depend on the largest position of a forward."""
        return list(length_dependent_ropes(self.decoder))

    @property
    def has_virtual_tokens(self) -> bool:
        """Whether a PEFT adapter puts learned tokens before every row (prompt tuning, p-tuning)."""
        return any(config.is_prompt_learning for config in self.peft_configs)

    @property
    def pools_by_token_id(self) -> bool:
        """Whether the model is a sequence classifier that finds the end of a row by the id of the pad token."""
        return pools_by_token_id(self.pretrained)

    @property
    def head(self) -> nn.Module | None:
        """The LM head of a model that itself calls its decoder or multimodal module; `None` for other models."""
        # BLIP-2 returns the head of the language model that it wraps, and that model calls the decoder. OPT's decoder
        # is within a module that the model bypasses.
        head, children = self.pretrained.get_output_embeddings(), [*self.pretrained.children()]
        return head if (self.multimodal or self.decoder) in children or head in children else None
