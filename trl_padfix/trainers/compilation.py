"""`torch_compile=True` for a trainer whose models have no padding: their layers are compiled, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..core.errors import PaddingRemovalError
from ..core.handle import PaddingRemoval
from .checks import is_zero_3
from .field_types import temporarily_set


__all__ = ["CompilationMixin"]


class CompilationMixin:
    """Compiled layers for a TRL trainer; a part of `PaddingRemovalMixin`."""

    _handles: list[PaddingRemoval]

    _removes_padding: bool

    @contextlib.contextmanager
    def _without_whole_compilation(self, config: Any) -> Iterator[None]:
        """Models without padding are not compiled as a whole, their layers are: see `compile_layers`."""
        compiles = self._removes_padding and getattr(config, "torch_compile", False)
        with contextlib.ExitStack() as stack:
            # accelerate goes by the backend, whether or not anything is to be compiled.
            for name, value in {"torch_compile": False, "torch_compile_backend": None}.items() if compiles else ():
                stack.enter_context(temporarily_set(config, name, value))
            yield

    def _compile_layers(self) -> None:
        """
        Raises:
            PaddingRemovalError: If DeepSpeed gathers weights within what would be one graph.
        """
        if not (self._handles and getattr(self.args, "torch_compile", False)):
            return
        if is_zero_3(self.accelerator):
            raise PaddingRemovalError(
                "`torch_compile=True` makes one graph of each decoder layer, and DeepSpeed ZeRO-3 gathers weights "
                "module by module within it. Set `torch_compile=False`, or shard with ZeRO-2 or FSDP2."
            )
        from ..core.attention.compiled import compile_layers

        for handle in self._handles:
            backend, mode = self.args.torch_compile_backend, self.args.torch_compile_mode
            compile_layers(handle, backend=backend or "inductor", mode=mode)
