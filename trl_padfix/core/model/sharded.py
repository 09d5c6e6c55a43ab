"""Decoders whose parts gather their parameters from other processes whenever they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor


__all__ = ["differentiates_in_parts", "forget_order_of_calls", "gather_anew", "gathered_head", "gathers_in_parts"]

_UNITS = {"FSDPModule", "FullyShardedDataParallel"}


def gathers_in_parts(module: nn.Module) -> bool:
    """
    Whether parts of `module` gather parameters when they are called: units of FSDP within it, or all under ZeRO-3.
    Processes with other calls than the rest, because of other rows, would wait for them for ever.
    """
    if _is_of_zero_3(module):
        return True
    return any(_UNITS & {cls.__name__ for cls in type(m).__mro__} for m in module.modules() if m is not module)


def differentiates_in_parts(module: nn.Module) -> bool:
    """Whether somebody else's hooks take part in the backward pass of `module`: those of FSDP or DeepSpeed."""
    names = {cls.__name__ for m in module.modules() for cls in type(m).__mro__}
    return bool(names & (_UNITS | {"DeepSpeedEngine"})) or _is_of_zero_3(module)


def forget_order_of_calls(model: Any, ids: torch.Tensor) -> None:
    """
    Let ZeRO-3 learn anew in which order the parts of `model` gather their parameters.

    It learns that from the first forwards and stops at a parameter out of turn (DeepSpeed 0.19), and TRL's loss takes
    the weights of the LM head by another way than a forward that returns logits. A call beyond the last of a forward
    makes it forget: the first of the `ids` is looked up. To models of other kinds nothing is done.
    """
    if _is_of_zero_3(model):
        model.get_input_embeddings()(ids[:1, :1])


def gather_anew(model: nn.Module) -> None:
    """
    Let units of FSDP gather their parameters in their next forward: after one that no backward pass follows the
    outermost unit keeps what it has gathered, also beyond a step of the optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for unit in FullyShardedDataParallel.fsdp_modules(model, root_only=True):  # for FSDP1 only torch itself has a call
        if unit._handle is not None:
            _reshard(unit, unit._handle, True)


@contextmanager
def gathered_head(model: Any, decoder: nn.Module) -> Iterator[None]:
    """
    Gather an LM head that FSDP2 shards on its own, once the decoder is through: for a loss that reads its weight.

    TRL's fused head (1.16) does not call the module, and takes `weight.full_tensor()`: backward, each process then
    keeps the rows that it stores from its own gradient, and nothing is averaged. accelerate (1.15) shards the head
    together with the final norm, whose call gathers both, and on its own where it does not find that norm, as in
    models with images. Of a head that is gathered the gradient is averaged when the backward pass ends.
    """
    head = model.get_output_embeddings()
    if not hasattr(head, "unshard"):  # as units of FSDP2 have
        yield
        return

    def gather(*_: Any) -> None:
        if torch.is_grad_enabled() and isinstance(head.weight, DTensor) and head.weight.requires_grad:
            head.unshard()

    hook = decoder.register_forward_hook(gather)
    try:
        yield
    finally:
        hook.remove()


def _is_of_zero_3(module: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())
