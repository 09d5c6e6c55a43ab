"""
Triton kernels on CPU tensors, in Triton's interpreter.

`tests/conftest.py` sets `TRITON_INTERPRET` before any kernel is defined; importing this module mends what the
interpreter of Triton 3.9 cannot do. Each part says why, and where it was reported.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import autotuner, interpreter


__all__ = ["counted_kernels", "trl_on_triton", "without_extensions"]

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET was not set before kernels were defined"

_builder = interpreter.InterpreterBuilder
_handle = interpreter.TensorHandle


# Autotuning times all configurations, for which it needs a device (triton#6570): take that with the smallest blocks.
def _smallest(self: Any, kwargs: dict[str, Any], own: Callable = autotuner.Autotuner.prune_configs) -> list[Any]:
    def size(config: Any) -> int:
        return math.prod(v for v in config.kwargs.values() if isinstance(v, int) and v > 1)

    return [min(own(self, kwargs), key=size)]


autotuner.Autotuner.prune_configs = _smallest


# What a compiled kernel holds as a scalar is a Python number in the interpreter, which has no `.to()`: variables of
# loops over `range`, and float arguments (triton#5965).
def _of_loop(numbers: range) -> Iterator[Any]:
    return map(interpreter._implicit_cvt, numbers)


def _visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.For:
    self.generic_visit(node)
    if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range":
        node.iter = ast.Call(ast.Name("_of_loop", ast.Load()), [node.iter], [])
    return node


def _argument(x: Any, own: Callable = interpreter._implicit_cvt) -> Any:
    return tl.tensor(_handle(np.array([x], np.float32), tl.float32), tl.float32) if isinstance(x, float) else own(x)


interpreter._of_loop = _of_loop  # kernels are given the globals of the interpreter
interpreter.ASTTransformer.visit_For = _visit_for
interpreter._implicit_cvt = _argument


# The interpreter keeps bfloat16 as the uint16 of its bits, and computes on those: silently wrong (triton#4972, #11584,
# #11604; "not supported"). Compute in float32 and round, as a compiled kernel does.
def _wide(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return _handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(data: np.ndarray) -> Any:
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.bfloat16)
    return _handle(rounded.view(torch.uint16).numpy().reshape(np.shape(data)), tl.bfloat16)


def _computed_in_float32(own: Callable) -> Callable:
    def call(self: Any, first: Any, *others: Any) -> Any:
        if first.dtype.scalar != tl.bfloat16:
            return own(self, first, *others)
        out = own(self, _wide(first), *(_wide(x) if isinstance(x, _handle) else x for x in others))
        return _handle(out.data, tl.bfloat16) if out.data.dtype == np.bool_ else _narrow(out.data)  # comparisons

    return call


def _reduced_in_float32(own: Callable) -> Callable:
    def call(self: Any, x: Any, **options: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        wide = x.dtype.scalar == tl.bfloat16
        return own(self, self.to_tensor(_wide(x.handle).data, tl.float32) if wide else x, **options)

    return call


def _fma(self: Any, a: Any, b: Any, c: Any, own: Callable = _builder.create_fma) -> Any:
    narrow = c.dtype.scalar == tl.bfloat16
    return self.create_fadd(self.create_fmul(a, b), c) if narrow else own(self, a, b, c)


def _dot(self: Any, a: Any, b: Any, *others: Any, own: Callable = _builder.create_dot) -> Any:
    return own(self, _wide(a), _wide(b), *others)


def _cast(self: Any, x: Any, to: Any, own: Callable = _builder.cast_impl) -> Any:
    if to.scalar == tl.bfloat16:
        return _narrow(_wide(x).data)
    return own(self, x if to.scalar == tl.float32 else _wide(x), to)


for _name in ("binary_op", "unary_op"):
    setattr(_builder, _name, _computed_in_float32(getattr(_builder, _name)))
for _kind, _names in ((interpreter.ReduceOps, ("sum", "min_max")), (interpreter.ScanOps, ("cumsum", "cumprod"))):
    for _name in _names:
        setattr(_kind, _name, _reduced_in_float32(getattr(_kind, _name)))
_builder.create_fma, _builder.create_dot, _builder.cast_impl = _fma, _dot, _cast


# Functions of libdevice have a body in the compiler only (triton#8825, #10366).
def _elementwise(function: Callable) -> Callable:
    return lambda x: tl.tensor(interpreter.interpreter_builder.unary_op(x.handle, function), x.type)


for _name, _function in {
    "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "exp": np.exp, "fast_expf": np.exp, "fast_logf": np.log,
}.items():  # fmt: skip
    setattr(libdevice, _name, _elementwise(_function))


@contextlib.contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    """Launches by the name of the kernel, which show that it ran and nothing in its place."""
    launches: Counter[str] = Counter()
    own = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[self.fn.__name__] += 1
        return own(self, *args, **kwargs)

    # Launchers enter the device of their tensors, and ask it for its size.
    device = {"device": lambda index: contextlib.nullcontext()}
    device["get_device_properties"] = lambda device=None: types.SimpleNamespace(multi_processor_count=2)
    with mock.patch.object(interpreter.GridExecutor, "__call__", call), mock.patch.multiple(torch.cuda, **device):
        yield launches


@contextlib.contextmanager
def trl_on_triton() -> Iterator[None]:
    """TRL goes as on a GPU: its kernels, and its fused head on the positions with a label only."""
    with contextlib.ExitStack() as stack:
        for name in ("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence", "trl.trainer.utils"):
            stack.enter_context(mock.patch(f"{name}._use_triton", return_value=True))
        yield


def without_extensions() -> None:
    """Import `mamba_ssm` as a package of its Triton kernels: its `__init__` needs CUDA extensions (mamba#237)."""
    found = PathFinder.find_spec("mamba_ssm")
    if found is None:
        return
    package = types.ModuleType("mamba_ssm")
    package.__path__, package.__spec__ = list(found.submodule_search_locations or ()), found
    sys.modules["mamba_ssm"] = package
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    package.mamba_chunk_scan_combined = scan.mamba_chunk_scan_combined
