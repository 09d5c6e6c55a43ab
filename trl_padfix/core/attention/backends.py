"""
Which attention implementations this machine can run a model with, and why not the others.

It looks at packages, device, precision and the model's class; it downloads nothing and runs no kernel.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from packaging.requirements import Requirement
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dependency_versions_table import deps
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...versions import installed_version
from ..model.older import supports
from .attention import refuse_implementation
from .varlen import torch_varlen_is_complete


__all__ = [
    "Backend",
    "Implementation",
    "Machine",
    "Workload",
    "assess",
    "best_backend",
    "list_backends",
    "model_class",
    "require_usable",
    "spread",
]

Implementation = str | dict[str, Any]
"""A name, or a name for each part of a vision model (`text_config`, `vision_config`, ...)."""

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashPackage:
    """A FlashAttention package: its distribution, the module with its functions, what it needs, how to get it."""

    requirement: Requirement
    module: str
    capability: tuple[int, int]
    install: str


FLASH_PACKAGES = {
    "flash_attention_2": FlashPackage(
        Requirement("flash-attn>=2.3.3"),
        "flash_attn.flash_attn_interface",
        (8, 0),
        "pip install flash-attn --no-build-isolation",
    ),
    # Not on PyPI: upstream builds it from a folder of the repository.
    "flash_attention_3": FlashPackage(
        Requirement("flash-attn-3"),
        "flash_attn_interface",
        (8, 0),
        "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper'",
    ),
    "flash_attention_4": FlashPackage(
        Requirement("flash-attn-4"), "flash_attn.cute", (9, 0), "pip install --pre flash-attn-4"
    ),
}
"""Versions and capabilities are those that transformers asks for."""

HUB_KERNELS = {
    "kernels-community/flash-attn2": (8, 0),
    "kernels-community/vllm-flash-attn3": (8, 0),
    "kernels-community/flash-attn4": (9, 0),
}
"""Hub kernels that transformers takes for FlashAttention 2, 3 and 4, with the capability that they need."""

_KERNELS = Requirement(deps["kernels"])


@dataclass(frozen=True)
class Machine:
    """A device as far as attention is concerned: its type, its name, and the compute capability of an NVIDIA GPU."""

    device: str = "cpu"
    name: str = "CPU"
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: str | torch.device | None = None) -> Machine:
        """This machine's accelerator, or its `device`."""
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator or "cpu"
        device = torch.device(device)
        if device.type != "cuda":
            return cls(device.type, device.type.upper())
        nvidia = torch.version.hip is None
        capability = torch.cuda.get_device_capability(device) if nvidia else None
        return cls("cuda", torch.cuda.get_device_name(device), capability)


@dataclass(frozen=True)
class Workload:
    """What is to be run, where, and in which precision attention computes."""

    machine: Machine = Machine()
    dtype: torch.dtype = torch.float32
    config: PretrainedConfig | None = None
    padding_free: bool = False

    @property
    def model_class(self) -> type[PreTrainedModel] | None:
        return None if self.config is None else model_class(self.config)


@dataclass(frozen=True)
class Backend:
    """
    An attention implementation and whether it can be used.

    Attributes:
        obstacles (`tuple[str, ...]`): What stands against it; nothing if it is usable.
        note (`str`): What it computes with.
        install (`str`, *optional*): Command that installs what is missing.
        asks_hub (`bool`): Whether loading it asks the Hub for a build.
    """

    name: str
    obstacles: tuple[str, ...] = ()
    note: str = ""
    install: str | None = None
    asks_hub: bool = False

    @property
    def usable(self) -> bool:
        return not self.obstacles

    @property
    def packs(self) -> bool:
        """Whether packed batches can run with it too."""
        return refuse_implementation(self.name) is None

    @property
    def reason(self) -> str:
        """Why not, or what it computes with."""
        return "; ".join(self.obstacles) or self.note


def list_backends(workload: Workload) -> list[Backend]:
    """
    Every attention implementation, usable or not, with its reason.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix.core.attention.backends import Machine, Workload, list_backends

    >>> found = {backend.name: backend for backend in list_backends(Workload(Machine("cpu"), torch.float32))}
    >>> found["sdpa"].usable, found["flash_attention_2"].usable
    (True, False)

    ```
    """
    return [assess(name, workload) for name in (*FLASH_PACKAGES, *HUB_KERNELS, "sdpa", "flex_attention", "eager")]


def assess(name: str, workload: Workload) -> Backend:
    """Whether the implementation `name` can be used for a workload."""
    if name in FLASH_PACKAGES:
        backend = _flash_package(name, workload)
    elif "/" in name:
        backend = _hub_kernel(name, workload)
    elif name == "sdpa":
        backend = _sdpa(workload)
    elif name == "flex_attention":
        backend = _flex(workload)
    elif name == "eager":
        backend = Backend(name, note="the model's own matrix products: memory grows with the square of the length")
    elif name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        backend = Backend(name, note="registered in this process")
    else:
        backend = Backend(name, ("transformers knows no attention implementation of this name",))
    if workload.padding_free and (refused := refuse_implementation(name)):
        backend = replace(backend, obstacles=(*backend.obstacles, f"padding cannot be removed with it: {refused}"))
    return backend


def best_backend(workload: Workload) -> Backend:
    """
    The fastest implementation that is there: what `"auto"` stands for.

    Hub kernels are left out, because loading one asks the Hub for its builds. The note says why it is none faster.
    """
    order = ["flash_attention_2", "sdpa", "eager"]
    major = (workload.machine.capability or (0, 0))[0]
    if major >= 9:  # each was written for one of the two, and runs on the other
        order[:0] = ["flash_attention_3", "flash_attention_4"] if major == 9 else ["flash_attention_4"]
    passed = []
    for name in order:
        backend = assess(name, workload)
        if backend.usable and not backend.asks_hub:
            why = f"not {', not '.join(passed)}" if passed else "the fastest here"
            return replace(backend, note=f"{backend.note}; {why}")
        passed.append(f"{name} ({backend.reason})")
    raise AssertionError("eager attention has no obstacles")


def require_usable(implementation: Implementation, workload: Workload, field: str) -> None:
    """
    Raises:
        ImportError: If a package is missing for `implementation`, the value of `field`.
        ValueError: If something else stands against it, or it names parts that the model does not have.
    """
    for part, name in spread(implementation, workload.config, field).items():
        backend = assess(name, workload)
        if backend.usable:
            continue
        usable = ", ".join(repr(b.name) for b in list_backends(workload) if b.usable)
        asked = f"`{field}={implementation!r}`" + (f" ({part})" if part else "")
        message = (
            f"{asked} cannot run on this {workload.machine.name} in {str(workload.dtype).removeprefix('torch.')}: "
            f"{backend.reason}. What can: {usable}, or 'auto' for the fastest of them."
        )
        if backend.install is None:
            raise ValueError(message)
        raise ImportError(f"{message} To install what is missing: `{backend.install}`.")


def spread(implementation: Implementation, config: PretrainedConfig | None, field: str) -> dict[str, str]:
    """
    The implementation of each part of a model that is named; `""` is the model itself.

    Raises:
        ValueError: If a part is named that the model does not have.
    """
    if isinstance(implementation, str):
        return {"": implementation}
    parts = {"", *(config.sub_configs if config is not None else implementation)}
    unknown = sorted(implementation.keys() - parts)
    if unknown:
        parts = ", ".join(map(repr, sorted(parts - {""}))) or "none, so name one implementation for all of it"
        raise ValueError(
            f"`{field}` names {unknown}, and the parts of a {type(config).__name__} are: {parts}. transformers would "
            "leave out what it does not know."
        )
    return implementation


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that a model with this config is loaded as; `None` if transformers has none."""
    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _flash_package(name: str, workload: Workload) -> Backend:
    package = FLASH_PACKAGES[name]
    obstacles = _flash_obstacles(name, workload, package.capability)
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        obstacles.append("this transformers does not have it")
    missing = _missing(package.requirement)
    if missing is None:
        broken = _broken(package.module) if workload.machine.device == "cuda" else None
        if broken is None:
            return Backend(name, tuple(obstacles), f"the {package.requirement.name} package")
        rebuild = f"{package.install} --force-reinstall --no-deps --no-cache-dir"
        return Backend(name, (*obstacles, broken), install=rebuild)
    if _missing(_KERNELS) is None and not constants.HF_HUB_OFFLINE:  # what transformers falls back to
        note = f"a Hub kernel, because {missing}"
        return Backend(name, tuple(obstacles), note, package.install, asks_hub=True)
    return Backend(name, (*obstacles, missing), install=package.install)


def _hub_kernel(name: str, workload: Workload) -> Backend:
    repository = name.partition(":")[0].partition("@")[0]
    capability = HUB_KERNELS.get(repository, (0, 0))
    obstacles = _flash_obstacles(name, workload, capability) if "flash" in repository else []
    if missing := _missing(_KERNELS):
        obstacles.append(missing)
    cached = _is_cached(repository)
    if not cached and constants.HF_HUB_OFFLINE:
        obstacles.append("it is not in the local cache, and the Hub is switched off (`HF_HUB_OFFLINE`)")
    note = "a Hub kernel" + ("" if cached else ", downloaded when it is first loaded")
    return Backend(name, tuple(obstacles), note, f"pip install '{_KERNELS}'" if missing else None, asks_hub=True)


def _sdpa(workload: Workload) -> Backend:
    obstacles = _unsupported(workload, "sdpa")
    if _text(workload, "attn_logit_softcapping") is not None:
        obstacles.append("it has no softcap, and this model was trained with one")
    needs = "a CUDA GPU and half precision"
    if workload.machine.device == "cuda" and workload.dtype in HALF:
        needs = None if torch_varlen_is_complete() else "a newer torch or GPU"
    varlen = "torch's own variable-length FlashAttention"
    how = f"row by row ({varlen} needs {needs})" if needs else f"on {varlen}"
    return Backend("sdpa", tuple(obstacles), f"torch's scaled-dot-product attention, packed batches {how}")


def _flex(workload: Workload) -> Backend:
    obstacles = _unsupported(workload, "flex_attn")
    if workload.machine.device == "cpu":
        obstacles.append("it has no backward pass on CPU")
    return Backend("flex_attention", tuple(obstacles), "torch's FlexAttention, compiled")


def _flash_obstacles(name: str, workload: Workload, capability: tuple[int, int]) -> list[str]:
    """What stands against FlashAttention, but for its package."""
    machine, obstacles = workload.machine, _unsupported(workload, "flash_attn")
    # A list that transformers keeps for models with sinks and the like, and falls back to (5.x).
    compatible = getattr(workload.model_class, "_compatible_flash_implementations", None)
    if compatible and name not in compatible:
        obstacles.append(f"of FlashAttention this model only runs with {', '.join(compatible)}")
    heads = _text(workload, "num_attention_heads")
    size = _text(workload, "head_dim") or (heads and _text(workload, "hidden_size", 0) // heads) or 0
    if size > 256:
        obstacles.append(f"its heads have at most 256 dimensions, and this model's have {size}")
    if machine.device != "cuda":
        obstacles.append(f"it needs a CUDA GPU, and this is {machine.name}")
    elif machine.capability is not None and machine.capability < capability:
        found = ".".join(map(str, machine.capability))
        needed = {8: "Ampere", 9: "Hopper"}[capability[0]]
        obstacles.append(f"it needs {needed} (compute capability {capability[0]}.0) or newer, and this is {found}")
    if workload.dtype not in HALF:
        obstacles.append(f"it computes in float16 or bfloat16, not {str(workload.dtype).removeprefix('torch.')}")
    return obstacles


def _unsupported(workload: Workload, kind: str) -> list[str]:
    cls = workload.model_class
    return [] if cls is None or supports(cls, kind) else [f"transformers has no {kind} path for {cls.__name__}"]


def _text(workload: Workload, name: str, default: Any = None) -> Any:
    return getattr(workload.config and workload.config.get_text_config(), name, default)


def _missing(requirement: Requirement) -> str | None:
    version = installed_version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"transformers takes {requirement}, and {version} is installed"


@cache
def _broken(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"it is installed and cannot be imported ({str(error).splitlines()[0]}): it was built for another torch"
    return None


def _is_cached(repository: str) -> bool:
    cache_directory = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    folders = ("--".join([kind, *repository.split("/")]) for kind in ("kernels", "models"))
    return any((cache_directory / folder / "snapshots").exists() for folder in folders)
