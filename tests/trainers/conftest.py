"""Trainers of every method but DPO, and the runs of TRL's, computed once for each case."""

from functools import cache

import pytest

from trl_padfix.core.layout import shared_prefixes


@pytest.fixture
def every_shared_prefix_pays(monkeypatch):
    """So that trainers compute prefixes of a few tokens once for all sub-batches."""
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_TOKENS", 1)


@pytest.fixture(scope="session")
def makers(tmp_path_factory):
    from kit.methods import METHODS, Maker  # needs a TRL with trainers that we extend

    return cache(lambda name: Maker(METHODS[name], tmp_path_factory))
