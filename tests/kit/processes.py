"""Several processes at once, as a shell would launch them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn


__all__ = ["ROOT", "LaunchRepeated", "leave", "leave_with", "run_processes"]

ROOT = Path(__file__).parents[2]


class LaunchRepeated(UserWarning):
    """A launch that crashed and was repeated: `conftest.py` ends every summary with those of a run."""


def run_processes(command: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """
    What the processes of a launcher said; those that wait for each other are ended, with return code -9.

    Their communication on CPU (gloo) ends a process with SIGSEGV about once in hundreds of runs, and more often aborts
    one whose interpreter has ended. The command is run once more then, after no other failure, and the summary of the
    tests shows the stack ([`LaunchRepeated`]).
    """
    for last in (False, True):
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
        if last or not ("(SIGSEGV)" in said or ("(SIGABRT)" in said and "<no Python frame>" in said)):
            break
        stack = said[said.find("Fatal Python error") :][:3000]
        warnings.warn(LaunchRepeated(f"{' '.join(command)}\n{stack}"), stacklevel=2)
    return subprocess.CompletedProcess(command, process.returncode, output, said)


def leave() -> NoReturn:
    """End a process that has done its part: threads of gloo outlive the group, and abort one interpreter in twenty."""
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
