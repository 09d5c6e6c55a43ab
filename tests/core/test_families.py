"""
Every causal-LM type of transformers, packed: exact, or refused with the reason, and never wrong.

`tests/core/families.json` is the record, `docs/families.md` has the table made from it.
`python tests/core/test_families.py --write` computes both again; without it they are compared. `pytest -m families`
computes every family again.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers


sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo.families import families
from zoo.family_outcomes import LEAK, MODES, TOLERANCE, family_outcomes
from zoo.family_tables import general, parts, write

from trl_padfix.core.mixers.mixers import FORKED, PACKED, ROWS


WAYS = (PACKED, FORKED, ROWS)
RECORD = Path(__file__).with_name("families.json")

INTRODUCTION = """\
# Families

<!-- Made by `python tests/core/test_families.py --write` and `test_vision_families.py --write`; do not edit. -->

We ran the causal language model types of transformers 5.24 as tiny random models in float32, with every kind of layer.
Rows are longer than every window, share prefixes, and are padded on both sides. "Exact": log-probabilities, gradients
(relative), router logits and auxiliary loss are within 1e-4 of each row computed alone. Lists are grouped by
[mode](attention.md#how-layers-other-than-attention-run). Encoders such as `roberta` ran as decoders;
`bert, is_decoder=False` is the encoder.

In rare cases, modules of transformers depend on the batch. Indexers (DeepSeek V3.2 and V4, `glm_moe_dsa`, `axk2`,
`hy_v4`) select keys by `topk`, and torch does not define which of two equal scores it takes. `xlstm` depends on the
batch on some CPUs. With the `rope_type` `dynamic` or `longrope`, rows equal [their padded
batch](numbers.md#what-exact-means).
"""

pytestmark = pytest.mark.skipif(
    transformers.__version__ != "5.24.0", reason="the record is that of transformers 5.24.0"
)


@pytest.fixture(autouse=True)
def _only_when_asked_for(request: pytest.FixtureRequest) -> None:
    if "families" in request.keywords and "families" not in request.config.option.markexpr:
        pytest.skip("select it with `-m families`")


def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def verdict(outcomes: dict[str, Any]) -> Any:
    """What must not change unnoticed: outcomes and reasons, not figures, which depend on the machine."""
    if "not_built" in outcomes:
        return "not built"
    verdicts = {mode: (outcomes[mode]["outcome"], outcomes[mode].get("reason")) for mode in MODES}
    return verdicts | {"mixers": outcomes.get("mixers")}


def table(recorded: dict[str, Any]) -> str:
    """The support table, in Markdown."""
    counts = {mode: Counter(o.get(mode, {}).get("outcome", "not built") for o in recorded.values()) for mode in MODES}
    assert not any(count["wrong"] for count in counts.values()), "a wrong family cannot be documented"
    free, shared = (
        f"{count['exact']} are exact, {count['refused']} refused, {count['not built']} not built"
        for count in counts.values()
    )
    figures = [f for o in recorded.values() for m in MODES for f in map(o.get(m, {}).get, ("logps", "gradients")) if f]
    largest = f"The largest difference is {max(figures):.0e}."
    lines = [*INTRODUCTION.splitlines(), ""]
    lines += [f"Without `prefix_sharing` {free}; with it {'the same' if shared == free else shared}. {largest}", ""]
    groups: dict[str, list[str]] = {}
    for family, outcomes in recorded.items():
        groups.setdefault(_group(outcomes), []).append(family)
    for group in sorted(groups, key=lambda group: (not group.startswith("Exact"), -len(groups[group]))):
        lines += [f"**{group}** ({len(groups[group])}): {', '.join(f'`{family}`' for family in groups[group])}", ""]
    return "\n".join(lines[:-1]) + "\n"


def _group(outcomes: dict[str, Any]) -> str:
    """What is said of a type, once for all types of which it is true."""
    if "not_built" in outcomes:
        return "Not built as a tiny model"
    free, shared = (outcomes[mode].get("reason") for mode in MODES)
    if free:
        return f"Refused. {general(free)}"
    ran = ", ".join(way for way in WAYS if way in outcomes.get("mixers", {}))
    return f"Exact, {ran}" + (f"; `prefix_sharing` refused: {general(shared)}" if shared else "")


def test_the_record_has_every_family_and_none_is_wrong():
    recorded = record()
    assert list(recorded) == families()
    for family, outcomes in recorded.items():
        for mode in MODES:
            assert outcomes.get(mode, {}).get("outcome") != "wrong", family


def test_the_table_is_that_of_the_record():
    assert parts()[0] == table(record())


@pytest.mark.families
@pytest.mark.parametrize("family", families())
def test_a_family_is_exact_or_refused_as_recorded(family):
    outcomes, recorded = family_outcomes(family), record()[family]
    if "not_built" not in recorded:  # what is not built here may be where more packages are installed (timm)
        assert verdict(outcomes) == verdict(recorded)
    for mode in MODES:
        outcome = outcomes.get(mode, {})
        assert outcome.get("outcome") != "wrong", outcome
        if outcome.get("outcome") == "exact":
            figures = {name: value for name, value in outcome.items() if name not in ("outcome", "leak")}
            assert all(value <= TOLERANCE for value in figures.values()), figures
            assert outcome["leak"] >= LEAK, "a leak between rows would not have been seen"


if __name__ == "__main__":  # arguments: "--write", then types of models
    write(RECORD, 0, families(), family_outcomes, table)
