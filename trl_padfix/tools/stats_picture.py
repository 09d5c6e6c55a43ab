"""The picture of `trl-padfix stats`: lengths, a batch padded, packed and with each prompt once, the prefix tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .stats import Lengths
from .verdict import PrefixTree


__all__ = ["draw_tree", "plot"]


def plot(
    lengths: Lengths,
    path: str | Path,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    seed: int = 0,
    tree: PrefixTree | None = None,
) -> None:
    """
    Draw the lengths of a dataset, and one random batch three times: padded, packed, and with each prompt once.

    Each picture of the batch is as wide as its padded rows, so their heights are in proportion to their tokens. A
    `tree` is drawn below.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows = np.random.default_rng(seed).permutation(len(lengths))[:batch_size]
    sequences = _sequences(lengths, rows, max_length)
    width = max(map(len, sequences))
    padded = np.array([np.pad(s, (0, width - len(s)), constant_values=_PADDING) for s in sequences])
    drawn = {"padded": padded, "packed": _wrapped(np.concatenate(sequences), width)}
    if "prompt" in lengths.parts:
        of_row = lengths.sequences.shape[1]
        once = [s if i % of_row == 0 else s[s != _PROMPT] for i, s in enumerate(sequences)]
        drawn["each prompt once"] = _wrapped(np.concatenate(once), width)

    figure = Figure(figsize=(13, 6.4 if tree is None else 9.6), layout="constrained")
    heights = (1, 1.2) if tree is None else (1, 1.2, 1.2)
    histograms, picture, *below = np.ravel(figure.subfigures(len(heights), 1, height_ratios=heights))
    for axes, (name, part) in zip(histograms.subplots(1, len(lengths.parts), squeeze=False)[0], lengths.parts.items(),
                                  strict=True):  # fmt: skip
        axes.hist(part.ravel(), bins=50, color=_COLOURS[_KINDS[name]])
        axes.set(title=f"{name}: {part.mean():.0f} tokens, at most {part.max()}", xlabel="tokens", ylabel="rows")
    colours = ListedColormap(_COLOURS)
    for axes, (name, image) in zip(picture.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        axes.imshow(image, cmap=colours, vmin=0, vmax=len(_COLOURS) - 1, aspect="auto", interpolation="nearest")
        axes.set(title=f"{name}: {int((image > 0).sum()):,} tokens", xlabel="tokens", yticks=[])
        axes.set_ylim(len(padded) - 0.5, -0.5)
    parts = {"padding": _COLOURS[_PADDING]} | {name: _COLOURS[_KINDS[name]] for name in lengths.parts}
    _explain(picture, parts)
    if tree is not None:
        draw_tree(below[0], tree)
    figure.savefig(path, dpi=120)


def draw_tree(figure: Any, tree: PrefixTree) -> None:
    """Draw how many rows reach each depth, and how many of them have the same tokens up to there as another row."""
    depth = np.arange(int(tree.lengths.max()) + 1)
    reach, alike = ((tokens > depth[:, None]).sum(1) for tokens in (tree.lengths, tree.common))
    axes = figure.subplots()
    axes.fill_between(depth, reach, step="post", color=_COLOURS[_PROMPT], linewidth=0)
    axes.fill_between(depth, alike, step="post", color=_COLOURS[_PADDING], linewidth=0)
    saved = tree.common.sum() / max(tree.lengths.sum(), 1)
    axes.set(
        title=f"prefix tree: of {len(tree.lengths):,} rows together {saved:.0%} of the tokens are computed already",
        xlabel="depth in tokens", ylabel="rows", xlim=(0, len(depth)), ylim=(0, None),
    )  # fmt: skip
    grey = "rows that begin with the same tokens as another one, up to this depth"
    _explain(figure, {grey: _COLOURS[_PADDING], "rows with tokens of their own at this depth": _COLOURS[_PROMPT]})


def _explain(figure: Any, colours: dict[str, str]) -> None:
    """A legend below a part of the picture."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor="grey", label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


_COLOURS = ["white", "lightgrey", "tab:blue", "tab:green", "tab:red"]
_PADDING, _PROMPT = 1, 2
_KINDS = {"prompt": _PROMPT, "chosen": 3, "rejected": 4, "completion": 3, "text": 3}


def _sequences(lengths: Lengths, rows: np.ndarray, max_length: int | None) -> list[np.ndarray]:
    """The kind of each token of the sequences of a batch, truncated at the end; those of a row next to each other."""
    prompts = lengths.parts.get("prompt", np.zeros(len(lengths), dtype=np.int64))
    sides = [(_KINDS[name], side) for name, part in lengths.parts.items() if name != "prompt"
             for side in (part.T if part.ndim > 1 else [part])]  # fmt: skip
    return [np.repeat([_PROMPT, kind], [prompts[row], side[row]])[:max_length] for row in rows for kind, side in sides]


def _wrapped(tokens: np.ndarray, width: int) -> np.ndarray:
    """One row of tokens, as a picture of lines of `width`."""
    lines = np.zeros((-(-len(tokens) // width), width), dtype=int)
    lines.ravel()[: len(tokens)] = tokens
    return lines
