"""Trainers of DPO; `make.theirs` computes each run of TRL's once."""

import pytest


@pytest.fixture(scope="package")
def make(makers):
    return makers("DPO")
