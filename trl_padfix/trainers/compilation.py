"""`torch_compile=True` for a trainer whose models have no padding: their layers are compiled, one by one."""

from __future__ import annotations

import contextlib
from typing import Any

from ..core.errors import PaddingRemovalError
from .field_types import temporarily_set
from .launches import is_zero_3
from .parts import Part, entered


__all__ = ["Compilation"]


class Compilation(Part):
    """Models without padding are not compiled as a whole, their layers are: see `compile_layers`."""

    def constructing(self, config: Any) -> contextlib.AbstractContextManager[Any]:
        if not (self.settings.padding_free and getattr(config, "torch_compile", False)):
            return contextlib.nullcontext()
        # accelerate goes by the backend, whether or not anything is to be compiled.
        values = {"torch_compile": False, "torch_compile_backend": None}
        return entered(temporarily_set(config, name, value) for name, value in values.items())

    def ready(self) -> None:
        args, handles = self.trainer.args, self.trainer.padding.handles
        if not (handles and args.torch_compile):
            return
        if is_zero_3(self.trainer.accelerator):
            raise PaddingRemovalError(
                "`torch_compile=True` makes one graph of each decoder layer, and DeepSpeed ZeRO-3 gathers weights "
                "module by module within it. Set `torch_compile=False`, or shard with ZeRO-2 or FSDP2."
            )
        from ..core.attention.compiled import compile_layers

        for handle in handles:
            compile_layers(handle, backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)
