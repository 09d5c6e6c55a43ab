"""
Several processes at once, as a shell would launch them.

As a script it runs another one: `accelerate launch tests/kit/processes.py SCRIPT ARGS`, and leaves as [`leave`] does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn


__all__ = ["ROOT", "leave", "leave_with", "run_processes"]

ROOT = Path(__file__).parents[2]


def run_processes(command: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """What the processes of a launcher said; those that wait for each other are ended, with return code -9."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, said = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, said)


def leave() -> NoReturn:
    """End a process that has done its part, before a thread of gloo can abort it: see `gloo_abort.py`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_with(logged: dict[str, Any], accelerator: Any, folder: Path) -> NoReturn:
    """[`leave`], once the first process has written to `logged.json` what was logged, and how they were joined."""
    if accelerator.is_main_process:
        found = {"distributed": accelerator.distributed_type.value, **logged}
        (folder / "logged.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    leave()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()
