"""
TRL's experimental trainers without padding, by TRL's names.

`trl_padfix.experimental.orpo` and its siblings have no files: they are made from the table in `tasks.py` when they are
imported. TRL may change or remove its own in any release.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..versions import require


class _TableModules(MetaPathFinder, Loader):
    """Finds and fills the modules of the table."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        before, _, name = fullname.partition(f"{__name__}.")
        if before:
            return None
        require("trl", "experimental")
        from .tasks import EXPERIMENTS

        if name not in EXPERIMENTS:
            raise ImportError(
                f"trl_padfix has no `experimental.{name}`, but the modules {', '.join(EXPERIMENTS)}: `from "
                "trl_padfix.experimental.orpo import ORPOTrainer`. KTO and distillation are in `trl_padfix` itself; "
                "import all else from `trl.experimental`, and use other trainers with `PaddingRemovalCallback`."
            )
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        from .tasks import classes_of

        classes = classes_of(module.__name__.removeprefix(f"{__name__}."))
        vars(module).update(classes, __all__=[*classes])


sys.meta_path.append(_TableModules())
