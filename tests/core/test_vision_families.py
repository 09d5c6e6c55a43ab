"""
Every image-text-to-text type of transformers, packed: exact, or refused with the reason, and never wrong.

`tests/core/vision_families.json` is the record, `docs/vision_families.md` the table made from it.
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
from zoo.family_tables import escaped, general, write
from zoo.vision_families import vision_families
from zoo.vision_outcomes import KINDS, vision_outcomes


RECORD = Path(__file__).with_name("vision_families.json")
TABLE = Path(__file__).parents[2] / "docs" / "vision_families.md"
NAMED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "internvl", "smolvlm", "idefics3"}

INTRODUCTION = """\
# Vision-language families

Which image-text-to-text types of transformers 5.23 `remove_padding` computes **exactly**, on batches with images and
on batches of text, and which it **refuses** with the reason. Each was tested as a tiny random model in float32, on
rows with one image, two or none, some with the same ids and another image, padded on the left and on the right.
"Exact" means that log-probabilities and gradients (relative; those of the vision tower too) are within 1e-4 of each
row computed alone.

*Exact as padded*: the model's own padded batch is not what its rows are alone (it numbers images through the batch, or
rounds differently by more than 1e-4), and packed is within 1e-4 of that padded batch.

*Not run*: images were not given to a model of this type, or it needs more inputs; the reason stands below the table.
Rules and parity check apply to it as to the others.

Made by `python tests/core/test_vision_families.py --write` from `tests/core/vision_families.json`; do not edit."""

pytestmark = pytest.mark.skipif(
    transformers.__version__ != "5.23.0", reason="the record is that of transformers 5.23.0"
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
    lines = [*INTRODUCTION.splitlines(), "", "| type | with images | shared | text alone | shared | difference |"]
    lines.append("|---|---|---|---|---|---|")
    reasons: dict[str, int] = {}
    for family, outcomes in recorded.items():
        if "not_built" in outcomes:
            lines.append(f"| `{family}` | not built: {escaped(outcomes['not_built'])} | | | | |")
            continue
        cells, figures = [], []
        for kind in KINDS:
            for mode in MODES:
                outcome = outcomes[kind].get(mode)
                reason = outcome and outcome.get("reason")
                number = reasons.setdefault(general(reason), len(reasons) + 1) if reason else None
                exact = "exact as padded" if outcome and "own_padding" in outcome else "exact"
                cells.append("not run" if outcome is None else f"refused ({number})" if reason else exact)
                figures += [outcome[name] for name in ("logps", "gradients") if outcome and name in outcome]
        largest = f"{max(figures):.0e}" if figures else ""
        lines.append(f"| `{family}` | {' | '.join(cells)} | {largest} |")
    lines += ["", "Reasons:", "", *(f"{number}. {reason}" for reason, number in reasons.items())]
    why = {f: o["images"]["not_run"] for f, o in recorded.items() if "not_run" in o.get("images", {})}
    lines += ["", "Not run with images:", "", *(f"- `{family}`: {reason}" for family, reason in why.items())]
    return "\n".join(lines) + "\n"


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
    assert TABLE.read_text() == table(record())


FAST = {"gemma4", "paligemma", "lfm2_vl"}


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
    write(RECORD, TABLE, vision_families(), vision_outcomes, table)
