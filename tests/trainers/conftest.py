"""Trainers of every method but DPO, and the runs of TRL's, computed once for each case."""

from functools import cache

import pytest


@pytest.fixture(scope="session")
def makers(tmp_path_factory):
    from kit.methods import METHODS, Maker  # needs a TRL with trainers that we extend

    return cache(lambda name: Maker(METHODS[name], tmp_path_factory))
