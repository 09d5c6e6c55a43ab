"""
The mixin that removes padding from a TRL trainer.

It attaches `remove_padding` to the policy and the reference, lets the default collator honour the padding side,
runs the parity check on the first batches and counts tokens. Losses, metrics and the loop are TRL's.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

from ..attention import PaddingRemovalError
from ..decoder import PaddingRemoval, attachments_of, number_padded_rows, remove_padding
from ..forwards import Attachment
from ..parity import check_parity
from .cards import card_tags, describe_in_card
from .checks import (
    check_model,
    check_settings,
    check_tokenizer,
    explain_missing_flash_attention,
    refuse_images,
    require_rows,
)


__all__ = ["PaddingRemovalMixin", "TokenMeter"]

logger = get_logger(__name__)


class TokenMeter:
    """Tokens and seconds since the last report, of one mode (training or evaluation), summed over processes."""

    def __init__(self) -> None:
        self.padded = self.real = self.packed = 0
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, padded: int, real: int, packed: int) -> None:
        self.padded += padded
        self.real += real
        self.packed += packed

    def report(self, padding_free: bool) -> dict[str, float]:
        """The metrics since the last report; begins anew."""
        self.pause()
        padded, real, packed, seconds = self.padded, self.real, self.packed, self.seconds
        self.__init__()
        if not padded:
            return {}
        self.start()
        metrics = {"perf/tokens_per_second": real / seconds}
        if padding_free:
            metrics |= {"padfix/pad_fraction": 1 - real / padded, "padfix/shared_fraction": 1 - packed / real}
        return metrics


class PaddingRemovalMixin:
    """
    Padding removal for a TRL trainer; stands in front of TRL's class.

    A configuration of this package switches it with its fields; a plain one of TRL's is taken as it is, its
    `padding_free` honoured.
    """

    _collators: dict[type, type] = {}
    """Default collators of TRL's and what they become."""

    _takes_images = True
    """Whether image data is left to TRL and to `remove_padding` to accept or refuse."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args")
        self._handles: list[PaddingRemoval] = []
        self._numberings: list[Attachment] = []
        self._parity_pending = {"train", "eval"}
        self._meters = {"train": TokenMeter(), "eval": TokenMeter()}
        self._removes_padding = bool(getattr(config, "padding_free", False))
        self._check_before(config, given)
        try:
            # TRL warns that its own padding-free is off (0.29 and later) or refuses it; the decoder does it here.
            with _field(config, "padding_free", False):
                super().__init__(*args, **kwargs)
            self.padding_free = self._removes_padding
            self._set_up_padding()
        except BaseException as error:
            self.restore_padding()
            if isinstance(error, ImportError):
                explain_missing_flash_attention(error)
            raise

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        """Errors that are better raised before a model is loaded. `given` are the arguments of `__init__` by name."""
        check_settings(config, given.get("data_collator"), self._collators)
        check_model(given.get("model"), self._removes_padding)
        check_tokenizer(given.get("processing_class"))
        require_rows(given.get("train_dataset"), "train")
        if self._removes_padding and not self._takes_images:
            refuse_images(given.get("train_dataset"))

    def _set_up_padding(self) -> None:
        """Attach, and set the collator's side. Called again after `__init__`, where TRL needed it earlier."""
        models = [m for m in (self.model, getattr(self, "ref_model", None)) if m is not None]
        wanted = self._collators.get(type(self.data_collator))
        if wanted is not None:
            tokenizer = getattr(self, "_tokenizer", self.processing_class)
            side = getattr(self.args, "padding_side", None) or tokenizer.padding_side
            given = {f.name: getattr(self.data_collator, f.name) for f in fields(self.data_collator)}
            self.data_collator = wanted(**given, padding_side=side)
        if self._handles or self._numberings:
            return
        # A trainer before this one may have left its own on the models, as training in stages does.
        for attachment in (a for model in models for a in attachments_of(model) if a.is_trainers):
            attachment.remove()
        if not self._removes_padding:
            if wanted is not None and self.data_collator.padding_side == "left":
                self._numberings = [n for n in map(number_padded_rows, models) if n is not None]
            for numbering in self._numberings:
                numbering.is_trainers = True
            return
        if self.args.n_gpu > 1:
            raise PaddingRemovalError(
                f"`nn.DataParallel` on {self.args.n_gpu} GPUs runs copies of the model that share one decoder. Launch "
                "with `accelerate launch`, or show one GPU with `CUDA_VISIBLE_DEVICES`."
            )
        parallelism = self.accelerator.parallelism_config
        for size in ("cp_size", "sp_size"):
            if parallelism is not None and (getattr(parallelism, size, 1) or 1) > 1:
                raise PaddingRemovalError(
                    f"`{size}` splits every padded row over processes, and a packed batch has no such rows. Set "
                    "`padding_free=False`, or train without context and sequence parallelism."
                )
        if self.args.torch_compile:
            logger.warning("`torch_compile=True` has no effect on packed forwards: their shapes change every batch.")
        for model in models:
            sharing = bool(getattr(self.args, "prefix_sharing", False))
            self._handles.append(remove_padding(model, prefix_sharing=sharing))
            self._handles[-1].is_trainers = True

    def restore_padding(self) -> None:
        """
        Detach from the models: they compute padded batches again, in this trainer too.

        After training they stay attached, until this is called or another trainer of this package takes them over.
        """
        for attachment in (*self._handles, *self._numberings):
            attachment.remove()
        self._handles, self._numberings, self._removes_padding = [], [], False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        mode = "train" if self.model.training else "eval"
        if mode in self._parity_pending and self._removes_padding and getattr(self.args, "parity_check", True):
            self._parity_pending.discard(mode)
            for batch in self._padded_batches(inputs):
                self._check_parity(model, batch)
        self._meters[mode].start()
        self._count_tokens(mode, inputs)
        return super().compute_loss(self._called_by_loss(model), inputs, *args, **kwargs)

    def _called_by_loss(self, model: Any) -> Any:
        """What TRL's loss is to call for the model."""
        return model

    def _padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy that a step on `inputs` takes."""
        return [{name: inputs[name] for name in ("input_ids", "attention_mask")}]

    def _count_tokens(self, mode: str, inputs: dict[str, Any]) -> None:
        counts = [0, 0, 0]
        for batch in self._padded_batches(inputs):
            layout = self._handles[0].layout_of(batch) if self._handles else None
            if layout is not None:
                found = (layout.padded_tokens, layout.real_tokens, layout.packed_tokens)
            else:
                padded, real = batch["attention_mask"].numel(), int(batch["attention_mask"].sum())
                found = (padded, real, padded)
            counts = [a + b for a, b in zip(counts, found, strict=True)]
        self._add_tokens(mode, counts)

    def _add_tokens(self, mode: str, counts: list[int]) -> None:
        if self.accelerator.num_processes > 1:
            alike = getattr(self, "get_tp_size", lambda: 1)()  # tensor-parallel processes have the same rows
            summed = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device))
            counts = [count // alike for count in summed.tolist()]
        self._meters[mode].add(*counts)

    def _check_parity(self, model: Any, inputs: dict[str, Any]) -> None:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        for target in (model, getattr(self, "ref_model", None)):
            if target is None:
                continue
            report = check_parity(target if sharded else self.accelerator.unwrap_model(target), inputs, dtype=dtype)
            report.raise_if_failed()
            logger.log(logging.INFO if report.compared else logging.WARNING, str(report))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._meters["train"].pause()
        self._meters["eval"] = TokenMeter()
        return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "train" if self.model.training else "eval"
        # TRL logs the means of these lists, with the prefix of the mode.
        for name, value in self._meters[mode].report(self._removes_padding).items():
            self._metrics[mode][name] = [value]
        super().log(logs, *args, **kwargs)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        handle = self._handles[0] if self._handles else None
        given = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*given, *card_tags(handle)])
        if self.is_world_process_zero():
            describe_in_card(Path(self.args.output_dir) / "README.md", handle)


@contextlib.contextmanager
def _field(config: Any, name: str, value: Any) -> Iterator[None]:
    """`config.name` set to `value` until the block ends; nothing where there is no config."""
    if config is None or not hasattr(config, name):
        yield
        return
    saved = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, saved)
