"""
The mixin that removes padding from a TRL trainer.

It attaches `remove_padding` to the policy and the reference, lets the default collator honour the padding side,
runs the parity check on the first batches and counts tokens. Losses, metrics and the loop are TRL's.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sized
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import EvalLoopOutput

from ..core.compiled import compile_layers
from ..core.errors import PaddingRemovalError
from ..core.find import find_decoder, find_multimodal, find_pretrained
from ..core.handle import Attachment, PaddingRemoval
from ..core.parity import check_parity
from ..core.remove import attachments_of, number_padded_rows, remove_padding
from .batch_layouts import LayoutCollator, layouts_of_step, without_layout
from .cards import card_tags, describe_in_card
from .checks import (
    check_model,
    check_settings,
    check_tokenizer,
    check_vision,
    column_names,
    explain_missing_flash_attention,
    refuse_images,
    require_rows,
)
from .metrics import EvalMeans, TokenMeter, gathering_nothing, own_rows


__all__ = ["PaddingRemovalMixin"]

logger = get_logger(__name__)


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
        self._eval_means = EvalMeans()
        self._removes_padding = bool(getattr(config, "padding_free", False))
        self._check_before(config, given)
        try:
            # TRL warns that its own padding-free is off (0.29 and later) or refuses it; the decoder does it here.
            # Whole models are not compiled, their layers are: see `compile_layers`.
            whole = not self._removes_padding and getattr(config, "torch_compile", False)
            with _field(config, "padding_free", False), _field(config, "torch_compile", whole):
                super().__init__(*args, **kwargs)
            self.padding_free = self._removes_padding
            self._set_up_padding()
            if getattr(self.args, "torch_compile", False):
                for handle in self._handles:
                    backend, mode = self.args.torch_compile_backend, self.args.torch_compile_mode
                    compile_layers(handle, backend=backend or "inductor", mode=mode)
            self._check_images()
            self._keep_padding_side()
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
        self._check_launch()
        for model in models:
            sharing = bool(getattr(self.args, "prefix_sharing", False))
            self._handles.append(remove_padding(model, prefix_sharing=sharing))
            self._handles[-1].is_trainers = True

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
        parallelism = self.accelerator.parallelism_config
        for size in ("cp_size", "sp_size"):
            if parallelism is not None and (getattr(parallelism, size, 1) or 1) > 1:
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

        handler.call_event = call

    def _check_images(self) -> None:
        """Images that the model could not be given, or not in their places, before the first step."""
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        for name, dataset in {"train": self.train_dataset, **evaluated}.items() if self._takes_images else ():
            images = ", ".join(map(repr, sorted(column_names(dataset) & {"image", "images"})))
            if not images:
                continue
            if not getattr(self, "_is_vision_dataset", False):
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
        Detach from the models: they compute padded batches again, in this trainer too.

        After training they stay attached, until this is called or another trainer of this package takes them over.
        """
        for attachment in (*self._handles, *self._numberings):
            attachment.remove()
        self._handles, self._numberings, self._removes_padding = [], [], False

    def get_train_dataloader(self) -> Any:
        # Where one process collates for all (iterable datasets), batches are cut and sent on tensor by tensor.
        by_rows = isinstance(self.train_dataset, Sized) and not self.accelerator.dispatch_batches
        plain = type(self)._padded_batches is PaddingRemovalMixin._padded_batches
        if not (self._handles and by_rows and plain):
            return super().get_train_dataloader()
        collator = LayoutCollator(self.data_collator, self._handles[0].prefix_sharing)
        with _field(self, "data_collator", collator):
            return super().get_train_dataloader()

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs, layout = without_layout(inputs)
        mode = "train" if self.model.training else "eval"
        if mode in self._parity_pending and self._handles and getattr(self.args, "parity_check", True):
            for batch in self._padded_batches(inputs):
                if self._handles[0].layout_of(batch) is not None:
                    self._parity_pending.discard(mode)
                    self._check_parity(model, batch | self._beside_text(inputs))
        self._meters[mode].start()
        returns_outputs = bool(args[0] if args else kwargs.get("return_outputs"))
        own, counts = inputs, True
        if mode == "eval" and self._batch_size_of(inputs) is not None and not returns_outputs:
            own, counts = own_rows(self.accelerator, inputs, self._rows_per_item)
        size = None if mode == "train" else self._batch_size_of(own)
        logged = {name: len(values) for name, values in self._metrics[mode].items()}
        with contextlib.ExitStack() as stack:
            sharing = bool(self._handles and self._handles[0].prefix_sharing)
            stack.enter_context(layouts_of_step(inputs, layout, sharing))  # policy's and reference's forward share it
            stack.enter_context(self._counting(mode, own))
            if size is not None:
                stack.enter_context(gathering_nothing(self.accelerator))
            result = super().compute_loss(self._called_by_loss(model), own, *args, **kwargs)
        if size is not None:
            sizes = {name: counts * n for name, n in {"loss": size, **self._metric_sizes(own)}.items()}
            new = {name: v[-1] for name, v in self._metrics[mode].items() if len(v) > logged.get(name, 0)}
            self._eval_means.add(self.accelerator, sizes, result[0] if returns_outputs else result, new)
        return result

    _rows_per_item = 1
    """Rows of a batch that belong together: two where pairs come as `[chosen, rejected]`."""

    def _batch_size_of(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """
        What the loss of a batch is a mean over, counted.

        Where it is `None`, evaluation counts every batch alike, as TRL does: its means then depend on the batch size.
        """
        return None

    def _metric_sizes(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What some metrics of a batch are means over, counted; the others are over what the loss is."""
        return {}

    def _called_by_loss(self, model: Any) -> Any:
        """What TRL's loss is to call for the model."""
        return model

    def _padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy that a step on `inputs` takes."""
        return [{name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}]

    def _beside_text(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What a multimodal model is given of a batch beside ids and mask."""
        multimodal = self._handles[0].multimodal if self._handles else None
        if multimodal is None:
            return {}
        known = inspect.signature(multimodal.forward).parameters.keys() - {"input_ids", "attention_mask", "labels"}
        return {name: value for name, value in inputs.items() if name in known}

    @contextlib.contextmanager
    def _counting(self, mode: str, inputs: dict[str, Any]) -> Iterator[None]:
        """Count the tokens of a step; what images share is known once they went through the model."""
        if not (self._handles and self._handles[0].prefix_sharing and self._beside_text(inputs)):
            self._count_tokens(mode, inputs)
            yield
            return
        stats, mask = self._handles[0].stats, inputs["attention_mask"]
        real, packed = stats.real_tokens, stats.packed_tokens
        yield
        share = (stats.packed_tokens - packed) / max(stats.real_tokens - real, 1)
        self._add_tokens(mode, [mask.numel(), int(mask.sum()), round(share * int(mask.sum()))])

    def _count_tokens(self, mode: str, inputs: dict[str, Any]) -> None:
        counts = [0, 0, 0]
        for batch in self._padded_batches(inputs):
            layout = self._handles[0].layout_of(batch) if self._handles else None
            if layout is not None:
                found = (layout.padded_tokens, layout.real_tokens, layout.packed_tokens)
            else:
                padded = batch["input_ids"].numel()
                real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else padded
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

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self._eval_means = EvalMeans()
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
        )
        for mean in self._eval_means.of("loss").values():
            output.metrics[f"{metric_key_prefix}_loss"] = mean
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "train" if self.model.training else "eval"
        # TRL logs the means of these lists, with the prefix of the mode.
        if mode == "eval":
            means = self._eval_means.of(*(name for name in self._metrics[mode] if name != "num_tokens"))
            self._metrics[mode].update({name: [mean] for name, mean in means.items()})
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
