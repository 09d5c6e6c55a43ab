"""
Plug-in of ms-swift: callbacks named `padfix` (padding removal) and `padfix_sharing` (with prefix sharing, too).

`--external_plugins` takes a file. It needs one line, `import trl_padfix.integrations.ms_swift`:

    swift rlhf --rlhf_type dpo ... --external_plugins padfix.py --callbacks padfix_sharing
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..versions import require_stack
from .callback import PaddingRemovalCallback


require_stack("ms-swift")

from swift.callbacks import callbacks_map  # noqa: E402


if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState


__all__ = ["PaddingRemoval", "PadfixCallback", "PrefixSharing"]


class PadfixCallback(PaddingRemovalCallback):
    """
    [`PaddingRemovalCallback`] with the constructor of ms-swift's callbacks; attaches before DeepSpeed or FSDP wraps.

    Args:
        args (`TrainingArguments`): ms-swift's arguments.
        trainer (`Trainer`): ms-swift's trainer, whose `__init__` is running.
    """

    sharing = False

    def __init__(self, args: Any, trainer: Trainer):
        super().__init__(self.sharing)
        self._new_trainer = trainer  # it has no model yet

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.attach(self._new_trainer)


class PrefixSharing(PadfixCallback):
    """[`PadfixCallback`] with `prefix_sharing=True`."""

    sharing = True


PaddingRemoval = PadfixCallback
"""Former name, which plug-in files of users import."""

callbacks_map.update(padfix=PadfixCallback, padfix_sharing=PrefixSharing)
