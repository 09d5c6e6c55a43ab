"""[`padding_free_trainer`], which makes a trainer of any class."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

from transformers import Trainer

from ..base import PaddingFreeMixin
from ..task import Task


__all__ = ["padding_free_trainer"]

T = TypeVar("T", bound=Trainer)

METHODS = ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft")
"""Modules of this package's trainers, each for the trainer in TRL's module `METHOD_trainer`."""

ANY_TRAINERS = ("padding_free", "prefix_sharing", "parity_check", "strict", "pool_last_token", "attn_implementation")
"""Settings that do not depend on the rows of a trainer."""


def padding_free_trainer(trainer_class: type[T], *, task_class: type[Task] | None = None, **settings: Any) -> type[T]:
    """
    Make a subclass of a trainer class that trains without padding.

    Its forwards run packed; on the first batches of training and of evaluation they are compared with padded
    forwards, and its loss with the loss without padding removal.
    Loss, loop and data stay unchanged. Like our other trainers it has `trainer.padding`, and logs
    `perf/tokens_per_second` and `padfix/pad_fraction`. A subclass of a trainer of TRL that this package has, such as
    [`GRPOTrainer`], trains as if it were a subclass of ours.

    Args:
        trainer_class (`type`):
            [`~transformers.Trainer`], one of TRL's trainers, or a class of your own.
        task_class (`type`, *optional*):
            Describes its batches. By default the task of this package's trainer for the class, or [`Task`] if there is
            none. [`Task`] reads `input_ids` and `attention_mask`; if a batch has other names, the arguments of the
            model are checked and counted instead.
        **settings:
            `prefix_sharing`, `parity_check`, `strict`, `pool_last_token`, `attn_implementation`
            and `padding_free` (here `True` by default), as in [`DPOConfig`]. They override the configuration. Other
            settings come from the configuration if it has them.

    Returns:
        `type`: a subclass of `trainer_class`, with its signature. To pickle it, for a launcher that spawns processes,
        make a class of your own from it: `class MyTrainer(padding_free_trainer(Trainer)): ...`.

    Raises:
        TypeError: For another setting, and for anything but a class of trainers.

    Example:

    ```python
    >>> from transformers import Trainer
    >>> from trl_padfix import padding_free_trainer

    >>> PaddingFreeTrainer = padding_free_trainer(Trainer, prefix_sharing="auto")
    >>> PaddingFreeTrainer.__name__, issubclass(PaddingFreeTrainer, Trainer)
    ('PaddingFreeTrainer', True)

    ```
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        given = getattr(trainer_class, "__name__", f"a `{type(trainer_class).__name__}` object")
        raise TypeError(
            f"`padding_free_trainer` takes a class, such as `transformers.Trainer` or your own; it got {given}. For a "
            "trainer there is `PaddingRemovalCallback().attach(trainer)`, for a model `remove_padding(model)`."
        )
    if unknown := sorted(settings.keys() - set(ANY_TRAINERS)):
        raise TypeError(
            f"`padding_free_trainer` has no settings {unknown}; it has {list(ANY_TRAINERS)}. For other "
            "fields, pass one of our configurations as `args`, such as `SFTConfig(padding_free=True, ...)`."
        )
    trainer_class = vars(trainer_class).get("made_from", trainer_class)  # a notebook's cell may run again
    if issubclass(trainer_class, PaddingFreeMixin):
        raise TypeError(f"{trainer_class.__name__} removes padding already: set `padding_free` in its configuration.")
    bases: tuple[type, ...] = (PaddingFreeMixin, trainer_class)
    if task_class is None and (ours := _counterpart(trainer_class)) is not None:
        # A user's methods run around ours, as in a subclass of our trainer.
        bases = (ours,) if issubclass(ours, trainer_class) else (trainer_class, ours)
    doc = f"[`{trainer_class.__name__}`] without padding, made by [`padding_free_trainer`]."
    members: dict[str, Any] = {"__doc__": doc, "fixed_settings": {"padding_free": True, **settings}}
    members |= {"made_from": trainer_class} | ({"task_class": task_class} if task_class else {})
    return type(f"PaddingFree{trainer_class.__name__}", bases, members)  # type: ignore[return-value]


def _counterpart(trainer_class: type) -> type | None:
    """Our trainer for the class of TRL that a class is, or derives from; `None` without one."""
    # Only the nearest class: TRL's experimental GMPO derives from GRPO, with another loss.
    theirs = next((c for c in trainer_class.__mro__ if c.__module__.startswith("trl.")), object)
    method = theirs.__module__.removeprefix("trl.trainer.").removesuffix("_trainer")
    return vars(import_module(f".{method}", __package__)).get(theirs.__name__) if method in METHODS else None
