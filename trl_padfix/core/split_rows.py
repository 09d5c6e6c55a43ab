"""`split_rows`: context parallelism, in which several processes compute one packed row."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from .errors import PaddingRemovalError, require
from .handle import PaddingRemoval
from .mixers.mixers import DIRECT, FORKED, ROWS
from .mixers.primitives import LEFT_OUT, primitives_of
from .parallel.collectives import Group
from .parallel.local import CONTEXT_PARALLEL


__all__ = ["split_rows"]


def split_rows(handle: PaddingRemoval, group: ProcessGroup | None = None) -> PaddingRemoval:
    """
    Let several processes compute one packed row, each its local tokens (context parallelism).

    All `n` processes of the group call the model with the same batch, and each gets the output that one process alone
    would get. Token-wise layers run on the local tokens, with states of shape `(1, T / n, H)` for a row of `T` packed
    tokens: activations kept for backward shrink to `1 / n`. At attention, in recurrences and convolutions an
    all-to-all exchanges tokens for heads or channels (Ulysses), and each process computes some of them for all tokens.
    The gradient is the mean over the processes. DDP and FSDP2 compute this mean; a training loop without them must
    compute it.

    Args:
        handle ([`PaddingRemoval`]):
            Handle from [`remove_padding`]. With `prefix_sharing` rows share prefixes across processes.
        group (`torch.distributed.ProcessGroup`, *optional*):
            The processes. Defaults to all of them.

    Returns:
        [`PaddingRemoval`]: `handle`.

    Raises:
        ValueError: If there are fewer heads than processes. Calls raise it if processes have different batches.
        PaddingRemovalError: If a module of the model does not support context parallelism; the message names it.

    Example:

    ```python
    handle = split_rows(remove_padding(model, prefix_sharing="auto"))  # under torchrun
    loss = model(**batch).loss  # the same batch on every process
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    ```
    """
    require(PaddingRemoval, handle=handle)
    if reason := _obstacle(handle):
        raise PaddingRemovalError(
            f"The rows of {type(handle.decoder).__name__} cannot be split over processes: {reason}. Train it without "
            "context parallelism: each process then computes whole rows of its own."
        )
    processes = Group.of(group)
    # With fewer heads than processes some would have none, and could not join the all-to-all of attention.
    heads = getattr(handle.decoder.config.get_text_config(), "num_attention_heads", None)
    if handle.anatomy.mixers.in_mode(DIRECT) and heads is not None and heads < processes.size:
        raise ValueError(
            f"{type(handle.decoder).__name__} has {heads} attention heads for {processes.size} processes. Use fewer "
            "processes."
        )
    handle.context_parallel = processes
    return handle


def _obstacle(handle: PaddingRemoval) -> str | None:
    """Why several processes cannot compute one row of this model; `None` if they can."""
    for mixer in handle.anatomy.mixers.in_mode(ROWS):
        return f"`{mixer.name}` ({type(mixer.module).__name__}) is computed on whole rows: {mixer.why}"
    # A recurrence is divided by heads or channels: all functions that it calls must treat these independently.
    for mixer in handle.anatomy.mixers.in_mode(FORKED):
        if unsupported := primitives_of(mixer.module) - CONTEXT_PARALLEL.keys() - LEFT_OUT:
            return (
                f"`{mixer.name}` ({type(mixer.module).__name__}) calls {sorted(unsupported)}, which need all channels"
            )
    if handle.anatomy.position_tables:
        return "its positional embedding numbers the tokens that it gets, here only the local ones"
    return None
