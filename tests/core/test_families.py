"""
Every causal-LM type of transformers, packed: exact, or refused with the reason, and never wrong.

`tests/core/families.json` is the record, `docs/families.md` the table made from it.
`python tests/core/test_families.py --write` computes both again; without it they are compared. `pytest -m families`
computes every family again.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


sys.path.insert(0, str(Path(__file__).parents[1]))

from zoo.families import build, families
from zoo.family_outcomes import LEAK, MODES, TOLERANCE, family_outcomes, leaking_layouts
from zoo.family_tables import escaped, general, write

from trl_padfix.core.mixers.mixers import FORKED, PACKED, ROWS, WHOLE


WAYS = (PACKED, FORKED, ROWS, WHOLE)
RECORD = Path(__file__).with_name("families.json")
TABLE = Path(__file__).parents[2] / "docs" / "families.md"
EVIDENCE = TABLE.parent / "numbers.md"
REPRESENTATIVES = ["llama", "gpt2", "bart", "mistral", "gemma3_text", "deepseek_v3", "mixtral"]
REPRESENTATIVES += ["qwen3_5_text", "mamba2", "jamba", "lfm2", "bloom", "deepseek_v32", "nemotron_h"]

INTRODUCTION = """\
# Families

Which causal language model types of transformers 5.23 `remove_padding` computes **exactly**, and which it **refuses**
with the reason; some types are listed with a second setting that changes a layer. Each was tested as a tiny random
model in float32, with its default attention and the eager one, on rows of different lengths that are longer than
every window and chunk, padded on the left and on the right, with common prefixes. "Exact" means that log-probabilities
and gradients (relative) are within 1e-4 of each row computed alone; the table has the largest difference. For mixtures
of experts, router logits, the auxiliary loss and its gradients also equal the padded computation's.

*Own padding* is how far transformers' own padded computation is from the rows computed alone, on the worse side, in
nats; where it is large (learned positions, left padding), packing also repairs it. Router logits are compared where
the padded computation is right.

*Run* says how the modules run that mix tokens: on the *packed* row, *forked* (linear attention, state-space scans and
short convolutions, whose state forks where prefixes part) or on *rows* of their own; everything else is packed. A
decoder that is given *whole rows* shares nothing. Each type has every kind of layer that its configuration class
knows, but for cross-attention to images.

Two kinds of modules give a token other numbers in other batches **in transformers itself**, so no packed forward
equals both the padded batch and the rows alone:

- Indexers that select keys (DeepSeek V3.2 and V4, GLM's `glm_moe_dsa`, `axk2`, `hy_v4`, ...), where scores are equal
  to the bit: torch leaves open which of them `topk` takes, and it takes others where a row has other padding. Tiny
  random models often score zero; here `topk` takes the first.
- `xlstm`: one kernel computes the whole chunks of a row (`chunk_size`, 64), and another the tokens that are left, and
  the two differ. The output of a token depends on the length of its row: with rows that are prefixes of others
  log-probabilities differ by 4e-5 and gradients by up to 8e-3 (relative), between padded rows and rows alone by 8e-4.

Where the parity check fails on a model with such a module, its message says so.

Made by `python tests/core/test_families.py --write` from `tests/core/families.json`; do not edit."""

pytestmark = pytest.mark.skipif(
    transformers.__version__ != "5.23.0", reason="the record is that of transformers 5.23.0"
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
    lines = [*INTRODUCTION.splitlines(), "", "| | exact | refused | not built |", "|---|---|---|---|"]
    for mode, count in counts.items():
        assert not count["wrong"], "a wrong family cannot be documented"
        lines.append(f"| {mode.replace('_', ' ')} | {count['exact']} | {count['refused']} | {count['not built']} |")
    lines += [
        "",
        "| type | padding-free | prefix sharing | run | largest difference | own padding |",
        "|---|---|---|---|---|---|",
    ]
    reasons: dict[str, int] = {}
    for family, outcomes in recorded.items():
        lines.append(_line(family, outcomes, reasons))
    lines += ["", "Reasons:", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _line(family: str, outcomes: dict[str, Any], reasons: dict[str, int]) -> str:
    if "not_built" in outcomes:
        return f"| `{family}` | not built | not built | | | {escaped(outcomes['not_built'])} |"
    cells = []
    for mode in MODES:
        reason = outcomes[mode].get("reason")
        number = reasons.setdefault(general(reason), len(reasons) + 1) if reason else None
        cells.append(f"refused ({number})" if reason else outcomes[mode]["outcome"])
    figures = [f for mode in MODES for f in (outcomes[mode].get("logps"), outcomes[mode].get("gradients")) if f]
    own = outcomes["own_padding"].values()
    worst = max((v for v in own if isinstance(v, float)), default="")
    largest = f"{max(figures):.0e}" if figures else ""
    ran = ", ".join(way for way in WAYS if way in outcomes.get("mixers", {}))
    return f"| `{family}` | {cells[0]} | {cells[1]} | {ran} | {largest} | {worst:.0e} |"


def test_the_record_has_every_family_and_none_is_wrong():
    recorded = record()
    assert list(recorded) == families()
    for family, outcomes in recorded.items():
        for mode in MODES:
            assert outcomes.get(mode, {}).get("outcome") != "wrong", family


def test_enough_families_are_exact():
    types = {f: o for f, o in record().items() if "," not in f and "not_built" not in o}
    assert sum(o["padding_free"]["outcome"] == "exact" for o in types.values()) >= 180
    assert sum(o["prefix_sharing"]["outcome"] == "exact" for o in types.values()) >= 175


def test_the_table_is_that_of_the_record():
    assert TABLE.read_text() == table(record())


def test_the_page_of_evidence_has_the_counts_of_the_record():
    found, types = list(record().values()), [family for family in record() if "," not in family]
    line = next(line for line in EVIDENCE.read_text().splitlines() if "(families.md)" in line)
    assert f"({len(types)}, " in line
    assert f": {len(found)})" in line
    for outcome in ("exact", "refused"):
        counts = [sum(o.get(mode, {}).get("outcome") == outcome for o in found) for mode in MODES]
        assert [int(n) for n in re.findall(rf"(\d+) {outcome}", line)] == counts
    not_built = sum("not_built" in o for o in found)
    assert re.findall(r"(\d+) not built", line) == [str(not_built)] * 2


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


@pytest.mark.families
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_a_leaking_layout_is_found_wrong(family):
    with leaking_layouts():
        outcomes = family_outcomes(family)
    assert [outcomes[mode]["outcome"] for mode in MODES] == ["wrong", "wrong"]


def test_models_of_the_families_are_the_same_each_time():
    first, second = build("qwen2"), build("qwen2")
    for name, parameter in first.state_dict().items():
        assert torch.equal(parameter, second.state_dict()[name])


if __name__ == "__main__":  # arguments: "--write", then types of models
    write(RECORD, TABLE, families(), family_outcomes, table)
