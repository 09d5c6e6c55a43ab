"""Draw the picture of `trl-padfix stats`: lengths, a batch in three layouts, and the prefix tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .stats import Lengths, PrefixTree, prefix_tree


if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

__all__ = ["draw_tree", "plot"]


def plot(lengths: Lengths, path: str | Path, *, batch_size: int = 8, seed: int = 0) -> None:
    """
    Draw the lengths of a dataset, one random batch three times (padded, packed, and with each prompt once), and the
    prefix tree of all rows.

    Each picture of the batch is as wide as its padded rows, so heights are proportional to tokens.

    Args:
        lengths ([`Lengths`]):
            Tokens of the rows.
        path (`str` or `Path`):
            File to write.
        batch_size (`int`, *optional*, defaults to `8`):
            Rows of the batch.
        seed (`int`, *optional*, defaults to `0`):
            Seed that chooses the batch.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows = np.random.default_rng(seed).permutation(len(lengths))[:batch_size]
    sequences = _sequences(lengths, rows)
    width = max(map(len, sequences))
    padded = np.array([np.pad(s, (0, width - len(s)), constant_values=_PADDING) for s in sequences])
    drawn = {"padded": padded, "packed": _wrapped(np.concatenate(sequences), width)}
    if "prompt" in lengths.columns:
        per_row = lengths.sequences.shape[1]  # sequences of a row, next to each other: the first one keeps the prompt
        once = [s if i % per_row == 0 else s[s != _PROMPT] for i, s in enumerate(sequences)]
        drawn["each prompt once"] = _wrapped(np.concatenate(once), width)

    figure = Figure(figsize=(13, 9.6), layout="constrained")
    histograms, picture, tree = np.ravel(figure.subfigures(3, 1, height_ratios=(1, 1.2, 1.2)))
    columns = lengths.columns
    for axes, (name, tokens) in zip(
        histograms.subplots(1, len(columns), squeeze=False)[0], columns.items(), strict=True
    ):
        axes.hist(tokens.ravel(), bins=50, color=_COLORS[_KINDS[name]])
        axes.set(title=f"{name}: {tokens.mean():.0f} tokens, at most {tokens.max()}", xlabel="tokens", ylabel="rows")
    colors = ListedColormap(_COLORS)
    for axes, (name, image) in zip(picture.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        axes.imshow(image, cmap=colors, vmin=0, vmax=len(_COLORS) - 1, aspect="auto", interpolation="nearest")
        axes.set(title=f"{name}: {int((image > 0).sum()):,} tokens", xlabel="tokens", yticks=[])
        axes.set_ylim(len(padded) - 0.5, -0.5)
    _explain(picture, {"padding": _COLORS[_PADDING]} | {name: _COLORS[_KINDS[name]] for name in columns})
    draw_tree(tree, prefix_tree(lengths))
    figure.savefig(path, dpi=120)


def draw_tree(figure: FigureBase, tree: PrefixTree) -> None:
    """Draw for each depth the number of rows that reach it, and of those that share all tokens up to it."""
    depth = np.arange(int(tree.lengths.max()) + 1)
    reach, sharing = ((tokens > depth[:, None]).sum(1) for tokens in (tree.lengths, tree.shared))
    axes = figure.subplots()
    axes.fill_between(depth, reach, step="post", color=_COLORS[_PROMPT], linewidth=0)
    axes.fill_between(depth, sharing, step="post", color=_COLORS[_PADDING], linewidth=0)
    saved = tree.shared.sum() / max(tree.lengths.sum(), 1)
    axes.set(
        title=f"prefix tree: of {len(tree.lengths):,} rows together {saved:.0%} of the tokens are computed already",
        xlabel="depth in tokens", ylabel="rows", xlim=(0, len(depth)), ylim=(0, None),
    )  # fmt: skip
    gray = "rows that begin with the same tokens as another one, up to this depth"
    _explain(figure, {gray: _COLORS[_PADDING], "rows with tokens of their own at this depth": _COLORS[_PROMPT]})


def _explain(figure: FigureBase, colors: dict[str, str]) -> None:
    """Draw a legend below a part of the picture."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, edgecolor="gray", label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


_COLORS = ["white", "lightgrey", "tab:blue", "tab:green", "tab:red"]
_PADDING, _PROMPT = 1, 2
_KINDS = {"prompt": _PROMPT, "chosen": 3, "rejected": 4, "completion": 3, "text": 3}


def _sequences(lengths: Lengths, rows: np.ndarray) -> list[np.ndarray]:
    """
    The kinds of the tokens of a batch, an array for each sequence, truncated at the end.

    Sequences of a row are neighbors: a pair with 2 prompt tokens, 1 chosen and 2 rejected ones gives [2, 2, 3] and
    [2, 2, 4, 4].
    """
    prompts = lengths.columns.get("prompt", np.zeros(len(lengths), dtype=np.int64))
    sides = [(_KINDS[name], side) for name, part in lengths.columns.items() if name != "prompt"
             for side in (part.T if part.ndim > 1 else [part])]  # fmt: skip
    kinds = [np.repeat([_PROMPT, kind], [prompts[row], side[row]]) for row in rows for kind, side in sides]
    return [sequence[: lengths.max_length] for sequence in kinds]


def _wrapped(tokens: np.ndarray, width: int) -> np.ndarray:
    """A packed row in lines of `width` tokens; zeros fill the last line."""
    return np.pad(tokens, (0, -len(tokens) % width)).reshape(-1, width)
