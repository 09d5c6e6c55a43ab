"""Run transformers' own FlashAttention-2 code on any device and dtype, on top of `reference_flash_attn`.

Inside `flash_attention_stand_in()`, transformers finds a `flash_attn` package, takes it for installed and usable, and
runs models with `attn_implementation="flash_attention_2"` through its usual unpadding, packing and windowing code.
Works with the tested versions of transformers. Models that need more of the package than attention (rotary kernels,
say) fail on import.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import simulated_gpu.reference_flash_attn as reference
import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.utils import import_utils


_AVAILABILITY_CHECKS = (
    "is_flash_attn_2_available",
    "is_flash_attn_greater_or_equal",
    "is_flash_attn_greater_or_equal_2_10",
)
_LOADED_ON_FIRST_USE = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)


@contextmanager
def flash_attention_stand_in() -> Iterator[list[reference.VarlenCall]]:
    """Make FlashAttention 2 available to transformers, and yield the emptied record of its variable-length calls.

    Everything is as it was after the block, however the block ends. A model built inside keeps its
    `attn_implementation`, so it runs inside only.
    """
    # What is first imported within the block would keep the answers of the stand-in for good.
    for module in ("continuous_batching.continuous_api", "continuous_batching"):
        with suppress(ImportError):
            import_module(f"transformers.generation.{module}")
    with ExitStack() as stack:
        stack.enter_context(_installed(_fake_package()))
        for name in _AVAILABILITY_CHECKS:
            if hasattr(import_utils, name):
                stack.enter_context(_replaced_everywhere(getattr(import_utils, name), _always_true()))
        _adapt_to_version(stack)
        reference.calls.clear()
        yield reference.calls


def _adapt_to_version(stack: ExitStack) -> None:
    """The one place that knows how versions of transformers differ; it looks for names, not for version numbers."""
    module = vars(modeling_flash_attention_utils)

    # Since 4.54 the functions are imported on first use and kept in globals; in 4.52, when the module is imported.
    # Leaving `patch.dict` puts the whole module back, with whatever the block loaded gone.
    if "_lazy_imports" in module:
        globals_ = {name: None for name in _LOADED_ON_FIRST_USE if name in module}
    else:
        globals_ = {
            "flash_attn_func": reference.flash_attn_func,
            "flash_attn_varlen_func": reference.flash_attn_varlen_func,
            "index_first_axis": index_first_axis,
            "pad_input": pad_input,
            "unpad_input": unpad_input,
            "flash_241": True,
            "_flash_supports_window_size": True,
        }
    stack.enter_context(mock.patch.dict(module, globals_))

    # Later 5.x also keeps the availability check in a table.
    if "FLASH_ATTENTION_COMPATIBILITY_MATRIX" in module:
        entry = module["FLASH_ATTENTION_COMPATIBILITY_MATRIX"][2]
        stack.enter_context(mock.patch.dict(entry, general_availability_check=import_utils.is_flash_attn_2_available))

    # All versions refuse models on the CPU; the check has an argument that skips just that.
    for method, argument, value in (
        ("_check_and_enable_flash_attn_2", "check_device_map", False),  # up to 4.53
        ("_flash_attn_2_can_dispatch", "is_init_check", True),  # 4.54 to 5.x
        ("_flash_attn_can_dispatch", "is_init_check", True),  # from then on
    ):
        if method in vars(PreTrainedModel):
            forced = _with_forced_argument(vars(PreTrainedModel)[method], argument, value)
            stack.enter_context(mock.patch.object(PreTrainedModel, method, forced))


def index_first_axis(hidden_states: Tensor, indices: Tensor) -> Tensor:
    """The entries of the first axis at `indices`."""
    return hidden_states[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of `(B, L, ...)`: the kept tokens, their flat indices, `cu_seqlens`, the longest, the used."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    used = attention_mask.sum(dim=1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back at their flat `indices` of `(batch, seqlen, ...)`, with zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def _fake_package() -> dict[str, ModuleType]:
    """The modules `flash_attn` and `flash_attn.bert_padding`, by name."""
    padding = _module("flash_attn.bert_padding", index_first_axis, pad_input, unpad_input)
    package = _module(
        "flash_attn", reference.flash_attn_func, reference.flash_attn_varlen_func, reference.flash_attn_with_kvcache
    )
    package.__version__ = "2.8.3"
    package.__path__ = []
    package.bert_padding = padding
    return {module.__name__: module for module in (package, padding)}


def _module(name: str, *functions: Callable) -> ModuleType:
    """A module made of `functions`."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    vars(module).update({function.__name__: function for function in functions})
    return module


@contextmanager
def _installed(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Swap a real `flash_attn`, if there is one, for `modules`. Other modules imported in the block stay imported."""
    hidden = _pop_flash_attn()
    sys.modules.update(modules)
    try:
        yield
    finally:
        _pop_flash_attn()
        sys.modules.update(hidden)


def _pop_flash_attn() -> dict[str, ModuleType]:
    """Remove and return `flash_attn` and its submodules."""
    names = [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def _replaced_everywhere(old: Callable, new: Callable) -> Iterator[None]:
    """Rebind every module level name of `old` to `new`, and back, also in modules first imported in the block."""
    _rebind(old, new)
    try:
        yield
    finally:
        _rebind(new, old)


def _rebind(old: Callable, new: Callable) -> None:
    """Let every module level name that is bound to `old` be bound to `new`."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new


def _always_true() -> Callable[..., bool]:
    """A new function, unequal to all others, that accepts anything."""
    return lambda *args, **kwargs: True


def _with_forced_argument(method: Callable | classmethod, argument: str, value: Any) -> Callable | classmethod:
    """`method` with `argument` always `value`, whatever its callers pass."""
    function = method.__func__ if isinstance(method, classmethod) else method

    @functools.wraps(function)
    def forced(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.arguments[argument] = value
        return function(*bound.args, **bound.kwargs)

    return classmethod(forced) if isinstance(method, classmethod) else forced
