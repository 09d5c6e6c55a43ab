"""Another attention implementation for a model that is loaded already."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .find import find_pretrained


__all__ = ["restore_attention", "set_attention"]


def set_attention(model: nn.Module, implementation: dict[str, str] | str) -> list[tuple[PretrainedConfig, str | None]]:
    """
    Switch a loaded model to another attention implementation.

    Returns:
        `list`: the configurations of the model, each with its implementation before: for [`restore_attention`].

    Raises:
        ValueError: If the model cannot be switched after loading.
    """
    if "auto" in (implementation.values() if isinstance(implementation, dict) else [implementation]):
        raise ValueError(
            "`attn_implementation='auto'` is for the trainers of trl_padfix. Name one, for instance 'sdpa'."
        )
    pretrained = find_pretrained(model)
    # The parts of a vision model have configurations of their own, and several modules may share one.
    configs = {id(m.config): m.config for m in pretrained.modules() if isinstance(m, PreTrainedModel)}.values()
    before = [(config, config._attn_implementation_internal) for config in configs]
    wanted = implementation
    if isinstance(wanted, str):
        wanted = dict.fromkeys(["", *pretrained.config.sub_configs], wanted)
    parts = {name: getattr(pretrained.config, name) if name else pretrained.config for name in wanted}
    if all(part is None or part._attn_implementation == wanted[name] for name, part in parts.items()):
        return before
    current = str(pretrained.config._attn_implementation)
    pretrained.set_attn_implementation(implementation)
    # transformers only warns if it cannot switch, so compare. With a kernel of the Hub ("org/name") equal names are no
    # sign of failure: the kernel may be registered for the requested name already.
    if "/" not in current and all(config._attn_implementation_internal == name for config, name in before):
        raise ValueError(
            f"{type(pretrained).__name__} cannot be switched to `attn_implementation={implementation!r}` once it is "
            f"loaded; it runs with {current!r}. Load it with that implementation: pass its id, or "
            "`from_pretrained(..., attn_implementation=...)`."
        )
    return before


def restore_attention(before: list[tuple[PretrainedConfig, str | None]]) -> None:
    """Undo [`set_attention`], which returned `before`."""
    for config, name in before:
        config._attn_implementation_internal = name
