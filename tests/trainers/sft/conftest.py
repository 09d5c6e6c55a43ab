"""Trainers of SFT, and the runs of TRL, computed once for each configuration."""

import pytest


@pytest.fixture(scope="package")
def make(makers):
    return makers("SFT")


@pytest.fixture(scope="package")
def trl_run(make):
    return make.theirs
