"""
The plug-in of ms-swift: callbacks named `padfix` (padding removal) and `padfix_sharing` (common prefixes once, too).

`--external_plugins` takes a file. It needs one line, `import trl_padfix.integrations.ms_swift`:

    swift rlhf --rlhf_type dpo ... --external_plugins padfix.py --callbacks padfix_sharing
"""

from __future__ import annotations

from typing import Any

from ..versions import require_stack
from .callback import PaddingRemovalCallback


require_stack("ms-swift")

from swift.callbacks import callbacks_map  # noqa: E402


__all__ = ["PaddingRemoval", "PrefixSharing"]


class PaddingRemoval(PaddingRemovalCallback):
    """
    [`PaddingRemovalCallback`] as ms-swift makes its callbacks; attaches before DeepSpeed or FSDP wraps the models.

    Args:
        args (`TrainingArguments`): ms-swift's arguments.
        trainer (`Trainer`): ms-swift's trainer, which is being made.
    """

    sharing = False

    def __init__(self, args: Any, trainer: Any):
        super().__init__(self.sharing)
        self.made_for = trainer

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.attach(self.made_for)


class PrefixSharing(PaddingRemoval):
    """The same with `prefix_sharing=True`."""

    sharing = True


callbacks_map.update(padfix=PaddingRemoval, padfix_sharing=PrefixSharing)
