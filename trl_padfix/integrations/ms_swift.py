"""
Plug-in of ms-swift: callbacks named `padfix` (padding removal), `padfix_sharing` (with prefix sharing, too) and
`padfix_auto` (with prefix sharing where the model can); with `_unchecked` after the name, without the parity check.

    plugin=$(python -m trl_padfix.integrations.swift.padfix)
    swift rlhf --rlhf_type dpo ... --external_plugins $plugin --callbacks padfix_auto
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState

from ..core.errors import PaddingRemovalError
from ..core.handle import PrefixSharing
from ..versions import require_stack
from .callback import PACKS, PaddingRemovalCallback


require_stack("ms-swift")

from swift.callbacks import callbacks_map  # noqa: E402


__all__ = ["PadfixCallback"]


class PadfixCallback(PaddingRemovalCallback):
    """
    [`PaddingRemovalCallback`] with the constructor of ms-swift's callbacks; attaches before DeepSpeed or FSDP wraps.

    Args:
        args (`TrainingArguments`): ms-swift's arguments.
        trainer (`Trainer`): ms-swift's trainer, whose `__init__` is running.
    """

    sharing: PrefixSharing = False
    checks = True
    words = {
        "`padding_free=False`": "`--callbacks` without `padfix`",
        "`prefix_sharing=False`": "`--callbacks padfix`",
        "`parity_check=False`": "`--callbacks padfix_unchecked`",
    }

    def __init__(self, args: Any, trainer: Trainer):
        super().__init__(self.sharing, parity_check=self.checks)
        self._new_trainer = trainer  # it has no model yet

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        template: Any = self._new_trainer.template  # ms-swift's settings of batches
        if (size := template.sequence_parallel_size) > 1:
            raise PaddingRemovalError(
                f"`--sequence_parallel_size {size}` splits each padded row over processes, but a packed batch has no "
                "such rows. Leave it out, or train without the callback."
            )
        packed = {"packing": template.packing, "padding_free": template.padding_free}
        if flags := [name for name, is_on in packed.items() if is_on]:
            raise PaddingRemovalError(
                f"`--{flags[0]} true` {PACKS} Set `--{flags[0]} false`, or train without the callback."
            )
        self.attach(self._new_trainer)


for suffix, prefix_sharing in {"": False, "_sharing": True, "_auto": "auto"}.items():
    for ending, checks in {"": True, "_unchecked": False}.items():
        name = f"padfix{suffix}{ending}"
        callbacks_map[name] = type(name, (PadfixCallback,), {"sharing": prefix_sharing, "checks": checks})
