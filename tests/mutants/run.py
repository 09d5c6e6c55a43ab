"""
Which of the faults in `mutants.py` do the tests see?

    python tests/mutants/run.py                  each fault against the files named for it; minutes
    python tests/mutants/run.py segments.py KTO  those whose file or line contains one of these

Each fault is put into a copy of the package in a temporary folder. The first test that fails kills it. In the end
these tests run with the package as it is: all must pass, or they say nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutants.mutants import MUTANTS, Mutant  # noqa: E402


SECONDS = 900
"""After these a fault that makes a test wait counts as seen."""


class FirstFailure:
    """The test that failed, or the file that could not be collected; for pytest, as a plug-in."""

    node = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.node = self.node or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport  # type: ignore[assignment]


def first_failure(folder: Path, tests: list[str], log: Path) -> str:
    """The first of `tests` that fails with the package in `folder`, in a process of its own; empty if all pass."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:  # what all tests import was imported once, before the fork
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        signal.alarm(SECONDS)
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT / 'tests'}"  # of the processes that tests start
        seen = FirstFailure()
        paths = f"pythonpath={folder} tests recipes benchmarks notebooks"
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", paths, *tests], [seen])
        node = seen.node or (f"exit code {code}" if code else "")
        os.write(writing, node.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        node = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return node if status == 0 else f"ended by signal {os.WTERMSIG(status)}"


def copied(folder: Path, mutant: Mutant | None) -> Path:
    """A copy of the package in `folder`, with the fault if there is one."""
    shutil.copytree(ROOT / "trl_padfix", folder / "trl_padfix", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        file = folder / "trl_padfix" / mutant.file
        text = file.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} occurs {text.count(mutant.old)} times"
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of the file or of the line that says what the fault is")
    only = parser.parse_args().only
    os.chdir(ROOT)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer  # noqa: F401

    chosen = [m for m in MUTANTS if not only or any(x in m.file + m.fault for x in only)]
    nodes = []
    with tempfile.TemporaryDirectory() as work:
        for number, mutant in enumerate(chosen):
            folder, begin = copied(Path(work, str(number)), mutant), time.perf_counter()
            node = first_failure(folder, [f"tests/{name}" for name in mutant.tests], folder / "log")
            nodes.append(node)
            seconds, outcome = round(time.perf_counter() - begin), "killed  " if node else "SURVIVED"
            print(f"{outcome} {mutant.file}: {mutant.fault} ({node}, {seconds} s)", flush=True)
        by_hand = sorted({node for node in nodes if "::" in node})
        unsound = first_failure(copied(Path(work, "sound"), None), by_hand, Path(work, "log")) if by_hand else ""
    killed = f"{sum(map(bool, nodes))} of {len(nodes)} killed"
    print(f"{killed}; but {unsound} fails without a fault" if unsound else killed)
    return int(bool(unsound) or not all(nodes))


if __name__ == "__main__":
    sys.exit(main())
