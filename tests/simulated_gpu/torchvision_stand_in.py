"""
torchvision beside a torch that it was not compiled for: its wheel on PyPI beside a torch of CPUs only.

Such a torchvision fails on import, because its Python code registers fake kernels for compiled operators (`nms` and
its kin) that could not be loaded. Declaring the operators is enough: the processors of images and videos, for which
transformers needs torchvision, call none of them. Nothing is declared where torchvision loads by itself, or is not
installed.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec

import torch


__all__ = ["torchvision_loads"]

_declared: list[torch.library.Library] = []


def torchvision_loads() -> bool:
    """Whether `import torchvision` works, if need be with its compiled operators declared and not defined."""
    if find_spec("torchvision") is None:
        return False
    while True:
        try:
            importlib.import_module("torchvision")
            return True
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                return False
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(f"{missing[1]}(Tensor x) -> Tensor")
        _declared.append(library)
