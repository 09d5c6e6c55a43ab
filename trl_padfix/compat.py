"""
The stacks that are supported, and everything in which older ones differ.

The rest of the package is written for the newest transformers and TRL. What an older version needs beyond that is
here, each with what upstream does there and the version from which on it is not needed. Nothing is imported to find
out: `import trl_padfix` stays free, and a stack outside the bounds is told so before it fails somewhere deep inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.specifiers import SpecifierSet


if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .layout import Layout

__all__ = ["BOUNDS", "TESTED", "Stack", "require"]


class Stack(NamedTuple):
    """Versions that run the parity suite together; with a TRL before 1.0 that is `remove_padding` alone."""

    transformers: str
    trl: str


TESTED = (
    Stack("4.52.4", "0.17.0"),
    Stack("4.57.6", "1.0.0"),
    Stack("5.0.0", "1.9.2"),
    Stack("5.23.0", "1.16.0"),
)
"""Every pair that `nox` builds and tests, oldest first."""

BOUNDS = {"transformers": SpecifierSet(">=4.52.4,<6"), "trl": SpecifierSet(">=1.0,<2")}
"""`remove_padding` needs the first; the trainers, configurations and collators need both."""

_FOR = {"transformers": "trl_padfix", "trl": "The trainers of trl_padfix"}


def require(package: str) -> None:
    """
    Raises:
        ImportError: If `package` is not installed or its version is outside [`BOUNDS`], with the pip line.
    """
    bounds = ",".join(sorted(str(bound) for bound in BOUNDS[package]))
    pairs = " and ".join(f"{name} {v}" for name, v in zip(Stack._fields, TESTED[-1], strict=True))
    remedy = f"Tested together, newest: {pairs}. Run: pip install '{package}{bounds}'"
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{_FOR[package]} needs {package} {bounds}, and none is installed. {remedy}") from None
    if not BOUNDS[package].contains(installed, prereleases=True):
        hint = ""
        if package == "trl":
            hint = " `trl_padfix.remove_padding(model)` works with any TRL, on the model before its trainer is built."
        raise ImportError(f"{_FOR[package]} needs {package} {bounds}, and {installed} is installed.{hint} {remedy}")


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The text decoder of a model: the module between the embeddings and the head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    # Up to 4.52 many models have no `get_decoder`; from 4.56 to 4.57 it is there for all, and returns the model itself
    # where the decoder is called neither `model` nor `decoder` (GPT-2's `transformer`). Both go with transformers 5.
    return model.base_model if decoder is model else decoder


@contextmanager
def packed_forward(decoder: nn.Module, extra: dict[str, Any]) -> Iterator[None]:
    """
    What older decoders need to run packed, until the block ends; nothing for current ones.

    Args:
        decoder (`torch.nn.Module`):
            The decoder that is about to be called.
        extra (`dict`):
            Keyword arguments that its layers must receive.
    """
    replaced: dict[str, Any] = {}
    # Before `masking_utils` (4.52; here and there until 4.56) decoders make their mask in a method, which builds a
    # dense `(T, T)` one for every implementation it does not know. Packed attention wants none.
    if hasattr(decoder, "_update_causal_mask"):
        replaced["_update_causal_mask"] = lambda *args, **kwargs: None
        # Before `GradientCheckpointingLayer` was everywhere (4.53), decoders called the checkpoint function
        # themselves, some without their keyword arguments (GPT-2).
        checkpoint = getattr(decoder, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            replaced["_gradient_checkpointing_func"] = _passing_on(checkpoint, extra)
    saved = {name: vars(decoder)[name] for name in replaced if name in vars(decoder)}
    vars(decoder).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(decoder)[name]
        vars(decoder).update(saved)


def flash_arguments(layout: Layout) -> dict[str, Any]:
    """More arguments of the variable-length call of transformers' FlashAttention function."""
    # 4.52 looks at `cu_seq_lens_q` only where it is given positions as well, and else attends over the whole row.
    # Gone in 4.53: https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/modeling_flash_attention_utils.py#L374
    return {"position_ids": layout.positions.unsqueeze(0)} if _transformers_in("<4.53") else {}


def refusal(decoder: nn.Module, implementation: str) -> str | None:
    """Why this version of transformers does not compute `decoder` as it says it does, or `None`."""
    config: Any = decoder.config
    # Up to 4.52 the window of Qwen2 and Qwen3 is in one mask for all layers with `sdpa` and `eager`, whatever
    # `max_window_layers` says; FlashAttention and 4.53 heed it.
    if (
        hasattr(decoder, "_update_causal_mask")
        and implementation in ("sdpa", "eager")
        and getattr(config, "use_sliding_window", False)
        and getattr(config, "max_window_layers", 0) > 0
    ):
        return (
            f"`max_window_layers={config.max_window_layers}` is heeded by transformers "
            f"{metadata.version('transformers')} with FlashAttention only, and with {implementation!r} every layer "
            "gets the window. Use `attn_implementation='flash_attention_2'`, or transformers 4.53 and later"
        )
    return None


def _passing_on(checkpoint: Callable, extra: dict[str, Any]) -> Callable:
    def checkpointed(layer: Callable, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(layer, **extra), *args, **kwargs)

    return checkpointed


@functools.cache
def _transformers_in(bounds: str) -> bool:
    return SpecifierSet(bounds).contains(metadata.version("transformers"), prereleases=True)
