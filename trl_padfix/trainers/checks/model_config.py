"""The configuration of a model that TRL will load by its id or path, before it loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig


if TYPE_CHECKING:
    from transformers import PretrainedConfig, TrainingArguments


__all__ = ["load_model_config", "model_init_kwargs"]

_FOR_CONFIG = ("cache_dir", "code_revision", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
"""Keys of `model_init_kwargs` that `AutoConfig.from_pretrained` needs to find a model's configuration."""


def load_model_config(model: str, config: TrainingArguments | None, prefix: str = "") -> PretrainedConfig:
    """The configuration of a model that TRL will load by its id or path."""
    kwargs = model_init_kwargs(config, prefix)
    config_kwargs = {name: kwargs[name] for name in _FOR_CONFIG if name in kwargs}
    config_kwargs.setdefault("trust_remote_code", getattr(config, "trust_remote_code", False))
    return kwargs.get("config") or AutoConfig.from_pretrained(model, **config_kwargs)


def model_init_kwargs(config: TrainingArguments, prefix: str) -> dict[str, Any]:
    """Keyword arguments with which TRL loads a model; the reference is loaded with the policy's."""
    return getattr(config, f"{'' if prefix == 'ref_' else prefix}model_init_kwargs", None) or {}
