"""
Every causal-LM and every image-text-to-text type of transformers, packed: exact, or refused with the reason.

`families.json` and `vision_families.json` beside this file are the records; `docs/families.md` has their tables.
`python tests/core/test_families.py --write` computes all again, and `--write TYPE ...` some of them.
`pytest -m families` compares every type with its record.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers


sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo.families import families
from zoo.family_outcomes import LEAK, MODES, TOLERANCE, family_outcomes
from zoo.vision_families import vision_families
from zoo.vision_outcomes import KINDS, vision_outcomes

from trl_padfix.core.mixers.mixers import DIRECT, FORKED, ROWS


PAGE = Path(__file__).parents[2] / "docs" / "families.md"
REFUSED = "Refused. "
TEXT = """\
# Families

<!-- Made by `python tests/core/test_families.py --write`; do not edit. -->

| models | how they run |
|---|---|
| Llama, Mistral, Mixtral, Qwen2, Qwen3, Phi-3, Gemma 3, OLMo 2, SmolLM3 | exact, *direct* |
| Gemma 2, gpt-oss | the same, but not with `sdpa` ([why](attention.md)) |
| Qwen3.5, Nemotron-H, LFM2, Jamba | exact, *direct* and *forked* |
| DeepSeek V3.2, Bloom, Falcon | exact, attention in *rows* mode (slower) |

`trl-padfix doctor --model ID` tells the type of your model (`model.config.model_type`) and how it runs. *Direct*,
*forked* and *rows* are [modes of layers](attention.md#how-layers-other-than-attention-run).

## All types

We ran the causal language model of each type of transformers 5.24, tiny and random, in float32. (BERT, BART or Whisper
means only their decoder, `is_decoder=True`: encoders raise an error.) Rows shared prefixes and were padded on both
sides. *Exact* means that log-probabilities, gradients (relative), router logits and auxiliary loss are within 1e-4 of
each row computed alone. Some depend on the batch even in transformers: `topk` breaks ties (DeepSeek V3.2
and V4, `glm_moe_dsa`, `axk2`, `hy_v4`), `xlstm` on some CPUs.
"""
IMAGES = """\
## Families with images

We ran these types on rows with two images, one, or none. *Exact* includes the gradients of the vision tower. *As
padded*: even the model's padded batch differs from its rows alone, and packed is within 1e-4 of the padded batch."""

pytestmark = pytest.mark.skipif(
    transformers.__version__ != "5.24.0", reason="the record is that of transformers 5.24.0"
)


# -- the records, and the page


def cells(outcomes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The outcomes of a type in each mode; with images of rows of each kind."""
    by_rows = {kind: outcomes[kind] for kind in KINDS if kind in outcomes} or {"rows": outcomes}
    return {f"{rows}, {mode}": found.get(mode, {}) for rows, found in by_rows.items() for mode in MODES}


def verdict(outcomes: dict[str, Any]) -> Any:
    """What must not change unnoticed: outcomes and reasons, not figures, which depend on the machine."""
    found = {name: (cell.get("outcome", "not run"), cell.get("reason")) for name, cell in cells(outcomes).items()}
    return found | {"mixers": outcomes.get("mixers")}


def general(reason: str) -> str:
    """A reason without the names of one model's layers, without its consequence and without its remedy."""
    reason = reason.removeprefix("Padding cannot be removed from ")
    reason = reason.partition(" Leave it padded:")[0].rstrip(".")
    reason = re.sub(r"^\w+: ", "", reason)
    reason = re.sub(r"layer `[\w.]+` \(\w+\)", "a layer", reason)
    reason = re.sub(r"^\w+ \(layer \d+\)", "A layer", reason)
    reason = re.sub(r"\(`\w+`, for", "(for", re.sub(r" \(`\w*Conv\w*`\)", "", reason))
    reason = re.sub(r" \(`config\.[^)]*\)", "", reason)
    reason = re.split(r", (?:and a|and only|so|which) |\. ", reason)[0]
    return f"{reason[0].upper()}{reason[1:]}."


def text_group(outcomes: dict[str, Any]) -> str:
    """What is said of a type, once for all types of which it is true."""
    free, shared = (outcomes[mode].get("reason") for mode in MODES)
    if free:
        return f"{REFUSED}{general(free)}"
    ran = ", ".join(way for way in (DIRECT, FORKED, ROWS) if way in outcomes.get("mixers", {}))
    return f"Exact, {ran}" + (f"; `prefix_sharing` refused: {general(shared)}" if shared else "")


def images_group(outcomes: dict[str, Any]) -> str:
    """The same of a type with images; both modes have the same outcome."""
    said = {}
    for kind in KINDS:
        (said[kind],) = {_word(outcomes[kind].get(mode)) for mode in MODES}
    images, text = (said[kind] for kind in KINDS)
    apart = f"Images: {images[0].lower()}{images[1:]}. Text: {text[0].lower()}{text[1:]}"
    return images if images == text else apart.rstrip(".").replace("refused. ", "refused: ")


def _word(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "Not run"
    if reason := outcome.get("reason"):
        return f"{REFUSED}{general(reason)}"
    return "Exact as padded" if "own_padding" in outcome else "Exact"


def counted(recorded: dict[str, Any]) -> str:
    """The introduction to families of text, and how many are exact."""
    counts = {mode: Counter(o.get(mode, {}).get("outcome", "not built") for o in recorded.values()) for mode in MODES}
    unbuilt = ", ".join(f"`{family}`" for family, outcomes in recorded.items() if "not_built" in outcomes)
    free, shared = (
        f"{count['exact']} are exact and {count['refused']} refused. Not compared: {unbuilt}"
        for count in counts.values()
    )
    found = [cell for outcomes in recorded.values() for cell in cells(outcomes).values()]
    figures = [cell.get(name, 0) for cell in found for name in ("logps", "gradients")]
    largest = f"The largest difference is {max(figures):.0e}."
    both = f"With and without `prefix_sharing`, {free}."
    both = both if shared == free else f"Without `prefix_sharing` {free}, with it {shared}."
    return f"{TEXT}\n{both} {largest}"


class Part(NamedTuple):
    """One part of the page: its types, how they are computed, and what is said of them."""

    record: Path
    types: Callable[[], list[str]]
    outcomes: Callable[[str], dict[str, Any]]
    introduction: Callable[[dict[str, Any]], str]
    group: Callable[[dict[str, Any]], str]

    def recorded(self) -> dict[str, Any]:
        return json.loads(self.record.read_text())

    def table(self) -> str:
        """The support table, in Markdown."""
        recorded = self.recorded()
        lines, groups = [self.introduction(recorded), ""], {}
        for family, outcomes in recorded.items():
            if "not_built" not in outcomes and (group := self.group(outcomes)) != "Not run":
                groups.setdefault(group, []).append(f"`{family}`")
        refused = {group: groups.pop(group) for group in [*groups] if group.startswith(REFUSED)}
        for group in sorted(groups, key=lambda group: ("xact" not in group, -len(groups[group]))):
            lines += [f"**{group}** ({len(groups[group])}): {', '.join(groups[group])}", ""]
        reasons = [f"- {', '.join(types)}: {group.removeprefix(REFUSED)}" for group, types in refused.items()]
        return "\n".join([*lines, f"**Refused** ({sum(map(len, refused.values()))}):", "", *sorted(reasons), ""])


PARTS = {
    "text": Part(Path(__file__).with_name("families.json"), families, family_outcomes, counted, text_group),
    "images": Part(
        Path(__file__).with_name("vision_families.json"),
        vision_families, vision_outcomes, lambda recorded: IMAGES, images_group,
    ),
}  # fmt: skip


def page() -> str:
    return "\n".join(part.table() for part in PARTS.values())


def write(only: list[str]) -> None:
    """Compute the records, or of them some types, and write the page."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(1)
    for part in PARTS.values():
        recorded = part.recorded() if only else {}
        for name in part.types():
            if not only or name in only:
                recorded[name] = part.outcomes(name)
                print(name, json.dumps(recorded[name]), flush=True)
        recorded = {name: recorded[name] for name in part.types() if name in recorded}
        part.record.write_text(json.dumps(recorded, indent=1) + "\n")
    PAGE.write_text(page())


# -- the tests


def assert_not_wrong(outcomes: dict[str, Any]) -> None:
    for cell in cells(outcomes).values():
        assert cell.get("outcome") != "wrong", cell
        figures = {name: value for name, value in cell.items() if isinstance(value, float)} | {"leak": 0.0}
        if cell.get("outcome") == "exact":
            assert all(value <= TOLERANCE for value in figures.values()), figures
        assert cell.get("leak", LEAK) >= LEAK, "a leak between rows would not have been seen"


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_record_has_every_type_and_none_is_wrong(part):
    recorded = part.recorded()
    assert list(recorded) == part.types()
    for outcomes in recorded.values():
        assert_not_wrong(outcomes)


def test_the_page_is_that_of_the_records():
    assert PAGE.read_text() == page()


def test_types_that_pages_name_are_exact_with_images():
    recorded = PARTS["images"].recorded()
    exact = [f for f, o in recorded.items() if o.get("images", {}).get("padding_free", {}).get("outcome") == "exact"]
    named = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "internvl", "smolvlm", "idefics3"}
    assert named <= set(exact)
    assert len(exact) >= 65


FAST = [("images", "paligemma"), ("images", "lfm2_vl")]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if (name, family) in FAST else pytest.mark.families)
        for name, part in PARTS.items()
        for family in part.types()
    ],
)
def test_a_type_is_exact_or_refused_as_recorded(name, family):
    outcomes, recorded = PARTS[name].outcomes(family), PARTS[name].recorded()[family]
    if "not_built" not in recorded:  # what is not built here may be where more packages are installed (timm)
        assert verdict(outcomes) == verdict(recorded)
    assert_not_wrong(outcomes)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write [TYPE ...]")
    write(sys.argv[2:])
