"""
TRL's trainers without padding: one mixin over TRL's classes.

The mixin attaches `remove_padding` to the policy and the reference, lets the default collator honour the padding side,
runs the parity check on the first batches and counts tokens. Losses, metrics and the loop are TRL's.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import trl
import trl.trainer.dpo_trainer as trl_dpo
from datasets import Dataset
from transformers import ProcessorMixin

from .attention import PaddingRemovalError
from .collators import DataCollatorForPreference, check_padding_side, check_pair
from .decoder import PaddingRemoval, remove_padding
from .parity import check_parity


__all__ = ["DPOTrainer"]

logger = logging.getLogger(__name__)


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = bound.get("args")
        self._handles: list[PaddingRemoval] = []
        self._parity_pending = {"train", "eval"}
        self._meters = {"train": TokenMeter(), "eval": TokenMeter()}
        self._removes_padding = bool(getattr(config, "padding_free", False))
        self._check_before(config, bound.get("processing_class"))
        # TRL warns that its own padding-free is off (0.29 and later) or refuses it; the decoder does it here.
        with _field(config, "padding_free", False):
            super().__init__(*args, **kwargs)
        self.padding_free = self._removes_padding
        self._set_up_padding()

    def _check_before(self, config: Any, processing_class: Any) -> None:
        """Errors that are better raised before a model is loaded."""
        check_padding_side(getattr(config, "padding_side", None))
        tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
        if tokenizer is not None and tokenizer.pad_token is None and tokenizer.eos_token is None:
            raise ValueError(
                "The tokenizer has neither a pad token nor an EOS token, so there is nothing to pad batches or to end "
                "completions with. Set `tokenizer.pad_token` and `tokenizer.eos_token`."
            )
        if self._removes_padding and getattr(config, "neftune_noise_alpha", None):
            raise PaddingRemovalError(
                "`neftune_noise_alpha` scales its noise by the length of the padded row, which a packed batch does "
                "not have. Set one of `neftune_noise_alpha` and `padding_free`."
            )

    def _set_up_padding(self) -> None:
        """Attach, and set the collator's side. Called again after `__init__`, where TRL needed it earlier."""
        wanted = self._collators.get(type(self.data_collator))
        if wanted is not None:
            side = getattr(self.args, "padding_side", None) or self._tokenizer.padding_side
            given = {f.name: getattr(self.data_collator, f.name) for f in fields(self.data_collator)}
            self.data_collator = wanted(**given, padding_side=side)
        if not self._removes_padding or self._handles:
            return
        parallelism = self.accelerator.parallelism_config
        for size in ("cp_size", "sp_size"):
            if parallelism is not None and (getattr(parallelism, size, 1) or 1) > 1:
                raise PaddingRemovalError(
                    f"`{size}` splits every padded row over processes, and a packed batch has no such rows. Set "
                    "`padding_free=False`, or train without context and sequence parallelism."
                )
        models = [m for m in (self.model, getattr(self, "ref_model", None)) if m is not None]
        try:
            for model in models:
                sharing = bool(getattr(self.args, "prefix_sharing", False))
                self._handles.append(remove_padding(model, prefix_sharing=sharing))
        except Exception:
            self.remove_padding_removal()
            raise

    def remove_padding_removal(self) -> None:
        """Detach from the models: they compute padded batches again, in this trainer too."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._removes_padding = [], False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        mode = "train" if self.model.training else "eval"
        self._meters[mode].start()
        self._count_tokens(mode, inputs)
        if mode in self._parity_pending and self._removes_padding and getattr(self.args, "parity_check", True):
            self._parity_pending.discard(mode)
            self._check_parity(model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _count_tokens(self, mode: str, inputs: dict[str, Any]) -> None:
        layout = None
        if self._handles:
            layout = self._handles[0].layout_of({k: inputs.get(k) for k in ("input_ids", "attention_mask")})
        if layout is not None:
            counts = (layout.padded_tokens, layout.real_tokens, layout.packed_tokens)
        else:
            padded, real = inputs["attention_mask"].numel(), int(inputs["attention_mask"].sum())
            counts = (padded, real, padded)
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device)).tolist()
        self._meters[mode].add(*counts)

    def _check_parity(self, model: Any, inputs: dict[str, Any]) -> None:
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        target = model if sharded else self.accelerator.unwrap_model(model)
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        report = check_parity(target, inputs, dtype=dtype)
        report.raise_if_failed()
        logger.info("%s", report)

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


class DPOTrainer(PaddingRemovalMixin, trl.DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`] without padding.

    Takes what TRL's takes. With `padding_free=True` in its configuration the decoder of policy and reference computes
    real tokens only, with `prefix_sharing=True` also no prompt twice; batches are padded on the tokenizer's side, or
    on `padding_side`. Losses, metrics and gradients are those of the padded computation.

    Logs `perf/tokens_per_second` (real tokens per second of wall time), `padfix/pad_fraction` (share of the padded
    batch that was padding) and `padfix/shared_fraction` (share of the real tokens that were computed once for several
    rows) beside TRL's metrics.

    Args:
        *args, **kwargs:
            As [`~trl.DPOTrainer`]. `args` may be this package's [`DPOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For input that could not be trained on as meant: missing columns, empty completions, no pad token.
    """

    _collators = {trl_dpo.DataCollatorForPreference: DataCollatorForPreference}

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        columns = set(dataset.column_names or next(iter(dataset)))
        missing = sorted({"chosen", "rejected"} - columns)
        if missing and "chosen_ids" not in columns:
            raise ValueError(
                f"The {dataset_name} dataset has no column {' and no column '.join(map(repr, missing))}; it has "
                f"{sorted(columns)}. DPO needs `chosen` and `rejected` (and `prompt`, unless both begin with it): "
                "rename its columns, or map it to them."
            )
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(prepared, Dataset):
            _report_pairs(prepared, len(dataset), args.max_length, dataset_name)
        return prepared

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL computes these inside its `__init__`, before ours has attached.
        self._set_up_padding()
        return super()._precompute_ref_logps(*args, **kwargs)


def _report_pairs(prepared: Dataset, given: int, max_length: int | None, name: str) -> None:
    """Stop at pairs that cannot be scored; say how many teach nothing or were left out."""
    if len(prepared) == 0:
        raise ValueError(
            f"No pair of the {name} dataset is left: all {given} prompts fill `max_length={max_length}` by "
            "themselves, so every completion would be cut off. Raise `max_length`, or shorten the prompts."
        )
    equal, index = 0, 0
    for batch in prepared.select_columns(["chosen_ids", "rejected_ids"]).iter(1000):
        for pair in (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)):
            check_pair(pair, f"pair {index} of the {name} dataset")
            equal += pair["chosen_ids"] == pair["rejected_ids"]
            index += 1
    if equal:
        logger.warning(
            f"{equal} of {len(prepared)} pairs of the {name} dataset have equal completions: they teach nothing and "
            "cost a step's time. Drop them."
        )
    if len(prepared) < given:
        logger.warning(
            f"{given - len(prepared)} of {given} pairs of the {name} dataset were left out by TRL: their prompts fill "
            f"`max_length={max_length}` by themselves. Raise `max_length` to train on them."
        )


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
