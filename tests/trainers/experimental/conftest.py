"""What the tests of experimental trainers train, and TRL's own runs of it."""

from functools import cache

import pytest


# Imported in the fixtures: older versions of TRL have other experimental trainers.


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from kit.online_runs import save_policy

    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def trls(policy, tmp_path_factory):
    from kit.experimental_runs import train

    return cache(lambda name: train(name, "trl", tmp_path_factory.mktemp("trl"), policy))
