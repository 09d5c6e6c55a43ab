"""Removes padding from the models of a trainer: policy, and reference or teacher."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import TrainingArguments

from ...core.context import temporarily_set
from ...core.errors import PaddingRemovalError
from ...core.remove import forget_original, remove_padding
from ..distributed import check_launch, is_zero, models_of
from .part import Part


__all__ = ["RemovePadding"]


class RemovePadding(Part):
    """`padding_free`: attaches to the models."""

    _compiles = False

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        for model in init_kwargs.values() if self.settings.padding_free else ():
            if isinstance(model, torch.nn.Module):
                forget_original(model)

    def around_init(self, config: TrainingArguments) -> contextlib.AbstractContextManager[Any]:
        # Here the decoder packs. TRL's own `padding_free` would pack in the collator, and TRL warns that it is off.
        values: dict[str, Any] = {"padding_free": False}
        if self.settings.padding_free and config is not None and config.torch_compile:
            # `_compile` compiles single layers. accelerate would compile the model whenever a backend is set, so
            # clearing the flag alone is not enough.
            values |= {"torch_compile": False, "torch_compile_backend": None}
        return temporarily_set(config, **values)

    def attach_to_models(self) -> None:
        self.restore()
        if self.settings.padding_free:
            check_launch(self.trainer)
            handles, counts = self.trainer.padding.handles, self.trainer.padding.counts
            for i, model in enumerate(models_of(self.trainer)):
                handle = remove_padding(
                    model,
                    prefix_sharing=self.settings.prefix_sharing,
                    pool_last_token=self.settings.pool_last_token,
                    strict=self.settings.strict,
                    packed_multiple_of=self.settings.packed_multiple_of,
                )
                handle.name = f"trainer.padding.handles[{i}]"
                if i == len(counts):
                    counts.append(handle.stats)
                handle.stats = counts[i]
                handles.append(handle)
        self._compile()

    def on_init_end(self) -> None:
        self._compiles = self.trainer.args.torch_compile
        self._compile()

    def _compile(self) -> None:
        args, handles = self.trainer.args, self.trainer.padding.handles if self._compiles else []
        if handles and is_zero(3, self.trainer.accelerator):
            raise PaddingRemovalError(
                "`torch_compile=True` makes one graph of each decoder layer, but DeepSpeed ZeRO-3 gathers weights "
                "module by module within it. Set `torch_compile=False`, or shard with ZeRO-2 or FSDP2."
            )
        from ...core.patches.compiled import compile_layers

        for handle in handles:
            compile_layers(handle, backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)

    def restore(self) -> None:
        for handle in reversed(self.trainer.padding.handles):
            handle.remove()
        self.trainer.padding.handles = []
