"""`split_rows`: packed rows of which each process of a group computes a part."""

from __future__ import annotations

from typing import Any

from .attention.compiled import CompiledLayerPatch
from .errors import PaddingRemovalError
from .handle import PaddingRemoval
from .mixers.mixers import FORKED, PACKED, ROWS, WHOLE
from .mixers.primitives import LEFT_OUT, primitives_of
from .model.positions import position_embeddings
from .parallel.collectives import Group
from .parallel.layout import HEADS, KEYS, ContextParallelConfig
from .parallel.mixers import CONTEXT_PARALLEL


__all__ = ["split_rows"]


def split_rows(handle: PaddingRemoval, group: Any = None, *, attention: str = HEADS) -> None:
    """
    Let several processes compute one packed row, each its own slice of the tokens.

    All processes of the group call the model with the same batch, and each is given what one process alone would be
    given. Between attention and recurrences a process has its own tokens only, states of shape `(1, T / n, H)` of a
    row of `T` packed tokens, so what it keeps for backward shrinks with their number. A gradient is the mean over the
    processes, which DDP and FSDP2 take; a loop of your own has to take it.

    Args:
        handle ([`PaddingRemoval`]):
            What [`remove_padding`] returned; with `prefix_sharing` rows share prefixes across processes.
        group (`torch.distributed.ProcessGroup`, *optional*):
            The processes. Defaults to all of them.
        attention (`str`, *optional*, defaults to `"heads"`):
            How attention sees all tokens. `"heads"`: tokens are exchanged for heads, each process attends with some
            heads for all tokens; takes as many heads as processes. `"keys"`: all gather keys and values, and each
            attends for its own tokens, the first and the last of the row; takes any number of heads. Recurrences
            exchange their heads or channels either way.

    Raises:
        ValueError: If `attention` is neither, or there are fewer heads than processes.
        PaddingRemovalError: If the model has a part that cannot be split; the message says which and why.

    Example:

    ```python
    handle = remove_padding(model, prefix_sharing=True)
    split_rows(handle)  # under torchrun
    loss = model(**batch).loss  # the same batch on every process
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    ```
    """
    if attention not in (HEADS, KEYS):
        raise ValueError(f"`attention` is {HEADS!r} or {KEYS!r}, got {attention!r}.")
    if reason := _obstacle(handle):
        raise PaddingRemovalError(
            f"The rows of {type(handle.decoder).__name__} cannot be split over processes: {reason}. Train it without "
            "context parallelism: each process then computes whole rows of its own."
        )
    split = ContextParallelConfig(Group.of(group), attention)
    heads = getattr(handle.decoder.config.get_text_config(), "num_attention_heads", None)
    if attention == HEADS and handle.mixers.counts()[PACKED] and heads is not None and heads < split.group.size:
        raise ValueError(
            f"{type(handle.decoder).__name__} has {heads} attention heads, and {split.group.size} processes would "
            f"share them. Gather the keys instead (`{KEYS!r}`), or take fewer processes."
        )
    handle.split = split


def _obstacle(handle: PaddingRemoval) -> str | None:
    if handle.multimodal is not None:
        return "it takes images, whose features every process would have to compute whole"
    for mixer in (*handle.mixers.that_are(WHOLE), *handle.mixers.that_are(ROWS)):
        return (
            f"`{mixer.name or 'the decoder'}` ({type(mixer.module).__name__}) is computed on whole rows: {mixer.why}"
        )
    for mixer in handle.mixers.that_are(FORKED):
        if left := primitives_of(mixer.module) - CONTEXT_PARALLEL.keys() - LEFT_OUT:
            return f"`{mixer.name}` ({type(mixer.module).__name__}) calls {sorted(left)}, which need all channels"
    if any(isinstance(patch, CompiledLayerPatch) for patch in handle._patches):
        return "its layers are compiled for whole packed rows"
    if position_embeddings(handle.decoder):
        return "its positional embedding numbers the tokens that it is given"
    return None
