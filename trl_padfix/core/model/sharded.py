"""Decoders under FSDP and ZeRO-3, whose modules gather their parameters from other processes in each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


__all__ = ["differentiates_in_parts", "gathered_head", "gathers_in_parts", "reset_gather_order", "reshard_parameters"]

_UNITS = {"FSDPModule", "FullyShardedDataParallel"}


def gathers_in_parts(module: nn.Module) -> bool:
    """
    Whether modules inside `module` gather parameters when they are called: units of FSDP, or all under ZeRO-3.

    Gathering is a collective: a process that calls other modules than the rest, because of its rows, would hang.
    """
    if _is_of_zero_3(module):
        return True
    return any(_UNITS & {cls.__name__ for cls in type(m).__mro__} for m in module.modules() if m is not module)


def differentiates_in_parts(module: nn.Module) -> bool:
    """Whether hooks of FSDP or DeepSpeed take part in the backward pass of `module`."""
    names = {cls.__name__ for m in module.modules() for cls in type(m).__mro__}
    return bool(names & (_UNITS | {"DeepSpeedEngine"})) or _is_of_zero_3(module)


def reset_gather_order(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """
    Let ZeRO-3 record again in which order the modules of `model` gather their parameters; other models are unchanged.

    ZeRO-3 records the order in the first forwards and raises at a parameter out of order (DeepSpeed 0.19). TRL's loss
    reads the weight of the LM head in another place than a forward that returns logits. A module call after the last
    one of the recorded order discards the record: here, the embedding of the first of `ids`.
    """
    if _is_of_zero_3(model):
        model.get_input_embeddings()(ids[:1, :1])


def reshard_parameters(model: nn.Module) -> None:
    """
    Free the gathered parameters of FSDP units, so that their next forward gathers the current ones.

    After a forward without backward the outermost unit keeps its gathered parameters, even beyond an optimizer step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for unit in FullyShardedDataParallel.fsdp_modules(model, root_only=True):  # FSDP1 has no public function for it
        if unit._handle is not None:
            _reshard(unit, unit._handle, True)


@contextmanager
def gathered_head(model: PreTrainedModel, decoder: nn.Module) -> Iterator[None]:
    """
    Gather an LM head that FSDP2 shards on its own after each forward of the decoder, for a loss that reads its weight.

    TRL's fused head (1.16) does not call the module and reads `weight.full_tensor()`. In backward each process then
    keeps only its own gradient for its shard, and nothing is averaged. The gradient of a head that is gathered is
    averaged at the end of backward. accelerate (1.15) shards the head together with the final norm, whose call gathers
    both; it shards the head on its own if it does not find that norm, as in models with images.
    """
    head: Any = model.get_output_embeddings()
    if not issubclass(type(head), FSDPModule):
        yield
        return

    def gather(*_: Any) -> None:
        if torch.is_grad_enabled() and isinstance(head.weight, DTensor) and head.weight.requires_grad:
            head.unshard()

    with decoder.register_forward_hook(gather):
        yield


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP1 (empty parameters), FSDP2 or ZeRO-3 shards the weights of a module."""
    return _is_of_zero_3(module) or any(p.numel() == 0 or isinstance(p, DTensor) for p in module.parameters())


def _is_of_zero_3(module: nn.Module) -> bool:
    return any("ds_id" in vars(parameter) for parameter in module.parameters())
