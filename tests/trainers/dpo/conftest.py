"""Trainers of DPO, and the runs that several tests look at: TRL's are computed once for each configuration."""

from functools import cache

import pytest
from kit.trainer_runs import SIDED_MODES


@pytest.fixture(scope="package")
def make(makers):
    return makers("DPO")


@pytest.fixture(scope="package")
def trl_run(make):
    return make.theirs


@pytest.fixture(scope="package")
def our_run(make):
    """The run of ours in one of the modes that several tests look at, computed once."""
    return cache(lambda mode: make.train("plain", **SIDED_MODES[mode]))
