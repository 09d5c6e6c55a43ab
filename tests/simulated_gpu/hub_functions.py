"""Functions of transformers as the package `kernels` leaves them: modules that call them."""

from __future__ import annotations

import inspect
import sys
from typing import Any
from unittest import mock

from torch import nn

from trl_padfix.core.mixers.primitives import _REPLACEMENTS


__all__ = ["as_modules"]


def as_modules(model: nn.Module) -> Any:
    """
    Until the block ends, the functions of a model's mixers are modules.

    Transformers may ask for a later `kernels` than the one at hand, so its decorator is applied here.
    """
    from kernels import use_kernel_forward_from_hub

    space = vars(sys.modules[type(model).__module__])
    plain = {name: space[name] for name in _REPLACEMENTS.keys() & space.keys() if inspect.isfunction(space[name])}
    return mock.patch.dict(space, {name: use_kernel_forward_from_hub(name)(own) for name, own in plain.items()})
