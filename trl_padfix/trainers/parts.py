"""
What the parts of a trainer have in common: our settings, the step that is running, and when a part is called.

A part is one concern of a trainer: its attention, its layouts, its token budget, what is counted. `base.py` has the
ordered tuple of them, and calls each method below at its time, for one part after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..core.call.batch_metadata import Known
from ..core.call.layout_of import PrefixSharing


if TYPE_CHECKING:
    from ..core.attention.backends import Implementation


__all__ = ["Evaluation", "Part", "Settings", "Step", "entered"]


@dataclass(frozen=True)
class Settings:
    """
    Our fields of a configuration, read once; a configuration without one of them has its default.

    `DPOConfig` and the others document the fields.
    """

    padding_free: bool = False
    prefix_sharing: PrefixSharing = False
    cp_attention: str = "heads"
    padding_side: str | None = None
    parity_check: bool | Literal["forward"] = True
    stop_on_nonfinite: bool = False
    attn_implementation: Implementation | None = None
    ref_attn_implementation: Implementation | None = None
    teacher_attn_implementation: Implementation | None = None
    max_tokens_per_batch: int | None = None
    group_by_prefix: bool = False
    group_by_prefix_buffer: int | None = None
    exact_eval_means: bool = False
    predict_with_generate: bool = False
    generation_max_new_tokens: int = 256
    generation_kwargs: dict[str, Any] | None = None
    eval_generation_samples: int | None = None
    generation_rows_shown: int = 2
    pool_last_token: bool = False
    expand_turns: bool = False

    @classmethod
    def of(cls, config: Any, **fixed: Any) -> Settings:
        """The settings of a configuration of this package, of TRL or of transformers; `fixed` ones hold anyway."""
        found = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        return cls(**found | fixed)


@dataclass
class Step:
    """
    The forwards of one batch, in training or in evaluation.

    Attributes:
        model (`torch.nn.Module`): What the loss is computed with, wrapped as it is for training.
        inputs (`dict`): The batch, without its layouts. Whoever changes it does so before `batches` is read.
        mode (`str`): `"train"` or `"eval"`.
        number (`int`): The optimizer step, from 1 in training.
        padded_batches (`Callable`): Ids and mask of each forward of the policy, of a batch.
        laid (`BatchMetadata`, *optional*): What came with the batch.
        known (`list` of [`Known`]): What of it holds for the batch as it is.
        returns_outputs (`bool`): Whether the result is loss and outputs.
        result (`Any`): What TRL's `compute_loss` returned; a part may replace it.
    """

    model: Any
    inputs: dict[str, Any]
    mode: str
    number: int
    padded_batches: Callable[[dict[str, Any]], list[dict[str, torch.Tensor]]]
    batch_metadata: Any = None
    known: list[Known] = field(default_factory=list)
    returns_outputs: bool = False
    result: Any = None

    @cached_property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy."""
        return self.padded_batches(self.inputs)

    @property
    def loss(self) -> Any:
        return self.result[0] if isinstance(self.result, tuple) else self.result


@dataclass
class Evaluation:
    """An evaluation loop: the prefix of its metrics, whether it keeps logits, and what it returned."""

    prefix: str
    loss_only: bool | None
    output: Any = None


class Part:
    """
    A concern of a trainer. A subclass fills in the methods at whose time it has something to do.

    The trainer (in a test an object with what the part reads of one) has a [`Padding`] as `padding` when the part is
    made, and what `transformers` gives it from `attach` on.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    @property
    def settings(self) -> Settings:
        return self.trainer.padding.settings

    def check(self, config: Any, given: dict[str, Any]) -> None:
        """Errors that are better raised before a model is loaded. `given`: the arguments of `__init__` by name."""

    def constructing(self, config: Any) -> contextlib.AbstractContextManager[Any]:
        """Around TRL's `__init__`."""
        return contextlib.nullcontext()

    def attach(self) -> None:
        """Once, when models and datasets are there and before any forward, perhaps within TRL's `__init__`."""

    def ready(self) -> None:
        """At the end of `__init__`."""

    def loading(self, dataset: Any, is_training: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the making of a data loader."""
        return contextlib.nullcontext()

    def precomputing(self) -> contextlib.AbstractContextManager[Any]:
        """Around TRL's computing of the reference's log-probabilities, before the first step."""
        return contextlib.nullcontext()

    def step(self, step: Step) -> contextlib.AbstractContextManager[Any]:
        """Around the forwards of a batch; at the end of the block `step.result` is there."""
        return contextlib.nullcontext()

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Around `evaluate`."""
        return contextlib.nullcontext()

    def evaluation(self, evaluation: Evaluation) -> contextlib.AbstractContextManager[Any]:
        """Around an evaluation loop; at the end of the block `evaluation.output` is there."""
        return contextlib.nullcontext()

    def log(self, logs: dict[str, float], mode: str) -> None:
        """Before TRL logs, with its own metrics added, what `logs` holds."""

    def restore(self) -> None:
        """Leave models and callbacks as they were before the trainer was made; twice does no harm."""

    def abandon(self) -> None:
        """The same where the trainer could not be made."""
        self.restore()


@contextlib.contextmanager
def entered(contexts: Iterable[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """A block within all of `contexts`, entered one after the other."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
