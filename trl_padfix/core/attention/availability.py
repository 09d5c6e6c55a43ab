"""
The fastest attention that can run here: the meaning of `attn_implementation="auto"`, and the table of `doctor`.

The checks read packages, device, precision and the model's class. They download nothing and run no kernel. An
implementation that a user names is not checked here: transformers refuses what it cannot load.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..model.older import supports
from .attention import implementation_obstacle


__all__ = ["ATTENTIONS", "Machine", "attention_obstacle", "fastest_attention", "model_class"]


class FlashPackage(NamedTuple):
    """A FlashAttention package: its module, the compute capability that it needs, how to install it."""

    module: str
    capability: tuple[int, int]
    install: str


FLASH_PACKAGES = {
    "flash_attention_2": FlashPackage(
        "flash_attn.flash_attn_interface", (8, 0), "pip install flash-attn --no-build-isolation"
    ),
    # Not on PyPI: it is built from a folder of the repository.
    "flash_attention_3": FlashPackage(
        "flash_attn_interface",
        (8, 0),
        "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper'",
    ),
    "flash_attention_4": FlashPackage("flash_attn.cute", (9, 0), "pip install --pre flash-attn-4"),
}
HUB_KERNEL = FlashPackage("kernels", (8, 0), "pip install kernels")
ATTENTIONS = (*FLASH_PACKAGES, "sdpa", "eager")


@dataclass(frozen=True)
class Machine:
    """Device type, and compute capability (of NVIDIA GPUs only)."""

    device: str = "cpu"
    capability: tuple[int, int] | None = None

    @classmethod
    def of(cls, device: str | torch.device | None = None) -> Machine:
        """The machine with this `device`, by default with the accelerator that torch finds, or the CPU."""
        if device is None:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator or "cpu"
        device = torch.device(device)
        # AMD GPUs are `cuda` devices, with other capability numbers.
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        return cls(device.type, torch.cuda.get_device_capability(device) if is_nvidia else None)


def attention_obstacle(
    name: str, machine: Machine, dtype: torch.dtype, config: PretrainedConfig | None = None
) -> str | None:
    """
    Why attention `name` cannot run packed in `dtype` on a machine, for models with a `config`; `None` if it can.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix.core.attention.availability import Machine, attention_obstacle

    >>> attention_obstacle("sdpa", Machine("cpu"), torch.float32)
    >>> attention_obstacle("flash_attention_2", Machine("cpu"), torch.bfloat16)
    'it needs a CUDA GPU'

    ```
    """
    if reason := implementation_obstacle(name):
        return reason
    package = HUB_KERNEL if "/" in name else FLASH_PACKAGES.get(name)
    if config is not None and (reason := _model_obstacle(name, package is not None, config)):
        return reason
    if package is None:
        return None
    if machine.device != "cuda":
        return "it needs a CUDA GPU"
    if machine.capability is not None and machine.capability < package.capability:
        needed, found = (".".join(map(str, c)) for c in (package.capability, machine.capability))
        return f"it needs a GPU of compute capability {needed} or later, and this one has {found}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if "/" not in name and name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return "this transformers does not have it"
    if failure := _import_failure(package.module):
        return f"`import {package.module}` fails ({failure}); to install it: `{package.install}`"
    return None


def fastest_attention(
    machine: Machine, dtype: torch.dtype, config: PretrainedConfig | None = None
) -> tuple[str, dict[str, str]]:
    """The fastest attention that can run (for `"auto"`), and the obstacles of faster ones. No Hub kernels."""
    names = ["flash_attention_2", "sdpa", "eager"]
    major = (machine.capability or (0, 0))[0]
    # FlashAttention 3 was written for Hopper (9) and 4 for Blackwell (10): each is fastest on its own GPUs.
    if major >= 9:
        names.insert(0, "flash_attention_3" if major == 9 else "flash_attention_4")
    obstacles: dict[str, str] = {}
    for name in names:
        if (reason := attention_obstacle(name, machine, dtype, config)) is None:
            return name, obstacles
        obstacles[name] = reason
    raise AssertionError("eager attention has no obstacles")


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a model with this config; `None` if transformers has none."""
    for name in config.architectures or []:
        if (cls := getattr(transformers, name, None)) is not None:
            return cls
    # Some configs are mapped to a tuple of classes.
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return classes[0] if isinstance(classes, tuple) else classes


def _model_obstacle(name: str, is_flash: bool, config: PretrainedConfig) -> str | None:
    """Why models with this config cannot run with attention `name` anywhere."""
    cls, text = model_class(config), config.get_text_config()
    kind = "flash_attn" if is_flash else name
    if cls is not None and kind in ("flash_attn", "sdpa") and not supports(cls, kind):
        return f"transformers has no {kind} path for {cls.__name__}"
    if name == "sdpa" and getattr(text, "attn_logit_softcapping", None) is not None:
        return "it has no softcap, and this model was trained with one"
    if not is_flash:
        return None
    # For models with attention sinks and the like, transformers 5 has a list of implementations that support them.
    compatible = getattr(cls, "_compatible_flash_implementations", None)
    if compatible and name not in compatible:
        return f"this model runs only with the FlashAttention of {', '.join(compatible)}"
    heads = getattr(text, "num_attention_heads", 0)
    size = getattr(text, "head_dim", None) or (heads and getattr(text, "hidden_size", 0) // heads)
    return f"its heads have at most 256 dimensions, and this model's have {size}" if size > 256 else None


@cache
def _import_failure(module: str) -> str | None:
    """Why a module cannot be imported (it is not installed, or was built for another torch), or `None` if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return str(error).splitlines()[0]
    return None
