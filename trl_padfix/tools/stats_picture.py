"""The picture of `trl-padfix stats`: lengths, and a batch padded, packed and with each prompt once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .stats import Lengths


__all__ = ["plot"]


def plot(lengths: Lengths, path: str | Path, *, batch_size: int = 8, max_length: int | None = None, seed: int = 0):
    """
    Draw the lengths of a dataset, and one random batch three times: padded, packed, and with each prompt once.

    Each picture of the batch is as wide as its padded rows, so their heights are in proportion to their tokens.

    Args:
        lengths ([`Lengths`]):
            Of the rows.
        path (`str` or `Path`):
            PNG file to write.
        batch_size (`int`, *optional*, defaults to `8`):
            Rows of the batch.
        max_length (`int`, *optional*):
            Longest sequence.
        seed (`int`, *optional*, defaults to `0`):
            Which batch.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    rows = np.random.default_rng(seed).permutation(len(lengths))[:batch_size]
    pieces = _pieces(lengths, rows, max_length)
    width = max(sum(n for _, n in sequence) for sequence in pieces)
    padded = np.full((len(pieces), width), 1)
    for i, sequence in enumerate(pieces):
        tokens = np.repeat([kind for kind, _ in sequence], [n for _, n in sequence])
        padded[i, : len(tokens)] = tokens
    packed = padded[padded > 1]
    once = [[piece for piece in s if i % 2 == 0 or piece[0] != _PROMPT] for i, s in enumerate(pieces)]
    shared = np.concatenate([np.repeat([k for k, _ in s], [n for _, n in s]) for s in once])

    figure = Figure(figsize=(13, 6.4), layout="constrained")
    histograms, picture = np.ravel(figure.subfigures(2, 1, height_ratios=(1, 1.2)))
    for axes, (name, part) in zip(histograms.subplots(1, len(lengths.parts), squeeze=False)[0], lengths.parts.items(),
                                  strict=True):  # fmt: skip
        axes.hist(part, bins=50, color=_COLOURS[_KINDS[name]])
        axes.set(title=f"{name}: {part.mean():.0f} tokens, at most {part.max()}", xlabel="tokens", ylabel="rows")
    colours = ListedColormap(_COLOURS)
    drawn = {"padded": padded, "packed": _wrapped(packed, width)}
    if lengths.are_pairs:
        drawn["each prompt once"] = _wrapped(shared, width)
    for axes, (name, image) in zip(picture.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        axes.imshow(image, cmap=colours, vmin=0, vmax=len(_COLOURS) - 1, aspect="auto", interpolation="nearest")
        axes.set(title=f"{name}: {int((image > 0).sum()):,} tokens", xlabel="tokens", yticks=[])
        axes.set_ylim(len(padded) - 0.5, -0.5)
    figure.savefig(path, dpi=120)


_COLOURS = ["white", "lightgrey", "tab:blue", "tab:green", "tab:red"]
_PROMPT = 2
_KINDS = {"prompt": _PROMPT, "chosen": 3, "rejected": 4, "text": 3}


def _pieces(lengths: Lengths, rows: np.ndarray, max_length: int | None) -> list[list[tuple[int, int]]]:
    """Kind and tokens of the parts of each sequence of a batch, truncated at the end; pairs next to each other."""
    names = [["prompt", "chosen"], ["prompt", "rejected"]] if lengths.are_pairs else [["text"]]
    found = []
    for row in rows:
        for sequence in names:
            room, parts = max_length or np.iinfo(np.int64).max, []
            for name in sequence:
                tokens = min(room, int(lengths.parts[name][row]))
                parts.append((_KINDS[name], tokens))
                room -= tokens
            found.append(parts)
    return found


def _wrapped(tokens: np.ndarray, width: int) -> np.ndarray:
    """One row of tokens, as a picture of lines of `width`."""
    lines = np.zeros((-(-len(tokens) // width), width), dtype=int)
    lines.ravel()[: len(tokens)] = tokens
    return lines
