"""
Every pair of transformers and TRL that the package is tested with, each in an environment of its own.

    nox                      the parity suite on every pair; on the oldest the failure stories too
    nox --tags oldest        the oldest pair of the core and the oldest of the trainers
    nox -s "stacks(trl-1.9.2)"
    nox -s stories           the failure stories alone

`TRL_PADFIX_TORCH` says which torch to install first, for instance `torch==2.13.0`; by default whatever the others ask
for. More arguments go to pytest: `nox -- -x`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox


ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from trl_padfix.versions import BOUNDS, NEWER, TESTED, Stack  # noqa: E402


nox.options.default_venv_backend = "venv"
nox.options.sessions = ["stacks"]

TESTS = ("pytest>=8", "hypothesis>=6", "requests")  # TRL's GRPO trainer imports `requests`, which TRL does not ask for
# PEFT of the time for the TRL of the time; later ones are made for later versions of transformers.
PEFT = {"0.17.0": "peft<0.18"}

TRAINERS = ("Reward", "KTO", "GRPO", "SFT")  # beside DPO, whose tests are among the stacks
STACKS = (
    "tests/test_versions.py",
    *(f"tests/core/test_{name}.py" for name in ("stacks", "reward_models")),
    "tests/trainers/test_stacks_dpo.py",
)
CELLS = ("-m", "not slow or matrix")  # all cells of the matrices that `pytest` thins out
OLDEST = {TESTED[0], next(stack for stack in TESTED if stack.trl in BOUNDS["trl"])}


def install(session: nox.Session, stack: Stack) -> None:
    torch = os.environ.get("TRL_PADFIX_TORCH")
    if torch:
        session.install(torch)
    versions = [f"{name}=={version}" for name, version in stack._asdict().items()]
    session.install("-e", f"{ROOT}[cli]", *versions, PEFT.get(stack.trl, "peft"), *TESTS)
    session.run("pip", "list")


@nox.session
@nox.parametrize("stack", [nox.param(s, id=f"trl-{s.trl}", tags=["oldest"] if s in OLDEST else []) for s in TESTED])
def stacks(session: nox.Session, stack: Stack) -> None:
    """The parity suite on one pair of versions."""
    install(session, stack)
    session.run("pytest", *CELLS, *STACKS, *session.posargs)
    trainers = [name for name in TRAINERS if stack.trl in NEWER.get(f"{name}Trainer", BOUNDS["trl"])]
    if trainers:
        tests = [ROOT / "tests" / "trainers" / name.lower() for name in trainers]  # folders, or files of that name
        files = [str(path if path.is_dir() else path.with_name(f"test_{path.name}.py")) for path in tests]
        session.run("pytest", *CELLS, "tests/trainers/test_every_method.py", *files, *session.posargs)
    if stack == TESTED[0]:
        session.run("pytest", "tests/end_to_end/stories", *session.posargs)


@nox.session
def stories(session: nox.Session) -> None:
    """The failure stories, where they happened: each shows the failure first, then the same code with the package."""
    install(session, TESTED[0])
    session.run("pytest", "tests/end_to_end/stories", *session.posargs)
