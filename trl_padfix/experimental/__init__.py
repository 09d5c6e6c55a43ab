"""
TRL's experimental trainers without padding, by TRL's names and paths.

`trl_padfix.experimental.orpo`, `.orpo.orpo_config`, `.orpo.orpo_trainer` and their siblings have no files: they are
made from the table in `tasks.py` when they are imported. TRL may change or remove its own in any release.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..versions import require


class _TableModules(MetaPathFinder, Loader):
    """Finds and fills the modules of the table."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        before, _, rest = fullname.partition(f"{__name__}.")
        if before:
            return None
        require("trl", "experimental")
        from .tasks import EXPERIMENTS

        name, _, part = rest.partition(".")
        if name not in EXPERIMENTS and not part:
            raise ImportError(
                f"trl_padfix has no `experimental.{name}`, but {', '.join(EXPERIMENTS)}. KTO and distillation are in "
                "`trl_padfix` itself; use any other trainer of TRL with `PaddingRemovalCallback`."
            )
        if name not in EXPERIMENTS or part not in ("", f"{name}_config", f"{name}_trainer"):
            return None
        return ModuleSpec(fullname, self, is_package=not part)

    def exec_module(self, module: ModuleType) -> None:
        from .tasks import classes_of

        name, _, part = module.__name__.removeprefix(f"{__name__}.").partition(".")
        # `orpo.orpo_config` has the very classes of `orpo`.
        classes = vars(import_module(f"{__name__}.{name}"))["_classes"] if part else classes_of(name)
        vars(module).update(classes, _classes=classes, __all__=[*classes])


sys.meta_path.append(_TableModules())


def __getattr__(name: str) -> Any:
    module = name.removesuffix("Trainer").removesuffix("Config").lower()
    if module == name.lower():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    import_module(f".{module}", __name__)  # which says what there is
    raise ImportError(f"Write `from {__name__}.{module} import {name}`.")
