"""
Draws the pictures of the site from what is committed: measured figures, shipped data, folders.

    python docs/make_pictures.py              # those that are not what their sources say now
    python docs/make_pictures.py --check      # 1 if there is one; draws nothing
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
GREY, BLUE, GREEN, ORANGE = "lightgrey", "tab:blue", "tab:green", "tab:orange"

MEASURED = {
    "1. DPO, bf16": ["dpo-hh-rlhf-4-pairs-smollm2-defaults-cpu"],
    "2. DPO": ["dpo-hh-rlhf-8-pairs-smollm2-cpu"],
    "3. SFT": ["sft-hh-rlhf-8-rows-smollm2-cpu"],
    "4. GRPO": ["grpo-8-completions-smollm2-cpu"],
    "5. DPO, nothing shared": ["dpo-equal-lengths-cpu"],
    "6. DPO, hybrid": ["dpo-hybrid-hh-rlhf-8-pairs-cpu"],
    "7. SFT, turns": ["sft-airline-32-rows-cpu"],
    "8. DPO, longer prompts": ["dpo-4096-512-cpu"],
}
"""Lines of the tables on the page on speed, and their files in `bench/`."""

STOREYS = {
    "cli": ("commands", {"app": "trl-padfix dpo, ...", "launch": "many processes"}),
    "tools": (
        "diagnosis, data, tiny models",
        {
            "doctor": "this machine",
            "stats": "your data",
            "tiny": "models to try",
        },
    ),
    "integrations": (
        "other stacks and trainers",
        {
            "callback": "any trainer",
            "axolotl": "a plug-in",
            "ms_swift": "a plug-in",
            "swift": "loaded by ms-swift",
            "llamafactory": "a plug-in",
            "verl": "a plug-in",
        },
    ),
    "experimental": ("TRL's experimental trainers", {"tasks": "one row for each trainer"}),
    "trainers": (
        "what TRL's trainers get",
        {
            "methods": "one file per trainer",
            "parts": "its features",
            "checks": "before a run",
            "data": "rows, collators",
            "batching": "token budgets",
            "metrics": "counts, means",
        },
    ),
    "core": (
        "padding removal on any model",
        {
            "layout": "where tokens lie",
            "call": "pack, unpack",
            "attention": "which kernel",
            "mixers": "other layers",
            "patches": "on the model",
            "parallel": "many GPUs",
            "model": "what it is",
            "parity": "packed = padded?",
        },
    ),
}
"""Packages from the top down; their folders, or modules that lie open: what each answers or holds."""


def speed_sources() -> dict[str, Any]:
    """Speed-ups by picture label and variant, from the measured files."""
    found = {}
    for label, names in MEASURED.items():
        variants = [v for name in names for v in json.loads((FOLDER / f"bench/{name}.json").read_text())["variants"]]
        found[label] = {v["name"]: v["speedup"] for v in variants}
        if "auto" in found[label]:  # of rollouts only `prefix_sharing="auto"` is measured
            found[label].setdefault("prefix_sharing", found[label]["auto"])
    return found


def draw_speed(figure: Any, sources: dict[str, Any]) -> None:
    axes, height, rows = figure.subplots(), 0.38, [*sources.items()]
    for offset, (variant, colour, label) in enumerate(
        [("padding_free", BLUE, "padding-free"), ("prefix_sharing", GREEN, "and prefix sharing")]
    ):
        shown = [
            (i - (0.5 - offset) * height, found[variant]) for i, (_, found) in enumerate(rows) if variant in found
        ]
        places, speeds = zip(*shown, strict=True)
        # From 1: equal ratios have equal lengths on the logarithmic axis.
        axes.barh(places, [speed - 1 for speed in speeds], height, left=1, color=colour, label=label)
        for place, speed in zip(places, speeds, strict=True):
            axes.text(max(speed, 1) * 1.04, place, f"{speed:.1f}x", va="center")
    axes.axvline(1, color="black", linewidth=1, label="TRL, padded")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1x", "2x", "4x", "8x", "16x", "32x"])
    axes.set(xlabel="speed of a step over TRL's, on a CPU (log scale)", xlim=(0.85, 52), ylim=(len(rows) - 0.4, -0.6))
    figure.legend(loc="outside upper center", ncols=3, frameon=False)


def tree_sources() -> dict[str, str]:
    """The shipped rollouts, and the task that is drawn."""
    rollouts = ROOT / "recipes/data/airline/rollouts.jsonl.gz"
    return {"task": "12", "rollouts": hashlib.sha256(rollouts.read_bytes()).hexdigest()}


def draw_tree(figure: Any, sources: dict[str, str]) -> None:
    import numpy as np
    from datasets import load_dataset
    from matplotlib.patches import Patch

    from trl_padfix import expand_turns
    from trl_padfix.tools.stats import measure
    from trl_padfix.tools.tiny import texts_of, train_tokenizer

    published = load_dataset("json", data_files=str(ROOT / "recipes/data/airline/rollouts.jsonl.gz"), split="train")
    task = published.filter(lambda row: row["task"] == int(sources["task"]))
    tokenizer = train_tokenizer(texts_of(task), vocab_size=2048)
    counted = measure(expand_turns(task), tokenizer)
    order, shared_tokens = counted.by_prefix
    lengths = counted.sequences[order, 0]
    cells = np.full((len(lengths), lengths.max()), np.nan)
    for row, (length, shared) in enumerate(zip(lengths, shared_tokens, strict=True)):
        cells[row, :length], cells[row, :shared] = 1, 0
    axes = figure.subplots()
    from matplotlib.colors import ListedColormap

    axes.imshow(cells, aspect="auto", interpolation="nearest", cmap=ListedColormap([GREY, BLUE]))
    axes.set(
        xlabel="tokens of a row, from its first one", ylabel="rows", yticks=[],
        title=f"{len(task)} rollouts of one task are {len(cells)} rows, one for each turn:\n"
        f"{lengths.sum():,} tokens, {lengths.sum() - shared_tokens.sum():,} computed",
    )  # fmt: skip
    handles = [Patch(color=BLUE, label="computed here"), Patch(color=GREY, label="computed in a row above")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def house_sources() -> dict[str, Any]:
    """The storeys, if their rooms are what is there: all folders of a package, and modules."""
    for storey, (_, rooms) in STOREYS.items():
        package = ROOT / "trl_padfix" / storey
        folders = {path.parent.name for path in package.glob("*/__init__.py")}
        assert folders <= set(rooms) <= folders | {path.stem for path in package.glob("*.py")}, storey
    return STOREYS


def draw_house(figure: Any, sources: dict[str, Any]) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(0, 100), ylim=(0, 20 * len(sources)))
    for floor, (storey, (words, rooms)) in enumerate(reversed(sources.items())):
        bottom = 20 * floor
        axes.add_patch(
            FancyBboxPatch((1, bottom + 1), 98, 17, boxstyle="round,pad=0.3", facecolor="0.95", edgecolor=BLUE)
        )
        axes.text(3, bottom + 13.5, storey, weight="bold", fontsize=12, va="center")
        axes.text(97, bottom + 13.5, words, style="italic", va="center", ha="right")
        wide = 94 / max(len(rooms), 1)
        for i, (room, holds) in enumerate(rooms.items()):
            axes.text(3 + (i + 0.5) * wide, bottom + 7.6, room, ha="center", va="center", color=BLUE)
            axes.text(3 + (i + 0.5) * wide, bottom + 3.8, holds, ha="center", va="center", fontsize=7)
    axes.annotate("", (0, 1), (0, 20 * len(sources) - 3), arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 2})
    axes.text(-1.2, 10 * len(sources), "imports", rotation=90, ha="right", va="center", color=ORANGE)


def learning_sources() -> dict[str, Any]:
    """The evaluations of each training of `benchmarks/learning.py`, by name."""
    trainings = json.loads((FOLDER / "bench/learning-hh-rlhf-cpu.json").read_text())["trainings"]
    return {training["name"]: training["evaluations"] for training in trainings}


def draw_learning(figure: Any, sources: dict[str, Any]) -> None:
    curves = {"eval_loss": "loss on held-out pairs", "eval_rewards/margins": "margin of the rewards"}
    styles = {
        "trl": {"color": GREY, "linewidth": 6, "label": "TRL"},
        "trl_padfix": {"color": BLUE, "linestyle": "--", "label": "trl_padfix, the same seed"},
        "another seed": {"color": ORANGE, "label": "trl_padfix, another seed"},
    }
    for axes, (key, label) in zip(figure.subplots(1, 2), curves.items(), strict=True):
        for name, evaluations in sources.items():
            axes.plot([e["step"] for e in evaluations], [e[key] for e in evaluations], **styles[name])
        axes.set(xlabel="optimizer steps", ylabel=label)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


PICTURES = {
    "speed.png": (speed_sources, draw_speed, (5.2, 4)),
    "tree.png": (tree_sources, draw_tree, (7.5, 4)),
    "learning.png": (learning_sources, draw_learning, (7.5, 3.6)),
    "house.png": (house_sources, draw_house, (7.5, 6)),
}


def made_of(name: str) -> str:
    """Hash of what a picture shows and of the code that draws it; it stands in the picture's file."""
    sources, draw, size = PICTURES[name]
    text = json.dumps([sources(), inspect.getsource(draw), size])
    return hashlib.sha256(text.encode()).hexdigest()


def stale() -> list[str]:
    """Pictures whose sources, or code, are not what they were drawn from."""
    paths = {name: FOLDER / "images" / name for name in PICTURES}
    return [
        name for name, path in paths.items() if not path.exists() or made_of(name).encode() not in path.read_bytes()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; 1 if a picture is not up to date")
    check, names = parser.parse_args().check, stale()
    if check and names:
        sys.exit(f"{', '.join(names)}: not what its sources say now. Run `python docs/make_pictures.py`.")
    for name in names:
        from matplotlib.figure import Figure

        sources, draw, size = PICTURES[name]
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, sources())
        figure.savefig(FOLDER / "images" / name, dpi=120, metadata={"Description": made_of(name)})


if __name__ == "__main__":
    main()
