"""`tile_mlps`: the MLPs of a long packed row, computed some tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .attention.compiled import CompiledLayerPatch
from .errors import PaddingRemovalError
from .generation import evaluating
from .handle import PaddingRemoval
from .model.changes import ModuleChanges
from .model.patching import Attachment, ForwardPatch


__all__ = ["check_tile", "tile_mlps"]

_TOKEN_WISE: set[type[nn.Module]] = set()
"""Classes of MLPs that passed the test in `_obstacle`. MLPs of sharded models cannot be tested: their class counts."""


def check_tile(tokens: object) -> None:
    """Raise a `ValueError` for a number of tokens that a tile cannot have."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"`mlp_tile_tokens` is a positive number of tokens, or None, got {tokens!r}.")


def tile_mlps(handle: PaddingRemoval, tokens: int) -> None:
    """
    Compute the MLPs of an attached model some tokens at a time, for rows whose intermediate states fill the memory.

    An MLP of width `I` holds `(1, T, I)` several times over for a row of `T` tokens. Tiled, it holds `(1, tokens, I)`:
    in backward each tile is computed again. The numbers are the same; a step computes the MLPs once more. With
    gradient checkpointing of whole layers the tiles limit the memory of each recomputed layer.

    Args:
        handle ([`PaddingRemoval`]):
            Handle from [`remove_padding`].
        tokens (`int`):
            Tokens of a tile. Shorter rows are computed as they are.

    Raises:
        ValueError: If `tokens` is not a positive integer.
        PaddingRemovalError: If no layer has an MLP that computes each token by itself; the message names one. Experts
            behind a router are not tiled.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix import remove_padding, tile_mlps

    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                                      num_attention_heads=2, num_key_value_heads=1))
    >>> handle = remove_padding(model)
    >>> tile_mlps(handle, 4)
    >>> ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]])  # 7 real tokens: tiles of 4 and 3
    >>> model(ids, attention_mask=(ids > 0).long()).logits.shape
    torch.Size([2, 4, 32])

    ```
    """
    check_tile(tokens)
    if any(isinstance(patch, CompiledLayerPatch) for patch in handle._patches):
        raise PaddingRemovalError(
            "The layers are compiled, and a compiled layer has no tiles: leave out one of the two."
        )
    mlps, reasons = [], []
    for name, mlp in _mlps(handle):
        reason = _obstacle(mlp, handle)
        if reason is None:
            mlps.append(mlp)
        else:
            reasons.append(f"`{name}` ({type(mlp).__name__}) {reason}")
    if not mlps:
        raise PaddingRemovalError(
            f"No MLP of {type(handle.decoder).__name__} can be computed in tiles: "
            f"{reasons[0] if reasons else 'its layers have none beside attention'}. Leave `mlp_tile_tokens` out."
        )
    # Not `handle.attach`: it would also accept the hooks that were registered since padding removal was attached.
    Attachment.attach(handle, [TiledMLPPatch(mlp, handle, tokens) for mlp in mlps])


class TiledMLPPatch(ForwardPatch):
    """Computes an MLP in tiles."""

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: PaddingRemoval, tokens: int):
        super().__init__(module, attachment)
        self.tokens = tokens
        self.changes = ModuleChanges(module, [])  # within the MLP: its own hooks run outside of its forward

    def call(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Also in padded calls, and when a checkpoint recomputes after removal: it must compute what the forward did.
        flat = hidden_states.flatten(0, -2).unsqueeze(0)
        # A hook that was registered within the MLP since attachment may depend on the place of a token in the row.
        if flat.shape[1] <= self.tokens or self.changes.has_changed:
            return self.wrapped(hidden_states, *args, **kwargs)
        tiles = flat.split(self.tokens, dim=1)
        if torch.is_grad_enabled():
            outputs = [checkpoint(self.wrapped, tile, *args, use_reentrant=False, **kwargs) for tile in tiles]
        else:
            outputs = [self.wrapped(tile, *args, **kwargs) for tile in tiles]
        return torch.cat(outputs, dim=1).view(*hidden_states.shape[:-1], -1)


def _mlps(handle: PaddingRemoval) -> Iterator[tuple[str, nn.Module]]:
    """The children of each layer that hold weight matrices and no mixer, by name."""
    mixers = {mixer.module for mixer in handle.mixers.mixers}
    for layer_name, layer in handle.mixers.layers.items():
        for name, child in layer.named_children():
            matrices = [p for p in child.parameters() if p.dim() > 1]
            if len(matrices) > 1 and not mixers & {*child.modules()} and layer not in mixers:
                yield f"{layer_name}.{name}", child


@torch.no_grad()
def _obstacle(mlp: nn.Module, handle: PaddingRemoval) -> str | None:
    """Why an MLP cannot be computed in tiles; `None` if it can. Tries both ways on random states."""
    if any(p.dim() > 2 for p in mlp.parameters()) or any(
        "router" in n or n == "gate" for n, _ in mlp.named_children()
    ):
        return "has experts behind a router"
    first = next(mlp.parameters())
    if first.is_meta or not first.numel() or isinstance(first, DTensor):
        elsewhere = "has its weights elsewhere (sharded, or on the meta device): tile a model of its kind before it"
        return None if type(mlp) in _TOKEN_WISE else elsewhere
    states = torch.randn(
        1, 8, handle.decoder.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(0)
    )
    states = states.to(first.device, first.dtype if first.is_floating_point() else torch.float32)
    try:
        with evaluating(mlp):  # no dropout
            whole, tiles = mlp(states), [mlp(tile) for tile in states.split(3, dim=1)]
    except Exception as error:
        return f"does not take states alone ({type(error).__name__}: {error})"
    if not isinstance(whole, torch.Tensor) or whole.shape[:2] != states.shape[:2]:
        return "returns something else than one state for each token"
    tolerance = 1e-5 if states.dtype == torch.float32 else 2e-2
    if not torch.allclose(torch.cat(tiles, dim=1), whole, atol=tolerance, rtol=tolerance):
        return "does not compute each token by itself"
    _TOKEN_WISE.add(type(mlp))
    return None
