"""
Prefix trees in the form of TRL's asynchronous GRPO: the `tree_*` keyword arguments of a forward.

A tree row has `N` tokens and `S` segments. Its keywords describe what a [`Layout`] describes: `tree_cu_seqlens_q` the
queries of each segment, `tree_kv_index` its keys (the path from the root, own tokens last), and `tree_cu_seqlens_k`
where the keys of each segment begin. trl#7686 adds the parent of each segment. [`Layout.tree_arguments`] is the
inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import PaddingRemovalError
from .build import lay_out
from .layout import Layout


__all__ = ["tree_arguments_in", "tree_layout"]

_TENSORS = (
    "tree_cu_seqlens_q", "tree_kv_index", "tree_cu_seqlens_k", "tree_segment_parents", "tree_segment_depths",
)  # fmt: skip
_SUPPORTED = {*_TENSORS, "tree_max_seqlen_q", "tree_max_seqlen_k"}  # the lengths follow from the tensors


def tree_arguments_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """
    The `tree_*` arguments of a call; empty if none is given.

    Raises:
        PaddingRemovalError: If one of them is unknown, or if some are missing.
    """
    tree = {k: v for k, v in arguments.items() if k.startswith("tree_") and v is not None}
    # Ignoring an argument would change the attention without notice, so another form of tree is an error.
    if unknown := sorted(tree.keys() - _SUPPORTED):
        raise PaddingRemovalError(
            f"The model was called with {unknown}. Trees are read from {sorted(_SUPPORTED)}, as TRL 1.16 passes them; "
            "another form might mean another tree. Pass these, or run this call inside `with handle.disabled():`."
        )
    paths = {"tree_kv_index", "tree_cu_seqlens_k"}
    if tree and not (("tree_cu_seqlens_q" in tree) and (paths <= tree.keys() or "tree_segment_parents" in tree)):
        raise PaddingRemovalError(
            f"The model was called with {sorted(tree)}, which is not a tree: `tree_cu_seqlens_q` is needed, and "
            "`tree_kv_index` with `tree_cu_seqlens_k`, or `tree_segment_parents`."
        )
    return tree


def tree_layout(tree: Mapping[str, Any], tokens: int, keys: Sequence[torch.Tensor] = ()) -> Layout:
    """
    Layout of a tree row: each segment attends to its path from the root.

    Args:
        tree (`Mapping[str, Any]`):
            The `tree_*` arguments of the call.
        tokens (`int`):
            Tokens of the row, `N`.
        keys (`Sequence` of `torch.Tensor` of shape `(N,)`, *optional*):
            Tokens with the same path are computed once if they agree in all keys (ids, positions). A tree of TRL forks
            one token before its samples differ, and has a copy of that token for each branch. Without keys every token
            of the row is computed.

    Returns:
        [`Layout`] with the batch shape `(1, N)`, on the device of `tree_cu_seqlens_q`. Costs one synchronization.

    Raises:
        ValueError: If the arguments do not describe a tree of `tokens` tokens.

    Example: 1-2-3 and 1-2-4, where the tree forks one token early: it has the token 2 twice.

    ```python
    >>> import torch

    >>> tree = {
    ...     "tree_cu_seqlens_q": torch.tensor([0, 1, 3, 5]),
    ...     "tree_cu_seqlens_k": torch.tensor([0, 1, 4, 7]),
    ...     "tree_kv_index": torch.tensor([0, 0, 1, 2, 0, 3, 4]),
    ... }
    >>> layout = tree_layout(tree, 5, [torch.tensor([1, 2, 3, 2, 4])])
    >>> layout.packed_index, layout.source
    (tensor([0, 1, 2, 4]), tensor([0, 1, 2, 1, 3]))
    >>> layout.queries.lengths, layout.keys.lengths
    ((3, 1), (3, 3))

    ```
    """
    names = [name for name in _TENSORS if tree.get(name) is not None]
    device = tree["tree_cu_seqlens_q"].device
    tensors = [x.flatten().to(device=device, dtype=torch.int64) for x in (*(tree[name] for name in names), *keys)]
    on_host = torch.cat(tensors).cpu().split([len(x) for x in tensors])  # in one copy: one synchronization
    named = dict(zip(names, on_host, strict=False))  # the keys come after the named tensors
    cu_q, path_index, cu_k = _paths(named, tokens)
    parent = _parents_of_tokens(cu_q, path_index, cu_k)
    _check_segment_parents(named, cu_q, parent)
    # A leaf is a segment whose last token no path continues. The paths to the leaves are the rows that the tree was
    # made of; a row that equals another row, or its beginning, has no leaf of its own.
    has_child = torch.zeros(tokens + 1, dtype=torch.bool)
    has_child[parent] = True  # a root has the parent -1, which sets the additional last entry
    leaves = (~has_child[cu_q[1:] - 1]).nonzero().flatten().tolist()
    paths = [path_index[cu_k[leaf] : cu_k[leaf + 1]] for leaf in leaves]
    token_R, lengths = torch.cat(paths), [len(path) for path in paths]
    position_R = torch.cat([torch.arange(length) for length in lengths])
    # Without keys a token is identified by its place in the row: the tree is kept unchanged.
    keys_R = [key[token_R] for key in on_host[len(names) :]] or [token_R]
    path_layout = lay_out((1, len(token_R)), torch.arange(len(token_R)), position_R, lengths, keys_R)
    assert path_layout.source is not None
    source = torch.empty(tokens, dtype=torch.int64)
    source[token_R] = path_layout.source  # one packed token computes a token of several paths
    layout = replace(
        path_layout,
        batch_shape=(1, tokens),
        real_index=torch.arange(tokens),
        source=source,
        packed_index=token_R[path_layout.packed_index],
    )
    return layout.to(device)


def _paths(tree: Mapping[str, torch.Tensor], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tree_cu_seqlens_q`, `tree_kv_index` and `tree_cu_seqlens_k`, checked; if absent, the last two are built."""
    cu_q = tree["tree_cu_seqlens_q"]
    _check_cu_seqlens("tree_cu_seqlens_q", cu_q, tokens, "tokens of the row")
    if "tree_kv_index" in tree:
        path_index, cu_k = tree["tree_kv_index"], tree["tree_cu_seqlens_k"]
        _check_cu_seqlens("tree_cu_seqlens_k", cu_k, len(path_index), "entries of `tree_kv_index`")
        if len(cu_k) != len(cu_q):
            raise ValueError(f"`tree_cu_seqlens_q` has {len(cu_q)} entries and `tree_cu_seqlens_k` {len(cu_k)}.")
        return cu_q, path_index, cu_k
    paths: list[torch.Tensor] = []
    for segment, parent in enumerate(tree["tree_segment_parents"].tolist()):
        if segment + 1 == len(cu_q) or parent >= segment:
            break  # an error, raised below or by `_check_segment_parents` for parents without a segment
        new = torch.arange(int(cu_q[segment]), int(cu_q[segment + 1]))
        paths.append(torch.cat([paths[parent], new]) if parent >= 0 else new)
    if len(paths) != len(cu_q) - 1:
        raise ValueError(
            f"`tree_segment_parents` is {tree['tree_segment_parents'].tolist()[:9]} for {len(cu_q) - 1} segments: "
            "give each the number of an earlier segment, or -1 for a root."
        )
    return cu_q, torch.cat(paths), torch.tensor([0, *map(len, paths)]).cumsum(0)


def _check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, end: int, unit: str) -> None:
    """Raise a `ValueError` unless `cu_seqlens` ascend from 0 to `end`, without empty segments."""
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != end or (cu_seqlens.diff() <= 0).any():
        raise ValueError(
            f"`{name}` is {cu_seqlens.tolist()[:9]}...{cu_seqlens.tolist()[-1:]}: the bounds of the segments ascend "
            f"from 0 to {end}, the {unit}. Padding of a collator (-1, 0) must be cut off before the forward."
        )


def _parents_of_tokens(cu_q: torch.Tensor, path_index: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    """
    The token before each token on its path, `(N,)`; -1 for the first token of a path.

    Raises:
        ValueError: If a path does not end with its segment, or is not the path of the tokens on it.
    """
    tokens, lengths = int(cu_q[-1]), cu_q.diff()
    token = torch.arange(tokens)
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = cu_k[segment + 1] - (cu_q[segment + 1] - token)  # index in `path_index`, on the path of its own segment
    too_short = (cu_k.diff() < lengths).any()
    if too_short or not torch.equal(path_index[place.clamp(min=0)], token):
        raise ValueError(
            "A path of `tree_kv_index` does not end with the tokens of its segment, in their order. Attention is "
            "aligned to the bottom right: the last query of a segment is its last key."
        )
    before = path_index.roll(1)
    before[cu_k[:-1]] = -1
    parent = before[place]
    # This is a tree if each token has one parent, the same on all paths, and comes after it in the row.
    in_range = bool(((path_index >= 0) & (path_index < tokens)).all())
    if not in_range or (parent >= token).any() or not torch.equal(before, parent[path_index]):
        raise ValueError(
            "`tree_kv_index` holds paths that do not form a tree: on every path a token must follow the same tokens "
            "as on the path of its own segment, all at earlier places of the row."
        )
    return parent


def _check_segment_parents(tree: Mapping[str, torch.Tensor], cu_q: torch.Tensor, parent: torch.Tensor) -> None:
    """Raise a `ValueError` if the parents or depths of the segments (trl#7686) do not match their paths."""
    parents, depths = tree.get("tree_segment_parents"), tree.get("tree_segment_depths")
    if parents is not None:
        # The last entry is for the parent -1 of a root.
        last_token = torch.cat([cu_q[1:] - 1, torch.tensor([-1])])
        token_before = parent[cu_q[:-1]]
        in_range = parents.shape == token_before.shape and bool(((parents >= -1) & (parents < len(parents))).all())
        if not in_range or not torch.equal(last_token[parents], token_before):
            raise ValueError(
                f"`tree_segment_parents` is {parents.tolist()[:9]}, but the paths of `tree_kv_index` come from "
                "other segments: the two describe different trees."
            )
        if depths is not None and not torch.equal(depths, torch.where(parents < 0, 0, depths[parents] + 1)):
            raise ValueError(f"`tree_segment_depths` is {depths.tolist()[:9]}, which does not count the parents.")
