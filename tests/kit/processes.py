"""Several processes at once, as a shell would launch them."""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from pathlib import Path


__all__ = ["ROOT", "run_processes"]

ROOT = Path(__file__).parents[2]


def run_processes(command: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """
    What the processes of a launcher said; those that wait for each other are ended, with return code -9.

    Their communication on CPU (gloo, below torch's FSDP2) ends a process with SIGSEGV about once in hundreds of runs.
    That is told, with the stack that it happened in, and the command is run once more; no other failure is.
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
        if last or "(SIGSEGV)" not in said:
            break
        where = said.find("Fatal Python error")
        warnings.warn(f"a process crashed, and the command is run again: {said[where : where + 3000]}", stacklevel=2)
    return subprocess.CompletedProcess(command, process.returncode, output, said)
