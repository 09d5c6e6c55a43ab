"""The `trl-padfix` command, a module for each of its commands. Heavy imports wait until a command runs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


__all__ = ["INTERRUPTED", "METHODS", "disable_telemetry", "main"]

METHODS = {name.lower(): name for name in ("DPO", "SFT", "Reward", "KTO", "GRPO", "RLOO", "Distillation")}
"""Commands, and the first part of the names of their trainers and configurations."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def disable_telemetry() -> None:
    """
    Switch the telemetry of `datasets` and `huggingface_hub` off; environment variables of the user stay.

    Both libraries read these variables at import, so call it before.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL's trainers report their class when they are built
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # `datasets` counts uses of its builders, also of files


def main() -> None:
    """Run the command."""
    if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
        sys.exit(f"trl-padfix: the command line needs {', '.join(missing)}. In a clone, run: pip install -e '.[cli]'")
    if {"-h", "--help"} & {*sys.argv}:
        # transformers imports PEFT with its configurations, and PEFT all models: half of the time. No flag needs it.
        sys.modules["peft"] = None  # type: ignore[assignment]
    try:
        from .app import app

        app(prog_name="trl-padfix")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
