"""
`PaddingRemovalCallback`: padding removal for a trainer that somebody else makes.

It needs no class of this package and no particular TRL; the plug-ins of other stacks are made of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import Trainer, TrainerCallback

from ..core.call.layout_of import PrefixSharing
from ..core.errors import PaddingRemovalError
from ..core.handle import PaddingRemoval, PaddingStats
from ..core.parity.report import ParityReport
from ..core.remove import remove_padding
from ..trainers.distributed import check_launch, is_zero_3, models_of, refuse_whole_rows, splitting_parallelism
from ..trainers.metrics.token_counts import TokenCounter, forward_counts, summed_over_processes
from ..trainers.parity import called_module, compare, packs, say, tensors_of_call


__all__ = ["PaddingRemovalCallback", "settings_in"]

logger = get_logger(__name__)

PREFIX = "padfix_"

WRAPPERS = {
    "DeepSpeedEngine": "DeepSpeed",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "OptimizedModule": "`torch.compile`",
}
"""Classes that take a model over, by name, and what they belong to."""


class PaddingRemovalCallback(TrainerCallback):
    """
    Removes padding while any [`~transformers.Trainer`] trains.

    When training begins it attaches to the policy, and to the reference if the trainer has one (`trainer.ref_model`).
    After the first batch, before any weight is changed, packed and padded forwards are compared; the log gets
    `padfix/pad_fraction`, `padfix/shared_fraction` and `perf/tokens_per_second` (real tokens of the policy's
    forwards). When training ends it detaches. Loss, loop and data are the trainer's.

    Args:
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Whether token prefixes that rows of a batch have in common are computed once, as in [`remove_padding`].
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether packed and padded are compared on the first batch.
        pool_last_token (`bool`, *optional*, defaults to `False`):
            Whether a sequence classifier scores the last token of each row's attention mask.

    Attributes:
        handles (`list[PaddingRemoval]`): What is attached, or was in the last training: policy, then reference.
        reports (`list[ParityReport]`): What the parity check has found, of the same models.

    Raises:
        ValueError: For another `prefix_sharing`; when training begins, if padding removal is attached already.
        TypeError: When training begins, if the trainer's model contains no transformers model, or more than one.
        PaddingRemovalError: When training begins, for a model that DeepSpeed, FSDP or `torch.compile` has taken over
            (for the first two call [`~PaddingRemovalCallback.attach`] before), or that cannot be packed.
        ParityError: On the first batch, if packed and padded differ.

    Example:

    ```python
    from transformers import Trainer
    from trl_padfix import PaddingRemovalCallback

    trainer = Trainer(model, args, train_dataset=rows, callbacks=[PaddingRemovalCallback(prefix_sharing=True)])
    trainer.train()
    ```
    """

    def __init__(
        self, prefix_sharing: PrefixSharing = False, *, parity_check: bool = True, pool_last_token: bool = False
    ):
        if prefix_sharing not in (True, False, "auto"):
            raise ValueError(f"`prefix_sharing` is True, False or 'auto', got {prefix_sharing!r}.")
        self.prefix_sharing: PrefixSharing = prefix_sharing
        self.parity_check, self.pool_last_token = parity_check, pool_last_token
        self.handles: list[PaddingRemoval] = []
        self.reports: list[ParityReport] = []
        self._trainer: Any = None
        self._hook: Any = None
        self._first_call: dict[str, torch.Tensor] = {}

    @property
    def stats(self) -> PaddingStats | None:
        """Token counts of the packed forwards of the policy, in the last training."""
        return self.handles[0].stats if self.handles else None

    def attach(self, trainer: Trainer) -> None:
        """
        Attach to the models of a trainer now, instead of when training begins: before DeepSpeed or FSDP wraps them.

        Args:
            trainer ([`~transformers.Trainer`]):
                The trainer, before its `train()`.

        Raises:
            TypeError, ValueError, PaddingRemovalError: As above.
        """
        self.remove()
        check_launch(trainer)
        if splitting_parallelism(trainer.accelerator, "cp_size"):
            raise PaddingRemovalError(
                "`cp_size` splits rows over processes, and a callback cannot split what the trainer computes its loss "
                "of. Use a trainer of this package, or train without context parallelism."
            )
        _refuse_taken_over(trainer)
        options = {"prefix_sharing": self._sharing(trainer.args), "pool_last_token": self.pool_last_token}
        self.handles, self.reports, self._trainer = [], [], trainer
        try:
            for model in models_of(trainer):
                handle = remove_padding(model, **options)
                self.handles.append(handle)
                if trainer.is_fsdp_enabled or is_zero_3(trainer.accelerator):
                    refuse_whole_rows(handle)
        except BaseException:
            self.remove()
            raise
        self._counters = {"train": TokenCounter(), "eval": TokenCounter()}
        self._counted, self._is_evaluating, self._has_stepped = [0] * 5, False, False
        if self.parity_check:
            self._hook = called_module(trainer.model).register_forward_pre_hook(self._see_call, with_kwargs=True)

    def remove(self) -> None:
        """Detach from the models, as at the end of a training; after one that failed, before another trainer."""
        for handle in self.handles:
            handle.remove()
        if self._hook is not None:
            self._hook.remove()
        self._trainer, self._hook, self._first_call = None, None, {}

    def _sharing(self, args: Any) -> PrefixSharing:
        if not getattr(args, "neftune_noise_alpha", None) or not self.prefix_sharing:
            return self.prefix_sharing
        if self.prefix_sharing == "auto":
            logger.info("prefix_sharing='auto': nothing is shared, since NEFTune's noise tells all rows apart.")
            return False
        raise PaddingRemovalError(
            "`neftune_noise_alpha` gives every token of every row a noise of its own, so there is no prefix to share. "
            "Use `PaddingRemovalCallback(prefix_sharing=False)`: padding is removed all the same."
        )

    def _see_call(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep what the policy is called with, in the first call that is packed."""
        call = tensors_of_call(module, args, kwargs)
        if kwargs.get("past_key_values") is None and packs(self.handles[0], call):
            self._first_call = call
            self._hook.remove()
            self._hook = None

    # -- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            self.attach(_trainer_with(self))
        callbacks = self._trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)  # before those that report what is logged

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counters["train"].start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        call, self._first_call = self._first_call, {}
        if not call:
            return
        if "input_ids" not in call:
            logger.warning(f"Not compared on the first batch, which is given as {sorted(call)}: it has no token ids.")
            return
        trainer = self._trainer
        models = [trainer.model_wrapped, *models_of(trainer)[1:]]
        try:
            compare(trainer, models, call, self.reports, gradients=True)
            say(trainer, self.reports)
        except BaseException:
            self.remove()  # of a training that ends here no other event comes
            raise

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("train")
        if not self._has_stepped and not self.handles[0].stats.forwards:
            logger.warning(
                "Nothing was packed in the first step, so no padding was removed: the model was called neither with a "
                "two-dimensional attention mask nor with rows that are packed already."
            )
        elif not self._has_stepped and self._hook is not None:
            logger.warning(
                "Packed and padded were not compared on the first batch: a part of the model was called, and not the "
                "model. `trl_padfix.check_parity(model, batch)` compares them."
            )
        self._has_stepped = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is not None:
            self._counters["train"].pause()
            self._is_evaluating = True
            self._count("eval")

    def _count(self, mode: str) -> None:
        counts = forward_counts(self.handles[0])
        new = [now - before for now, before in zip(counts, self._counted, strict=True)]
        self._counters[mode].add(summed_over_processes(torch.tensor(new), self._trainer))
        self._counted = counts

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._trainer is None or logs is None:
            return
        if self._is_evaluating:
            metrics = {f"eval_{name}": value for name, value in self._counters["eval"].report(True).items()}
            self._is_evaluating, self._counters["eval"] = False, TokenCounter()
        else:
            metrics = self._counters["train"].report(True)
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.remove()


def settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """
    Arguments of [`PaddingRemovalCallback`] in the configuration of another stack, where they begin with `padfix_`.

    Raises:
        ValueError: For a name that begins so and is none of them.
    """
    given = {key: value for key, value in config.items() if str(key).startswith(PREFIX) and value is not None}
    known = [f"{PREFIX}{name}" for name in inspect.signature(PaddingRemovalCallback).parameters]
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"trl_padfix has no keys {unknown}; it has {known}.")
    return {key.removeprefix(PREFIX): value for key, value in given.items()}


def _refuse_taken_over(trainer: Any) -> None:
    """Raise a [`PaddingRemovalError`] if something is around the model that expects its forward to stay as it is."""
    for module in (m for model in (trainer.model, trainer.model_wrapped) for m in model.modules()):
        taken = next((WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in WRAPPERS), None)
        if getattr(module, "_compiled_call_impl", None) is not None or trainer.args.torch_compile:
            taken = "`torch.compile`"
        if taken is None:
            continue
        remedy = (
            "Train with `torch_compile=False`, or with a trainer of this package (`padding_free_trainer`), which "
            "compiles the layers of a packed model one by one."
            if "compile" in taken
            else "Attach before: call `callback.attach(trainer)` between making the trainer and `trainer.train()`."
        )
        raise PaddingRemovalError(
            f"{taken} has taken over `{type(module).__name__}` before padding removal was attached to it, and "
            f"would not see, or not follow, the packed forward. {remedy}"
        )


def _trainer_with(callback: TrainerCallback) -> Any:
    """The trainer that is calling `callback`: callbacks are not handed it, and only it knows the reference."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise PaddingRemovalError(
        f"{type(callback).__name__} was called by no `transformers.Trainer` that has it among its callbacks. In other "
        "loops use `remove_padding(model)`."
    )
