"""
Probes: forwards of a few tokens, which show what the code of a decoder does not.

[`saved_modules`] keeps the state of a model during forwards that only compare.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .anatomy import gathers_in_parts
from .context import within
from .handle import PaddingRemoval
from .model.inspection import TRUSTED_MIXERS, package_of, parameters_of, takes_any_argument


__all__ = ["change_beside_another_row", "change_of_earlier_states", "other_modules", "saved_modules"]

logger = logging.getLogger(__name__)

PROBE_TOKENS = 4
"""Tokens of the two rows on which a decoder is probed: few, so that the forward costs next to nothing."""

ROUNDING_STEPS = 512
"""
Changes up to this many machine epsilons are rounding: another last token may change the order of a sum, and 32 blocks
of xLSTM reach 75 epsilons on some CPUs. In a tiny BERT, whose tokens see later ones, the change is 20,000 epsilons.
"""

LARGEST_ROUNDING = 0.02
"""Upper limit of these: 512 epsilons of bfloat16 are 4, and would hide a real dependency on the last token."""


def other_modules(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that are not of [`TRUSTED_MIXERS`]: a user's, or code on the Hub."""
    return [module for module in decoder.modules() if package_of(type(module)) not in TRUSTED_MIXERS]


def change_of_earlier_states(decoder: Any) -> float:
    """
    Measure how far the states of a few tokens change when the token after them is replaced by another one.

    Runs one forward in evaluation mode, and does not change the random state. Returns the largest change of a state
    before the last one, divided by the change of the last state.

    Returns 0 for a change within rounding, as in a causal decoder. Returns 0 as well if the decoder cannot run: its
    weights are not in this process (on the meta device, offloaded, or sharded), or it takes more than token ids.
    """
    if (ids := _token_ids(decoder)) is None:
        return 0.0
    ids[1, :-1] = ids[0, :-1]
    if (states := _states(decoder, ids[:2], torch.ones_like(ids[:2]))) is None:
        return 0.0
    change = (states[0] - states[1]).abs().float().flatten(1).amax(1)
    relative = (change[:-1].max() / change[-1]).item()
    # A masked key has exactly zero weight, so states of a causal decoder change by at most the order of some sum.
    return relative if relative > _limit(states) else 0.0


def change_beside_another_row(handle: PaddingRemoval) -> tuple[float, list[str]]:
    """
    Measure how far the states of a row change when another row is packed in front of it.

    For decoders with modules that are not of [`TRUSTED_MIXERS`]: such a module may mix tokens, and look like one that
    does not. Both forwards run the same kernels on the same shapes, so that nothing is rounded differently.

    Returns the largest change of a state, divided by the largest state, and the classes of these modules; 0 for a
    change within rounding, or if the decoder cannot run (see [`change_of_earlier_states`]).
    """
    decoder = handle.decoder
    others = dict.fromkeys(type(module).__name__ for module in other_modules(decoder))
    if not others or (ids := _token_ids(decoder)) is None:
        return 0.0, []
    mask = torch.ones_like(ids[:2])
    mask[1, -1] = 0  # a batch without padding would not be packed
    with within(stats=type(handle.stats)(), strict=True):  # a call that cannot be packed is not probed
        states = [_states(decoder, ids[rows], mask) for rows in ([0, 1], [2, 1])]
    if any(x is None for x in states):
        return 0.0, []
    first, second = (x[1, :-1] for x in states if x is not None)
    change = ((first - second).abs().max() / first.abs().max()).item()
    return (change, [*others]) if change > _limit(first) else (0.0, [])


def _limit(states: torch.Tensor) -> float:
    return min(ROUNDING_STEPS * torch.finfo(states.dtype).eps, LARGEST_ROUNDING)


def _token_ids(decoder: Any) -> torch.Tensor | None:
    """Different ids `(3, PROBE_TOKENS)`; `None` if the decoder cannot run in this process, or has no embeddings."""
    parameters = list(decoder.parameters())
    is_sharded = any(p.is_meta or isinstance(p, DTensor) for p in parameters) or gathers_in_parts(decoder)
    if is_sharded or len({p.device for p in parameters}) != 1:
        return None
    try:
        vocabulary = decoder.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        return None
    ids = torch.arange(3 * PROBE_TOKENS, device=parameters[0].device).view(3, -1)
    return (vocabulary // 2 + ids) % vocabulary  # from the middle: special tokens have ids at the ends


def _states(decoder: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """The states `(B, L, H)` of a decoder in evaluation mode; `None` if it cannot run."""
    try:
        arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "return_dict": True}
        parameters = parameters_of(decoder.forward)
        if not takes_any_argument(decoder):
            arguments = {k: v for k, v in arguments.items() if k in parameters}
        if "is_decoder" in parameters:  # BLIP passes it in every call of its text model
            arguments["is_decoder"] = decoder.config.is_decoder
        devices = [ids.device] if ids.device.type == "cuda" else []
        unchanged = saved_modules(decoder.modules())
        with torch.no_grad(), unchanged, _without_hooks(decoder), torch.random.fork_rng(devices):
            decoder.eval()
            states = decoder(**arguments)[0]
    except Exception as error:
        logger.info(f"{type(decoder).__name__} was not probed ({type(error).__name__}: {error}).")
        return None
    return states if states.shape[:2] == ids.shape else None


_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def saved_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A block after which buffers and plain attributes of modules are as before: running means, ranges, counts."""
    modules = list(modules)
    plain = [(vars(m), {name: x for name, x in vars(m).items() if isinstance(x, _PLAIN)}) for m in modules]
    buffers = [(m._buffers, name, x, x.clone()) for m in modules for name, x in m._buffers.items() if x is not None]
    try:
        yield
    finally:
        for members, values in plain:
            members.update(values)
        with torch.no_grad():
            for owner, name, buffer, copy in buffers:
                if buffer.shape != copy.shape:
                    buffer.resize_(copy.shape)
                owner[name] = buffer.copy_(copy)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """A block in which no forward hook of a module runs: a user's hook may count its calls."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for table in (module._forward_hooks, module._forward_pre_hooks):
                stack.callback(table.update, dict(table))
                table.clear()
        yield
