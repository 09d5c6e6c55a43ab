"""
Every image-text-to-text type of transformers, packed: exact, or refused with the reason, and never wrong.

`tests/core/vision_families.json` is the record, `docs/families.md` has the table made from it.
`python tests/core/test_vision_families.py --write` computes both again; without it they are compared.
`pytest -m families` computes every type again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers


sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo.family_outcomes import LEAK, MODES, TOLERANCE
from zoo.family_tables import WITH_IMAGES, general, parts, write
from zoo.vision_families import vision_families
from zoo.vision_outcomes import KINDS, vision_outcomes


RECORD = Path(__file__).with_name("vision_families.json")
NAMED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "internvl", "smolvlm", "idefics3"}

INTRODUCTION = f"""\
{WITH_IMAGES}
We ran the image-text-to-text types of transformers 5.24 on rows with two images, one, or none. Some rows have the same
ids and another image, and rows are padded left and right. "Exact" includes the gradients of the vision tower. *As
padded*: packed is within 1e-4 of the model's own padded batch, which differs from its rows alone. For a type that we
did not run, the refusals and the parity check of your run still apply."""

pytestmark = pytest.mark.skipif(
    transformers.__version__ != "5.24.0", reason="the record is that of transformers 5.24.0"
)


def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def verdict(outcomes: dict[str, Any]) -> Any:
    """What must not change unnoticed: outcomes and reasons, not figures, which depend on the machine."""
    if "not_built" in outcomes:
        return "not built"
    return {kind: {mode: outcomes[kind].get(mode, {}).get("outcome", "not run") for mode in MODES} for kind in KINDS}


def table(recorded: dict[str, Any]) -> str:
    """The support table, in Markdown."""
    lines, groups = [*INTRODUCTION.splitlines(), ""], {}
    for family, outcomes in recorded.items():
        groups.setdefault(_group(outcomes), []).append(family)
    for group in sorted(groups, key=lambda group: ("xact" not in group, -len(groups[group]))):
        lines += [f"**{group}** ({len(groups[group])}): {', '.join(f'`{family}`' for family in groups[group])}", ""]
    return "\n".join(lines[:-1]) + "\n"


def _group(outcomes: dict[str, Any]) -> str:
    """What is said of a type, once for all types of which it is true; both modes have the same outcome."""
    if "not_built" in outcomes:
        return "Not built as a tiny model"
    said = {}
    for kind in KINDS:
        found = [outcomes[kind].get(mode) for mode in MODES]
        words = {_word(outcome) for outcome in found}
        assert len(words) == 1, words
        (said[kind],) = words
    images, text = (said[kind] for kind in KINDS)
    return images if images == text else f"Images: {images[0].lower()}{images[1:]}. Text: {text[0].lower()}{text[1:]}"


def _word(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return "Not run"
    if reason := outcome.get("reason"):
        return f"Refused. {general(reason)}"
    return "Exact as padded" if "own_padding" in outcome else "Exact"


def test_the_record_has_every_type_and_none_is_wrong():
    recorded = record()
    assert list(recorded) == vision_families()
    for family, outcomes in recorded.items():
        assert "wrong" not in json.dumps(outcomes), family
        leaks = [o["leak"] for kind in KINDS for o in outcomes.get(kind, {}).values() if "leak" in o]
        assert all(leak > LEAK for leak in leaks), family
    exact = [f for f, o in recorded.items() if o.get("images", {}).get("padding_free", {}).get("outcome") == "exact"]
    assert set(exact) >= NAMED
    assert len(exact) >= 65


def test_the_table_is_that_of_the_record():
    assert parts()[1] == table(record())


FAST = {"paligemma", "lfm2_vl"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in FAST else pytest.mark.families) for f in vision_families()],
)
def test_a_type_is_exact_or_refused_as_recorded(family):
    outcomes, recorded = vision_outcomes(family), record()[family]
    if "not_built" not in recorded:  # what is not built here may be where more packages are installed (timm)
        assert verdict(outcomes) == verdict(recorded)
    for kind in KINDS:
        for mode in MODES:
            outcome = outcomes.get(kind, {}).get(mode, {})
            assert outcome.get("outcome") != "wrong", outcome
            assert all(outcome.get(name, 0) <= TOLERANCE for name in ("logps", "gradients"))


if __name__ == "__main__":  # arguments: "--write", then types of models
    write(RECORD, 1, vision_families(), vision_outcomes, table)
