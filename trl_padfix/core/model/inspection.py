"""
Facts in the code of a model: signatures, bytecode, globals and closures of its functions.

A model is recognized by its code and not by its name, so that code on the Hub is recognized too. Everything that is
read from code is read here; the decisions are made where these functions are called.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..errors import PaddingRemovalError


__all__ = [
    "TRUSTED_GRADIENT_HOOKS", "TRUSTED_HOOKS", "TRUSTED_MIXERS", "TRUSTED_MODELS", "TRUSTED_MODULES",
    "TRUSTED_WRAPPERS", "bind", "counts_columns", "forward_of", "forwards_in", "global_in", "globals_of",
    "hands_arguments_on", "is_of", "kernel_parameters", "loaded_globals", "module_of", "name_of", "names_in",
    "package_of", "parameters_of", "pools_by_token_id", "runs_another", "takes", "takes_any_argument", "variables_in",
    "with_globals", "without_checkpointing",
]  # fmt: skip


# Packages that are trusted: each set says with what

_HUB = "transformers_modules"  # the package of code on the Hub
_TRAINING = {"accelerate", "torch", "transformers", "trl", "trl_padfix"}

TRUSTED_MIXERS = {*_TRAINING, "bitsandbytes", "liger_kernel", "peft"}
"""Their modules mix tokens only in ways that `mixers/` knows. Not DeepSpeed: its experts drop tokens if many come."""

TRUSTED_MODULES = {*TRUSTED_MIXERS, "deepspeed", "torchao", "wandb"}
"""Modules and forwards that they add to an attached decoder treat each token by itself, or wrap others."""

TRUSTED_HOOKS = {*_TRAINING, "deepspeed", "wandb"}
"""Their forward hooks gather parameters or record outputs. Not PEFT: hooks of aLoRA depend on the place of a token."""

TRUSTED_GRADIENT_HOOKS = {*_TRAINING, "bitsandbytes", "deepspeed", "peft"}
"""Their hooks reduce, gather or unscale gradients, which is linear. Not wandb: it records the gradient of a part."""

TRUSTED_MODELS = {*_TRAINING, "deepspeed", "liger_kernel", "peft", "sentence_transformers", "unsloth", _HUB}
"""The forwards of their models take ids and mask alone."""

TRUSTED_WRAPPERS = {"accelerate", "torch", "trl_padfix"}
"""
Their wrappers of a forward change its precision only. Not TRL: it computes the loss from states that were packed.

A wrapper copies `__module__` from the function beneath it, which is of this package.
"""


# Signatures


def bind(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, including those that `forward` takes as `**kwargs`."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(forward)
    # `functools.wraps` shows the parameters of the wrapped function: TRL's head takes more than a model that it wraps.
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    return signature.bind_partial(*args, **known).arguments | kwargs


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name, as its signature gives them; for a module, of its class's forward."""
    if isinstance(function, nn.Module):  # the package `kernels` puts a module in the place of a function
        return dict([*inspect.signature(type(function).forward).parameters.items()][1:])  # without `self`
    return inspect.signature(function).parameters


def takes(module: Any, *names: str) -> bool:
    """Whether the forward of a module, as it is set now, has arguments of all these names."""
    return parameters_of(module.forward).keys() >= {*names}


def takes_any_argument(module: nn.Module) -> bool:
    """Whether the forward of a module takes `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters_of(forward_of(module)).values())


def hands_arguments_on(module: nn.Module) -> bool:
    """Whether the forward of a module takes `**kwargs`, and calls a function with `*args` or `**kwargs`."""
    # Python compiles each call with `*` or `**` to this instruction.
    return takes_any_argument(module) and "CALL_FUNCTION_EX" in dict(_instructions(forward_of(module)))


# Names


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward in the class of a module, without its decorators."""
    return inspect.unwrap(type(module).forward)


def forwards_in(module: nn.Module) -> list[Callable[..., Any]]:
    """The forwards of a module and of modules within it, outer ones first, without scripted modules."""
    return [forward for forward in map(forward_of, module.modules()) if inspect.isfunction(forward)]


def names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of globals and attributes that a function uses, without its decorators."""
    return code_of(function).co_names


def variables_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments and local variables of a function, without its decorators."""
    return code_of(function).co_varnames


def code_of(function: Any) -> Any:
    """The code of a function, without its decorators; `None` for another object."""
    return getattr(inspect.unwrap(function), "__code__", None)


def global_in(module: nn.Module, name: str) -> Any:
    """The global of this name that the forward of a module uses; `None` if it uses none."""
    return globals_of(module).get(name) if name in names_in(type(module).forward) else None


def globals_of(module: nn.Module) -> dict[str, Any]:
    """The globals of the file that defines the forward of a module."""
    return forward_of(module).__globals__


def loaded_globals(module: nn.Module) -> set[str]:
    """Names of the globals that the forward of a module loads, without the globals of its attributes' functions."""
    forward = forward_of(module)
    if not inspect.isfunction(forward):  # a scripted module
        return set()
    return {argument for name, argument in _instructions(forward) if name == "LOAD_GLOBAL"}


@cache
def _instructions(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The instructions of a function, each with its argument."""
    return [(i.opname, i.argval) for i in dis.get_instructions(function)]


def name_of(function: Any) -> str:
    """The qualified name of a function; of another callable object the name of its class."""
    function = _without_partial(function)
    return getattr(function, "__qualname__", type(function).__name__)


def package_of(thing: Any) -> str:
    """The package that defines a class, a function or another callable object."""
    return (getattr(_without_partial(thing), "__module__", None) or "").partition(".")[0]


def is_of(function: Callable[..., Any], packages: set[str]) -> bool:
    """Whether a function is of one of `packages`, by `__module__` and by its globals, which no decorator copies."""
    return {package_of(function), module_of(_without_partial(function)).partition(".")[0]} <= packages


def module_of(function: object) -> str:
    """The module that a function was written in. `functools.wraps` copies `__module__`, and not the globals."""
    return str(getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or "")


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without `functools.partial` around it: PEFT registers hooks as partials."""
    while isinstance(function, partial):
        function = function.func
    return function


def runs_another(function: Any, module: nn.Module, outer: tuple = ()) -> bool:
    """
    Whether a forward of `module` calls a method of another such module, as in a deep copy of a model that TRL gave a
    head: functions are not copied, and TRL's keeps the forward beneath it in its closure.
    """
    if isinstance(function, MethodType):
        is_other = isinstance(function.__self__, type(module)) and function.__self__ is not module
        return is_other or runs_another(function.__func__, module, outer)
    if not callable(function) or function in outer or not is_of(function, _TRAINING):  # a user's stays as it is
        return False
    closure = function.__closure__ if isinstance(function, FunctionType) else None
    inner = [inspect.getattr_static(function, "__wrapped__", None), *map(_content, closure or ())]
    return any(runs_another(called, module, (*outer, function)) for called in inner)


def counts_columns(module: nn.Module) -> bool:
    """Whether the forward of an attention module numbers the columns of its input instead of taking positions."""
    if "arange" in names_in(type(module).forward):
        return True
    # It may also compute with `cache_position`: read an attribute of it, or call a global function with it. Passing it
    # on to the cache, which all modules do, does not count. Read from the instructions:
    loads = " ".join(f"{name} {argument}" for name, argument in _instructions(forward_of(module)))
    # Python 3.13 loads two local variables in one instruction, with a tuple as argument.
    attribute = r"LOAD_FAST\w* (\('\w+', '|)cache_position'?\)? LOAD_(ATTR|METHOD)"
    function_call = r"LOAD_GLOBAL \S+ LOAD_FAST\w* (\('|)cache_position"
    return bool(re.search(f"{attribute}|{function_call}", loads))


def pools_by_token_id(model: nn.Module) -> bool:
    """
    Whether the forward of `model` searches the ids for the pad token and scores one token of each row.

    Read class by class, for as long as a forward calls the one of its superclass.
    """
    for cls in type(model).__mro__:
        if "forward" in vars(cls):
            code = code_of(vars(cls)["forward"])
            if "pad_token_id" in code.co_names and "pooled_logits" in code.co_varnames:
                return True
            if "__class__" not in code.co_freevars:
                return False  # without `__class__` it cannot call `super().forward`
    return False


# Kernels, and copies of functions


def kernel_parameters(function: Callable | nn.Module) -> frozenset[str]:
    """
    Parameters of the kernel that a function of transformers calls; empty if transformers computes it in torch.

    Where the package `kernels` is installed, such a function is a module whose forward calls the kernel. `kernelize`
    can put a kernel of the Hub into that module at any time, so nothing is cached for modules, only for functions.

    Raises:
        PaddingRemovalError: If the parameters cannot be read: then it is unknown whether the kernel keeps rows apart.
    """
    if not isinstance(function, nn.Module):
        return _kernel_parameters(function)
    forward = inspect.unwrap(getattr(function.forward, "__func__", function.forward))
    # transformers' forward of such a module is a closure over the function that it calls, `func`.
    inner = inspect.getclosurevars(forward).nonlocals.get("func") if inspect.isfunction(forward) else None
    return _kernel_parameters(inner or function.forward)


@cache
def _kernel_parameters(function: Callable) -> frozenset[str]:
    inner = function
    while inspect.isfunction(inner):
        # transformers' decorator of such functions holds the parameters of the kernel that it chose in its closure.
        closure = inspect.getclosurevars(inner).nonlocals
        if "is_new_implementation" in closure:
            return frozenset(closure["applicable_params"] if closure["is_new_implementation"] else ())
        if (wrapped := getattr(inner, "__wrapped__", None)) is None:
            break
        inner = wrapped
    if inspect.isfunction(inner) and inner.__module__.startswith("transformers"):
        return frozenset()
    # The code, not the signature: a wrapper may claim the signature of the function that it wraps.
    code = code_of(function)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if set(names) <= {"self"}:
        raise PaddingRemovalError(
            f"The arguments of {function!r} cannot be read, so it is unknown whether it keeps packed rows apart. Set "
            "`use_kernels=False` (or the environment's USE_HUB_KERNELS=NO), or train with `padding_free=False`."
        )
    return frozenset(names)


def with_globals(function: Callable, replaced: dict[str, Any]) -> Callable:
    """
    A copy of `function`, and of the functions that it wraps, with other values for the globals in `replaced`.

    The copy belongs to one call, so other models and threads keep their globals. Patching the module that defines the
    function would change all its models.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _copy(function, replaced)
    # A decorator's wrapper reaches the wrapped function through its closure: the copy needs a cell of its own.
    cell = CellType(with_globals(inner, replaced))
    return _copy(function, {}, tuple(cell if _content(old) is inner else old for old in function.__closure__ or ()))


def _copy(function: Any, replaced: dict[str, Any], closure: tuple | None = None) -> Callable[..., Any]:
    names = {**function.__globals__, **replaced} if replaced else function.__globals__
    cells = closure or function.__closure__
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__  # which the constructor does not take
    return copy


def _content(cell: CellType) -> Any:
    """The content of a cell of a closure; `None` for an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def without_checkpointing(cls: type[nn.Module]) -> Callable:
    """The forward of a layer without its gradient checkpointing."""
    forward = cls.forward
    while module_of(forward) == "transformers.modeling_layers":  # its wrapper is written there
        forward = inspect.getattr_static(forward, "__wrapped__")
    return forward
