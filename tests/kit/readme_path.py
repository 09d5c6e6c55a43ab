"""
The README's path as a user takes it: its commands as they are written and in their order, then each command that
these print. In an environment that is empty but for torch, in a clone:

    PYTHONPATH=tests python -m kit.readme_path
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from subprocess import PIPE, STDOUT, Popen

from kit.printed import ROOT, of_text  # nothing of the package, which the first command installs


HUB = "a model from the Hub: test_printed_commands.py runs it with a tiny one"
LEFT_OUT = {
    r"pip install -e \.$": "named to say what it leaves as it is",
    r'pip install -e "\.\[dev\]"|pytest ': "the tests, which CI runs",
    r".*[Qq]wen": HUB,
    r".*--device cuda": "needs a GPU: test_printed_commands.py runs it on a CPU",
}


def commands() -> list[str]:
    """The commands of the README, in its order."""
    text = (ROOT / "README.md").read_text()
    return sorted(dict.fromkeys(of_text(text)), key=text.index)


def why_not(command: str) -> str | None:
    return next((reason for pattern, reason in LEFT_OUT.items() if re.match(pattern, command)), None)


def follow(waiting: list[str], run: Callable[[str], str]) -> list[str]:
    """Give each command to `run`, which returns what it printed, and then each command found there; those that ran."""
    waiting, ran = list(waiting), []
    for command in waiting:  # grows on the way
        if reason := why_not(command):
            print(f"\n$ {command}\n(left out: {reason})", flush=True)
            continue
        printed = run(command)
        ran.append(command)
        if not command.startswith("pip "):  # it would tell us to upgrade it
            waiting += dict.fromkeys(found for found in of_text(printed) if found not in waiting)
    return ran


def run_in_shell(command: str) -> str:
    print(f"\n$ {command}", flush=True)
    begun = time.monotonic()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = []
    with Popen(command, shell=True, cwd=ROOT, env=env, stdout=PIPE, stderr=STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    print(f"({time.monotonic() - begun:.0f} s)", flush=True)
    if process.returncode:
        sys.exit(f"{command}: exit code {process.returncode}")
    return "".join(printed)


if __name__ == "__main__":
    follow(commands(), run_in_shell)
