"""
Diagnosis of a machine and of a model for `trl-padfix doctor`: packages, attention, mode of each mixer.

Only the configuration of the model is read, and the model is built without weights.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.utils import collect_env
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..core.anatomy import Anatomy
from ..core.attention.availability import ATTENTIONS, Machine, attention_obstacle, fastest_attention, model_class
from ..core.refusals import refusal
from ..versions import BOUNDS, INSTEAD, TESTED, installed_versions


__all__ = ["Diagnosis", "ModelReport", "diagnose"]

PACKAGES = (
    "trl-padfix", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "liger-kernel",
    "bitsandbytes", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "triton",
)  # fmt: skip


@dataclass(frozen=True)
class ModelReport:
    """Whether and how a model is packed."""

    name: str
    family: str  # `model_type`
    architecture: str  # class that it is loaded as
    refusal: str | None  # why padding cannot be removed from it; `None` if packed forwards are exact
    mixers: tuple[dict[str, str], ...] = ()  # of its decoder, in order: name, class, mode, why it is not packed
    images: bool = False  # whether the model takes images; their batches are packed


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `trl-padfix doctor`."""

    system: dict[str, Any]
    versions: dict[str, str | None]  # of Python and of packages; `None` where one is not installed
    tested: bool  # whether these versions of transformers and TRL are tested together
    machine: Machine
    dtype: str  # the precision of attention: bfloat16 on a GPU that has it, else float32
    attention: dict[str, str | None]  # implementations, and why one cannot run packed
    auto: str  # the one that `"auto"` chooses
    model: ModelReport | None
    problems: list[str]  # reasons why the requested model, attention or precision cannot run


def diagnose(model: str | None = None) -> Diagnosis:
    """
    Diagnose this machine, and a model if one is named.

    Args:
        model (`str`, *optional*):
            Path or Hub id; only its configuration is read.

    Returns:
        [`Diagnosis`], whose `problems` name everything that cannot be read or cannot run.
    """
    machine = Machine.of()
    has_bf16 = machine.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    versions = installed_versions(PACKAGES)
    tested = (versions["transformers"], versions["trl"]) in TESTED
    problems = [
        f"{package} {versions[package] or 'is not installed'}: the trainers of this package need {package} {bounds}"
        f"{'. ' + INSTEAD if package == 'trl' else ''}"
        for package, bounds in BOUNDS.items()
        # `remove_padding` and the callback need no TRL, and the environment of another stack may have none.
        if not (package == "trl" and versions["trl"] is None)
        and not tested
        and (versions[package] is None or not bounds.contains(versions[package], prereleases=True))
    ]
    config = None if model is None else AutoConfig.from_pretrained(model, trust_remote_code=False)
    run = machine, dtype, config
    auto, _ = fastest_attention(*run)
    attention = {name: attention_obstacle(name, *run) for name in ATTENTIONS}
    report = None if config is None else _report(model, config)
    if report is not None and report.refusal is not None:
        problems.append(f"Padding cannot be removed from {report.architecture}: {report.refusal}")
    precision = str(dtype).removeprefix("torch.")
    return Diagnosis(describe_system(), versions, tested, machine, precision, attention, auto, report, problems)


def _report(name: str, config: PretrainedConfig) -> ModelReport:
    cls = model_class(config) or AutoModelForCausalLM
    try:
        with torch.device("meta"):
            # Eager: every model has it, and the rules depend on the layers, not on their implementation.
            build = cls._from_config if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else cls.from_config
            model = build(config, attn_implementation="eager")
    except Exception as error:
        why = f"it cannot be built from its configuration alone ({type(error).__name__}: {error})"
        return ModelReport(name, config.model_type, cls.__name__, why)
    anatomy = Anatomy.of(model)
    why = refusal(anatomy)
    mixers = () if why else anatomy.mixers.mixers
    return ModelReport(
        name=name,
        family=config.model_type,
        architecture=type(model).__name__,
        refusal=why,
        mixers=tuple(dict(name=m.name, module=type(m.module).__name__, how=m.mode, why=m.why) for m in mixers),
        images=anatomy.multimodal is not None,
    )


def describe_system() -> dict[str, Any]:
    """Facts about the machine for a bug report, without paths and host names."""
    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    return {
        "os": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": [
            {"name": g.name, "memory_gib": round(g.total_memory / 2**30, 1), "capability": f"{g.major}.{g.minor}"}
            for g in gpus
        ],
    }
