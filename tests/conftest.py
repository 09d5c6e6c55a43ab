"""What every test runs under: no chatter, one thread, and no test that this machine or this run is not for."""

import functools
import gc
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from kit.torchvision_stand_in import torchvision_loads


# A console of rich keeps the width that these name when it is built, whatever a test sets later. The workers of
# pytest-xdist are born with them: once readline is imported, it hands its 80 columns on to every subprocess.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched, and what the Hub knows changes no result

torchvision_loads()  # where it is installed, transformers imports it

import datasets  # noqa: E402
import transformers  # noqa: E402


torch.set_num_threads(1)  # the tensors are tiny, and threads would change the order of sums
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# Two look-ups that take much of a tiny training: accelerate reads at every step what is installed, and datasets
# names a table by a hash of all that made it, to find it on disk again, where those of the tests never are.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
for module in (datasets.fingerprint, datasets.arrow_dataset):
    module.update_fingerprint = lambda *_: datasets.fingerprint.generate_random_fingerprint()
hypothesis.settings.register_profile("trl_padfix", deadline=None)
hypothesis.settings.load_profile("trl_padfix")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("campaign", "random draws of what is to survive (`-m campaign`)")
    group.addoption("--campaign-size", type=float, default=1.0, help="part of the draws of a whole campaign")
    group.addoption("--campaign-seed", type=int, default=None, help="first seed; drawn and printed by default")
    group.addoption("--campaign-seconds", type=float, default=None, help="no draw of a part begins after these")
    group.addoption("--campaign-write", action="store_true", help="write the table of docs/reliability.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no GPU, and tests that take minutes unless `-m` names their marker."""
    reasons = {
        m: f"select it with `-m {m}`" for m in ("slow", "families", "campaign") if m not in config.option.markexpr
    }
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA GPU"
    for item in items:
        for marker in reasons.keys() & {mark.name for mark in item.iter_markers()}:  # keywords hold folder names too
            item.add_marker(pytest.mark.skip(reason=reasons[marker]))


def pytest_collection_finish() -> None:
    """Keep the garbage collector, which accelerate calls before every training, off what all imports have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A simulated GPU whose torch has variable-length attention; what it counted."""
    pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen attention")
    from kit.simulated_cuda import simulated_cuda

    import trl_padfix.core.attention.varlen as kernels

    is_complete = kernels.torch_varlen_is_complete
    is_complete.cache_clear()
    with simulated_cuda() as counts:
        yield counts
    is_complete.cache_clear()
