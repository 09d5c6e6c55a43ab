"""Settings of every test: no chatter, one thread, and no test that this machine or this run cannot do."""

import functools
import gc
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from simulated_gpu.torchvision_stand_in import torchvision_loads


# A console of rich keeps the width that these name when it is built, whatever a test sets later. The workers of
# pytest-xdist are born with them: once readline is imported, it hands its 80 columns on to every subprocess.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched, and what the Hub knows changes no result

gc.disable()  # until all tests are collected: imports leave no garbage
torchvision_loads()  # where it is installed, transformers imports it

import accelerate  # noqa: E402
import datasets  # noqa: E402
import transformers  # noqa: E402


# One thread, because the tensors are tiny; `nox -s machines` sets both to see that no test depends on them.
torch.set_num_threads(int(os.environ.get("TRL_PADFIX_THREADS", "1")))
if precision := os.environ.get("TRL_PADFIX_MATMUL"):  # once it is set, torch reads its other settings differently
    torch.set_float32_matmul_precision(precision)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()


def replace_slow_parts() -> None:
    """
    Replace parts of other packages that take long in a tiny training and change no result.

    Python reads versions of packages from disk at every import. At every step accelerate looks up which packages are
    installed; before the first it collects garbage. datasets names a table by a hash of its history, to find the table
    on disk again. torch records the stack at every seed for a device that does not exist.
    """
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)
    accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)
    for module in (datasets.fingerprint, datasets.arrow_dataset):
        module.update_fingerprint = module.generate_fingerprint = lambda *_: (
            datasets.fingerprint.generate_random_fingerprint()
        )
    datasets.fingerprint.format_kwargs_for_fingerprint = lambda *_, **__: {}
    if not torch.cuda.is_available():
        for module in (torch.cuda, torch.mtia, torch.xpu):
            module.traceback = SimpleNamespace(format_stack=list)


if not os.environ.get("TRL_PADFIX_UNMODIFIED"):  # set once a night: the packages as users have them
    replace_slow_parts()
hypothesis.settings.register_profile("trl_padfix", deadline=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=10_000)  # `--hypothesis-profile long`
hypothesis.settings.load_profile("trl_padfix")


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are interpreted where there is no GPU, and taken by models in the tests marked `kernels` only."""
    asked = _asks_for_kernels(config)
    if asked or not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
    if asked and importlib.util.find_spec("triton"):
        importlib.import_module("simulated_gpu.interpreted").without_extensions()
    elif not torch.cuda.is_available():
        found = [name for name in ("fla", "flash_attn", "mamba_ssm") if importlib.util.find_spec(name)]
        sys.modules.update(dict.fromkeys(found))  # not to be found, nor is their version
        importlib.metadata.version = functools.partial(_version_but_of, found, importlib.metadata.version)


def _version_but_of(left_out: list[str], own: Callable[[str], str], name: str) -> str:
    if name.replace("-", "_") in left_out:
        raise importlib.metadata.PackageNotFoundError(name)
    return own(name)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What is written for a package is looked at where there is one."""
    needed = {"interpreted.py": "triton", "verl_on_cpu.py": "verl"}.get(collection_path.name)
    return True if needed and not importlib.util.find_spec(needed) else None


def _asks_for_kernels(config: pytest.Config) -> bool:
    by_folder = any("kernels" in Path(arg.partition("::")[0]).parts for arg in config.args)
    return by_folder or re.search(r"(?<!not )\bkernels\b", config.option.markexpr) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that take minutes, and `gpu` tests without a GPU, unless `-m` or a node id names them."""
    by_hand = tuple(arg.rpartition("/")[2] for arg in config.args if "::" in arg)
    asked, without_kernels = set(re.findall(r"\w+", config.option.markexpr)), not _asks_for_kernels(config)
    left_out, kept = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        is_named = marks & asked or item.nodeid.rpartition("/")[2].startswith(by_hand)
        if "gpu" in marks and not torch.cuda.is_available():
            marks.add("slow")
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if ("kernels" in marks and without_kernels) or (marks & {"slow", "families"} and not is_named):
            left_out.append(item)
        else:
            kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what all imports have left, and let it wait for a few trainings to be done."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A simulated GPU whose torch has variable-length attention; what it counted."""
    pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen attention")
    from simulated_gpu.simulated_cuda import simulated_cuda

    import trl_padfix.core.attention.attention as kernels

    is_complete = kernels.torch_varlen_is_complete
    is_complete.cache_clear()
    with simulated_cuda() as counts:
        yield counts
    is_complete.cache_clear()
