"""
Attention implementations that can run a model on this machine, and the obstacles of the others.

The checks read packages, device, precision and the model's class. They download nothing and run no kernel.
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
from .attention import implementation_obstacle, torch_varlen_is_complete


__all__ = [
    "Backend", "Implementation", "Machine", "Workload", "assess", "best_backend", "list_backends", "model_class",
    "require_usable", "spread",
]  # fmt: skip

Implementation = str | dict[str, Any]
"""A name, or a name for each sub-config of a vision model (`text_config`, `vision_config`, ...)."""

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashPackage:
    """
    A FlashAttention package.

    Attributes:
        requirement (`Requirement`): Name and version that transformers requires.
        module (`str`): Module with its functions, which is imported to find a broken installation.
        capability (`tuple[int, int]`): Minimum compute capability of an NVIDIA GPU.
        install (`str`): Command that installs it.
    """

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
    # Not on PyPI: it is built from a folder of the repository.
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
"""Versions and capabilities are those that transformers requires."""

HUB_KERNELS = {
    "kernels-community/flash-attn2": (8, 0),
    "kernels-community/vllm-flash-attn3": (8, 0),
    "kernels-community/flash-attn4": (9, 0),
}
"""Hub kernels that transformers uses for FlashAttention 2, 3 and 4, with the compute capability that they need."""

_KERNELS = Requirement(deps["kernels"])


@dataclass(frozen=True)
class Machine:
    """Device type, name, and compute capability (of NVIDIA GPUs only)."""

    device: str = "cpu"
    name: str = "CPU"
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: str | torch.device | None = None) -> Machine:
        """The machine with this `device`, by default with the accelerator that torch finds, or the CPU."""
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator or "cpu"
        device = torch.device(device)
        if device.type != "cuda":
            return cls(device.type, device.type.upper())
        is_nvidia = torch.version.hip is None  # AMD GPUs are `cuda` devices, with other capability numbers
        capability = torch.cuda.get_device_capability(device) if is_nvidia else None
        return cls("cuda", torch.cuda.get_device_name(device), capability)


@dataclass(frozen=True)
class Workload:
    """A model (by its config), its machine, the precision of its attention, and whether padding is removed."""

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
        name (`str`): Value of `attn_implementation`.
        obstacles (`tuple[str, ...]`): Why it cannot be used; empty if it can.
        note (`str`): The kernel or function that computes it.
        install (`str`, *optional*): Command that installs a missing package.
        asks_hub (`bool`): Whether loading it requests a build from the Hub.
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
        """Whether packed batches can run with it."""
        return implementation_obstacle(self.name) is None

    @property
    def reason(self) -> str:
        """The obstacles; the note if there are none."""
        return "; ".join(self.obstacles) or self.note


def list_backends(workload: Workload) -> list[Backend]:
    """
    Every attention implementation, usable or not, with its reason.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix.core.attention.availability import Machine, Workload, list_backends

    >>> backends = {backend.name: backend for backend in list_backends(Workload(Machine("cpu"), torch.float32))}
    >>> backends["sdpa"].usable, backends["flash_attention_2"].usable
    (True, False)

    ```
    """
    return [assess(name, workload) for name in (*FLASH_PACKAGES, *HUB_KERNELS, "sdpa", "flex_attention", "eager")]


def assess(name: str, workload: Workload) -> Backend:
    """The implementation `name`, with the obstacles to its use for a workload."""
    if name in FLASH_PACKAGES:
        backend = _flash_package(name, workload)
    elif "/" in name:
        backend = _hub_kernel(name, workload)
    elif name == "sdpa":
        backend = _sdpa(workload)
    elif name == "flex_attention":
        obstacles = _unsupported(workload, "flex_attn")
        if workload.machine.device == "cpu":
            obstacles.append("it has no backward pass on CPU")
        backend = Backend(name, tuple(obstacles), "torch's FlexAttention, compiled")
    elif name == "eager":
        backend = Backend(name, note="the model's own matrix products: memory grows with the square of the length")
    elif name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        backend = Backend(name, note="registered in this process")
    else:
        backend = Backend(name, ("transformers knows no attention implementation of this name",))
    if workload.padding_free and (reason := implementation_obstacle(name)):
        backend = replace(backend, obstacles=(*backend.obstacles, f"padding cannot be removed with it: {reason}"))
    return backend


def best_backend(workload: Workload) -> Backend:
    """
    The fastest usable implementation: the meaning of `"auto"`.

    Hub kernels are left out, because loading one requests its builds from the Hub. The note of the result gives the
    obstacles of faster implementations.
    """
    order = ["flash_attention_2", "sdpa", "eager"]
    major = (workload.machine.capability or (0, 0))[0]
    # FlashAttention 3 was written for Hopper (9) and 4 for Blackwell (10): each is fastest on its own GPUs.
    if major >= 9:
        order[:0] = ["flash_attention_3", "flash_attention_4"] if major == 9 else ["flash_attention_4"]
    skipped = []
    for name in order:
        backend = assess(name, workload)
        if backend.usable and not backend.asks_hub:
            why = f"not {', not '.join(skipped)}" if skipped else "the fastest here"
            return replace(backend, note=f"{backend.note}; {why}")
        skipped.append(f"{name} ({backend.reason})")
    raise AssertionError("eager attention has no obstacles")


def require_usable(implementation: Implementation, workload: Workload, field: str) -> None:
    """
    Check that `implementation`, the value of the configuration field `field`, can run a workload.

    Raises:
        ImportError: If a package is missing.
        ValueError: If there is another obstacle, or it names sub-configs that the model does not have.
    """
    for part, name in spread(implementation, workload.config, field).items():
        backend = assess(name, workload)
        if backend.usable:
            continue
        usable = ", ".join(repr(b.name) for b in list_backends(workload) if b.usable)
        requested = f"`{field}={implementation!r}`" + (f" ({part})" if part else "")
        message = (
            f"{requested} cannot run on this {workload.machine.name} in {str(workload.dtype).removeprefix('torch.')}: "
            f"{backend.reason}. Usable: {usable}, or 'auto' for the fastest of them."
        )
        if backend.install is None:
            raise ValueError(message)
        raise ImportError(f"{message} To install what is missing: `{backend.install}`.")


def spread(implementation: Implementation, config: PretrainedConfig | None, field: str) -> dict[str, str]:
    """
    The implementation of each sub-config that is named; `""` is the model itself.

    Example: `"sdpa"` gives `{"": "sdpa"}`; a `dict` is returned as it is.

    Raises:
        ValueError: If a sub-config is named that the model does not have.
    """
    if isinstance(implementation, str):
        return {"": implementation}
    parts = {"", *(config.sub_configs if config is not None else implementation)}
    unknown = sorted(implementation.keys() - parts)
    if unknown:
        parts = ", ".join(map(repr, sorted(parts - {""}))) or "none, so name one implementation for all of it"
        raise ValueError(
            f"`{field}` names {unknown}, and the parts of a {type(config).__name__} are: {parts}. transformers would "
            "ignore parts that it does not know."
        )
    return implementation


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a model with this config; `None` if transformers has none."""
    for name in config.architectures or []:
        if (cls := getattr(transformers, name, None)) is not None:
            return cls
    # Some configs are mapped to a tuple of classes.
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return classes[0] if isinstance(classes, tuple) else classes


def _flash_package(name: str, workload: Workload) -> Backend:
    package = FLASH_PACKAGES[name]
    obstacles = _flash_obstacles(name, workload, package.capability)
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        obstacles.append("this transformers does not have it")
    missing = _package_obstacle(package.requirement)
    if missing is None:
        # Imported on GPUs only: without one even a package that was built correctly may fail to load its libraries.
        broken = _import_obstacle(package.module) if workload.machine.device == "cuda" else None
        if broken is None:
            return Backend(name, tuple(obstacles), f"the {package.requirement.name} package")
        rebuild = f"{package.install} --force-reinstall --no-deps --no-cache-dir"
        return Backend(name, (*obstacles, broken), install=rebuild)
    if _package_obstacle(_KERNELS) is None and not constants.HF_HUB_OFFLINE:  # transformers then loads a Hub kernel
        note = f"a Hub kernel, because {missing}"
        return Backend(name, tuple(obstacles), note, package.install, asks_hub=True)
    # On devices other than CUDA GPUs no package helps.
    install = package.install if workload.machine.device == "cuda" else None
    return Backend(name, (*obstacles, missing), install=install)


def _hub_kernel(name: str, workload: Workload) -> Backend:
    repository = name.partition(":")[0].partition("@")[0]
    capability = HUB_KERNELS.get(repository, (0, 0))
    obstacles = _flash_obstacles(name, workload, capability) if "flash" in repository else []
    if missing := _package_obstacle(_KERNELS):
        obstacles.append(missing)
    # Hub repositories of kernels are cached as type `kernels` or `models`, depending on the version of `kernels`.
    cache_directory = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    folders = ("--".join([kind, *repository.split("/")]) for kind in ("kernels", "models"))
    cached = any((cache_directory / folder / "snapshots").exists() for folder in folders)
    if not cached and constants.HF_HUB_OFFLINE:
        obstacles.append("it is not in the local cache, and the Hub is switched off (`HF_HUB_OFFLINE`)")
    note = "a Hub kernel" + ("" if cached else ", downloaded when it is first loaded")
    return Backend(name, tuple(obstacles), note, f"pip install '{_KERNELS}'" if missing else None, asks_hub=True)


def _sdpa(workload: Workload) -> Backend:
    obstacles = _unsupported(workload, "sdpa")
    if _text_config_value(workload, "attn_logit_softcapping") is not None:
        obstacles.append("it has no softcap, and this model was trained with one")
    needs = "a CUDA GPU and half precision"
    if workload.machine.device == "cuda" and workload.dtype in HALF:
        needs = None if torch_varlen_is_complete() else "a newer torch or GPU"
    varlen = "torch's own variable-length FlashAttention"
    packed = f"row by row ({varlen} needs {needs})" if needs else f"on {varlen}"
    return Backend("sdpa", tuple(obstacles), f"torch's scaled-dot-product attention, packed batches {packed}")


def _flash_obstacles(name: str, workload: Workload, capability: tuple[int, int]) -> list[str]:
    """The obstacles of FlashAttention other than a missing package."""
    machine, obstacles = workload.machine, _unsupported(workload, "flash_attn")
    # For models with attention sinks and the like, transformers 5 has a list of implementations that support them.
    compatible = getattr(workload.model_class, "_compatible_flash_implementations", None)
    if compatible and name not in compatible:
        obstacles.append(f"this model runs only with the FlashAttention of {', '.join(compatible)}")
    heads = _text_config_value(workload, "num_attention_heads")
    width = _text_config_value(workload, "hidden_size", 0)
    size = _text_config_value(workload, "head_dim") or (heads and width // heads) or 0
    if size > 256:
        obstacles.append(f"its heads have at most 256 dimensions, and this model's have {size}")
    if machine.device != "cuda":
        obstacles.append(f"it needs a CUDA GPU, and this is {machine.name}")
    elif machine.capability is not None and machine.capability < capability:
        capability_here = ".".join(map(str, machine.capability))
        needed = {8: "Ampere", 9: "Hopper"}[capability[0]]
        obstacles.append(
            f"it needs {needed} (compute capability {capability[0]}.0) or newer, and this is {capability_here}"
        )
    if workload.dtype not in HALF:
        obstacles.append(f"it computes in float16 or bfloat16, not {str(workload.dtype).removeprefix('torch.')}")
    return obstacles


def _unsupported(workload: Workload, kind: str) -> list[str]:
    """An obstacle, in a list, if transformers has no attention of this kind for the model's class."""
    cls = workload.model_class
    return [] if cls is None or supports(cls, kind) else [f"transformers has no {kind} path for {cls.__name__}"]


def _text_config_value(workload: Workload, name: str, default: Any = None) -> Any:
    """An attribute of the text config of a workload, which may have no config."""
    return getattr(workload.config and workload.config.get_text_config(), name, default)


def _package_obstacle(requirement: Requirement) -> str | None:
    """Why the installed packages do not meet a requirement, or `None` if they do."""
    version = installed_version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"transformers needs {requirement}, and {version} is installed"


@cache
def _import_obstacle(module: str) -> str | None:
    """Why a module cannot be imported, or `None` if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"it is installed and cannot be imported ({str(error).splitlines()[0]}): it was built for another torch"
    return None
