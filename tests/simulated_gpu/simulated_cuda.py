"""
A simulated GPU: tensors that report `cuda:0` and compute on the CPU.

Within [`simulated_cuda`] code that asks tensors for their device takes its GPU path, with real numbers. Kernels are
counted, and synchronisations by the line that caused them. A kernel is an operation on tensors of the device that is
not a view. A synchronisation is an operation for whose result the host waits: reading a value, an operation whose
output has a shape that depends on values, or a copy between host and device that may not overlap.

Autograd and autocast are those of the CPU: `torch.autocast("cuda")` is led to the CPU's.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from simulated_gpu import varlen_reference
from torch import nn
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


__all__ = ["Counts", "SimulatedTensor", "current_counts", "simulated_cuda", "to_simulated"]

CUDA = torch.device("cuda:0")

_VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided", "permute", "reshape",
    "resize_", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view",
}  # fmt: skip
_WAITING = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_scatter_backward", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


@dataclass
class Counts:
    """
    Operations of the simulated device since [`Counts.reset`].

    Attributes:
        kernels (`Counter`): Operations on tensors of the device, by name.
        synchronisations (`Counter`): Waits of the host, by `(operation, line of the package or of the caller)`.
        varlen (`list[tuple]`): Shapes of query and key, and window, of every call of torch's varlen attention.
    """

    kernels: Counter = field(default_factory=Counter)
    synchronisations: Counter = field(default_factory=Counter)
    varlen: list[tuple] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Kernels, summed."""
        return self.kernels.total()

    def ours(self) -> Counter:
        """Synchronisations that a line of the package caused."""
        return Counter({key: n for key, n in self.synchronisations.items() if "trl_padfix/" in key[1]})

    def reset(self) -> None:
        """Set all counts to zero."""
        self.kernels, self.synchronisations, self.varlen = Counter(), Counter(), []

    def wait(self, operation: str) -> None:
        self.synchronisations[(operation, _line())] += 1


_counts: list[Counts] = []


def current_counts() -> Counts:
    """What the innermost running [`simulated_cuda`] counts."""
    return _counts[-1]


def _line() -> str:
    """The innermost line that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-4:])}:{frame.f_lineno}" if frame else "?"


class SimulatedTensor(torch.Tensor):
    """A tensor that says it is on `cuda:0`; `held` is where its numbers are."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> SimulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device="cpu",
            requires_grad=False,
        )
        made.held = held
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def cpu(self, *args: Any) -> torch.Tensor:
        _counts[-1].wait("cpu()")
        return self.detach().held.clone()

    def tolist(self) -> Any:
        _counts[-1].wait("tolist()")
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cuda(self, *args: Any) -> SimulatedTensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device", args[0] if args and isinstance(args[0], str | torch.device) else None)
        if device is not None and torch.device(device).type == "cpu":
            return self.cpu() if len(args) < 2 else self.cpu().to(*args[1:])
        if device is not None:
            kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
            args = tuple(a for a in args if not isinstance(a, str | torch.device))
            if not args and not kwargs:
                return self
        return torch.Tensor.to(self, *args, **kwargs)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.held})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Sends what is made on, or copied to, `cuda` to the simulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[1]
    found = False

    def held(x: Any) -> Any:
        nonlocal found
        found = found or isinstance(x, SimulatedTensor)
        return x.held if isinstance(x, SimulatedTensor) else x

    asked = kwargs.get("device")
    to_cuda = asked is not None and torch.device(asked).type == "cuda"
    own_args, own_kwargs = _mapped(held, args), _mapped(held, kwargs)
    if asked is not None:
        own_kwargs["device"] = torch.device("cpu")
    if own_kwargs.get("pin_memory"):
        own_kwargs["pin_memory"] = False
    with _disable_current_modes():
        output = _compute(func, name, own_args, own_kwargs)
    if not (found or to_cuda):
        return output
    _count(name, own_args, own_kwargs, uploaded=to_cuda and not found)
    if name == "_local_scalar_dense":
        return output
    if isinstance(kwargs.get("out"), SimulatedTensor):
        return kwargs["out"]
    in_place = func._schema.name.endswith("_") and not name.startswith("_")
    if in_place and isinstance(args[0], SimulatedTensor):
        return args[0]
    return _mapped(lambda x: SimulatedTensor(x) if type(x) is torch.Tensor else x, output)


def _mapped(function: Any, value: Any) -> Any:
    """Apply a function to a value, or to each value in tuples, lists and dictionaries."""
    if type(value) in (tuple, list):
        return type(value)([_mapped(function, v) for v in value])
    return {k: _mapped(function, v) for k, v in value.items()} if type(value) is dict else function(value)


def _compute(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    if name == "is_pinned":
        return False
    if name == "_flash_attention_forward":
        query, key, value, cu_q, cu_k, max_q, max_k = args[:7]
        assert query.dtype == key.dtype == value.dtype, "the kernel takes one dtype"
        assert query.dtype in (torch.float16, torch.bfloat16), "the kernel takes half precision only"
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert max_q >= cu_q.diff().max()
        assert max_k >= cu_k.diff().max()
        window = kwargs["window_size_left"], kwargs["window_size_right"]
        _counts[-1].varlen.append((tuple(query.shape), tuple(key.shape), window))
        attended = varlen_reference.attend(query, key, value, cu_q, cu_k, kwargs.get("scale"), window)
        return *attended, torch.zeros(2, dtype=torch.uint64), torch.empty(()), torch.empty(0)
    if name == "_flash_attention_backward":
        upstream, query, key, value, _, _, cu_q, cu_k = args[:8]
        window = kwargs["window_size_left"], kwargs["window_size_right"]
        return varlen_reference.attend_backward(upstream, query, key, value, cu_q, cu_k, kwargs.get("scale"), window)
    # Half precision in, float32 out: no kernel of the CPU.
    if func._overloadname in ("dtype", "dtype_out") and name != "view":
        *factors, dtype = args
        result = func._overloadpacket(*(x.to(dtype) for x in factors))
        return result if "out" not in kwargs else kwargs["out"].copy_(result)
    return func(*args, **kwargs)


def _count(name: str, args: tuple, kwargs: dict[str, Any], *, uploaded: bool) -> None:
    counts = _counts[-1]
    by_mask = name in _INDEXING and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1])
    unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    if uploaded and name == "_to_copy" and not kwargs.get("non_blocking"):
        counts.wait("copy to the device")
    elif name in _WAITING or by_mask or unknown_size:
        counts.wait(name)
    if name not in _VIEWS:
        counts.kernels[name] += 1


def to_simulated(x: Any) -> Any:
    """A tensor, or the parameters and buffers of a module in place, on the simulated device; no copy is counted."""
    if isinstance(x, nn.Module):
        moved: dict[int, nn.Parameter] = {}
        for module in x.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, SimulatedTensor):
                    if id(parameter) not in moved:
                        data = SimulatedTensor(parameter.detach())
                        moved[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                    module._parameters[name] = moved[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, SimulatedTensor):
                    module._buffers[name] = SimulatedTensor(buffer.detach())
        return x
    return SimulatedTensor(x.detach()).requires_grad_(x.requires_grad)


class _Autocast(torch.autocast):
    """Autocast of the simulated device is the CPU's."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any):
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _tensor(make: Any) -> Any:
    """`torch.tensor`, which copies what it is given to the device and waits for that."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(data, device=device, **kwargs)
        _counts[-1].wait("copy to the device")
        return to_simulated(make(data, **kwargs))

    return made


class _Kernel:
    """A Triton kernel of TRL's: what TRL computes without Triton, counted as one launch."""

    def __init__(self, name: str, tile: Any):
        self.name, self.tile = name, tile

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            held = [x.held if isinstance(x, SimulatedTensor) else x for x in args]
            _counts[-1].kernels[self.name] += 1
            with _disable_current_modes():
                self.tile(*held, **kwargs)

        return launch


def _kernels_of_trl() -> Iterator[Any]:
    """Patches with which TRL takes the path of a GPU, whether or not Triton is installed."""
    for name in ("chunked_logprob", "chunked_divergence"):
        try:
            module = importlib.import_module(f"trl.kernels.{name}")
        except ImportError:  # older versions of TRL have none
            continue
        for kernel in [k for k in vars(module) if k.endswith("_kernel")]:
            tile = getattr(module, kernel.replace("_kernel", "_tile"))
            yield mock.patch.object(module, kernel, _Kernel(kernel, tile))
        yield mock.patch.object(module, "_TRITON_AVAILABLE", True, create=True)
        yield mock.patch.object(module, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)), create=True)


def _of_cpu(function: Any) -> Any:
    return lambda device_type="cuda": function("cpu")


@contextmanager
def simulated_cuda() -> Iterator[Counts]:
    """Simulate a GPU until the block ends."""
    counts, of_trl = Counts(), [*_kernels_of_trl()]  # imported before there is a device
    _device_constructors()  # torch remembers the functions that it finds at first: not the stand-in for `torch.tensor`
    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_name": lambda *args: "simulated",
        "is_bf16_supported": lambda *args, **kwargs: True,
        "synchronize": lambda *args: None,
        "is_current_stream_capturing": lambda: False,
        "reset_peak_memory_stats": lambda *args: None,
        "max_memory_allocated": lambda *args: 0,
        "empty_cache": lambda: None,
    }
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self, *args: self))
        stack.enter_context(mock.patch.object(torch, "autocast", _Autocast))
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor(torch.tensor)))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(mock.patch.object(torch, name, _of_cpu(getattr(torch, name))))
        for patch in of_trl:
            stack.enter_context(patch)
        _counts.append(counts)
        stack.callback(_counts.remove, counts)
        stack.enter_context(_Device())
        yield counts
