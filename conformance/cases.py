"""
The cases: what a stack has to compute right, and why one knows that it can be wrong.

Each is compared with the arbiter: every row by itself. Each names the leak (`leaks.py`) that must fail it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from conformance.adapter import Adapter, NotRun
from conformance.arbiter import IGNORED, Difference, Pair, Row, Step, alone, difference, preferences
from conformance.families import IMAGE, WITHOUT, build


def rows(*lengths: int, begin: list[int] | None = None) -> list[Row]:
    """Rows of random tokens that no other row has; with `begin`, after the same tokens."""
    draw, free = random.Random(len(lengths)), [*range(4, IMAGE)]
    draw.shuffle(free)
    made, begin = [], begin or []
    for length in lengths:
        own, free = free[: length - len(begin)], free[length - len(begin) :]
        made.append(Row.of(begin + own))
    return made


TYPES = "mm_token_type_ids"  # where a row of Qwen2.5-VL has its image
UNEVEN = rows(9, 14, 3, 12, 6)
PAIRS = [
    Pair([*range(4, 12)], [20, 21, 22, 23, 2], [24, 25, 2]),
    Pair([*range(40, 43)], [44, 2], [*range(50, 60), 2]),
    Pair([60], [*range(61, 66), 2], [66, 67, 68, 2]),
]


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    check: Callable[[Case, Adapter, str], list[Difference]]
    leak: str
    """The planted fault that must fail it."""
    family: str | None = None
    """The family that has the mechanism; a case without one is run on every family that is asked for."""
    rows: list[Row] = field(default_factory=lambda: UNEVEN)
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config."""

    def run(self, adapter: Adapter, family: str) -> list[Difference]:
        """Differences from the arbiter, one for each comparison."""
        return self.check(self, adapter, self.family or family)

    def model(self, adapter: Adapter, family: str, seed: int = 0) -> PreTrainedModel:
        attention = adapter.attention
        if attention in WITHOUT.get(family, ()):
            if family != "mamba2":
                raise NotRun(f"transformers has no {attention} for this model (soft caps, sinks).")
            attention = None
        return build(family, attention, seed, **self.changes)


def each_row_alone(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """The step on all rows."""
    model = case.model(adapter, family)
    exact = alone(model, case.rows)
    return [difference(model, adapter.step(model, [case.rows]), exact)]


def balanced(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """The step on all rows, with the load-balancing loss. A loss without it is no leak, and not judged."""
    model = case.model(adapter, family)
    # Before the step, because a trainer may leave a forward on the model that copies of the model would call.
    exact, without = (alone(model, case.rows, balances=balances) for balances in (True, False))
    step = adapter.step(model, [case.rows])
    found = difference(model, step, exact)
    if found.leaks and not difference(model, step, without).leaks:
        raise NotRun("Its loss has no load-balancing term: add `router_aux_loss_coef` times that of all tokens.")
    return [found]


def neighbors_are_edited(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """Only one row has labels. An edit of others does not move its loss; their tokens have no gradient at all."""
    found = []
    for i in (1, 2):
        losses = []
        for edit in (0, 1):
            model = case.model(adapter, family)
            if getattr(model.config, "output_router_logits", False):
                raise NotRun("A load-balancing loss is that of all rows.")
            batch = [row if n == i else _edited(row, edit).unlabelled() for n, row in enumerate(case.rows)]
            exact = alone(model, [case.rows[i]])
            step = adapter.step(model, [batch])
            losses.append(step.loss)
            off = difference(model, step, exact)
            found.append(gradient_of_others(off, model, step, exact, case.rows[i]))
        found.append(off._replace(loss=abs(losses[0] - losses[1]), gradient=0.0))
    return found


NOTHING = 1e-300  # not zero, by which one cannot divide


def gradient_of_others(off: Difference, model: PreTrainedModel, step: Step, exact: Step, row: Row) -> Difference:
    """The gradient of embeddings that a row alone does not read: exactly zero, so nothing is allowed."""
    (name,) = (n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    own = exact.gradients[name].any(-1)  # CPM-Ant begins each row with tokens of its own
    own[row.ids] = True
    foreign = step.gradients[name][~own]
    return off._replace(gradient=float(foreign.norm()), allowed=(off.allowed[0], NOTHING))


def _edited(row: Row, edit: int) -> Row:
    return row if not edit else replace(row, ids=[token ^ 1 for token in row.ids])


def first_labels_have_no_prediction(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """Every token is its own label, also the first of each row."""
    model = case.model(adapter, family)
    labelled = [replace(row, labels=row.ids) for row in case.rows]
    exact = alone(model, case.rows)
    return [difference(model, adapter.step(model, [labelled]), exact)]


def shapes(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """One row, many, equal ones, a very long one among short ones."""
    batches = rows(11), rows(*[3, 5, 4, 7, 2, 6] * 3), rows(8, 8, 8, 8), rows(50, 3, 4, 2)
    return [found for batch in batches for found in each_row_alone(replace(case, rows=batch), adapter, family)]


def without_labels(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """A row of one token, which predicts nothing, and a row whose labels are all ignored."""
    batches = rows(7, 1, 9), [row.unlabelled() if n == 1 else row for n, row in enumerate(rows(6, 10, 5))]
    return [found for batch in batches for found in each_row_alone(replace(case, rows=batch), adapter, family)]


def accumulated(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """Micro-batches with very different numbers of labels give the mean over all labels, as one batch does."""
    model = case.model(adapter, family)
    exact = alone(model, case.rows)
    return [difference(model, adapter.step(model, [case.rows[:2], case.rows[2:4]]), exact)]


def evaluated(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    """One evaluation batch of all rows: dropout is off, and the loss is the mean over the labels."""
    model = case.model(adapter, family)
    exact = alone(model, case.rows)
    return [difference(model, Step(adapter.evaluate(model, case.rows), exact.gradients), exact)]


def _padded(case: Case, adapter: Adapter, family: str, left: Callable[[int], int], hole: bool = False) -> Difference:
    """Compare the padded batch in which row `n` has `left(spare columns)` of padding before it."""
    model, batch = case.model(adapter, family), case.rows
    width = max(len(row.ids) for row in batch) + 2 * hole
    ids, mask, labels = torch.zeros(3, len(batch), width, dtype=torch.long)
    labels.fill_(IGNORED)
    for n, row in enumerate(batch):
        begin = left(width - len(row.ids) - 2 * hole)
        where = torch.arange(begin, begin + len(row.ids))
        where[len(row.ids) // 2 :] += 2 * hole
        ids[n, where], labels[n, where], mask[n, where] = torch.tensor(row.ids), torch.tensor(row.labels), 1
        if hole:  # the label behind a hole would be predicted from a token of padding
            labels[n, where[len(row.ids) // 2]] = IGNORED
    if hole:
        real = [mask[n].nonzero()[[0, -1], 0] for n in range(len(batch))]
        batch = [
            Row(
                ids[n, a : b + 1].tolist(),
                labels[n, a : b + 1].tolist(),
                {"attention_mask": mask[n : n + 1, a : b + 1]},
            )
            for n, (a, b) in enumerate(real)
        ]
    more = [row.more for row in case.rows if row.more]
    images = {name: torch.cat([m[name] for m in more]) for name in (more[0] if more else ()) if name != TYPES}
    if more:
        images[TYPES] = (ids == IMAGE).int()
    exact = alone(model, batch)
    return difference(model, adapter.padded_step(model, ids, mask, labels=labels, **images), exact)


def padded_left(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    return [_padded(case, adapter, family, lambda spare: spare)]


def padded_right(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    return [_padded(case, adapter, family, lambda spare: 0)]


def padded_on_both_sides(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    return [_padded(case, adapter, family, lambda spare: spare // 2)]


def with_holes(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    return [_padded(case, adapter, family, lambda spare: 0, hole=True)]


def pairs(case: Case, adapter: Adapter, family: str) -> list[Difference]:
    model, reference = case.model(adapter, family), case.model(adapter, family, seed=1).eval()
    exact = preferences(model, reference, PAIRS, beta=0.1)
    return [difference(model, adapter.preference_step(model, reference, PAIRS, beta=0.1), exact)]


def _with_images() -> list[Row]:
    """Rows with an image of 2 x 2, and of 2 x 4 merged patches; positions of the text behind depend on their sizes."""
    made = []
    for n, (height, width) in enumerate([(4, 4), (4, 8)]):
        ids = [92] + [IMAGE] * (height * width // 4) + [93, *range(10 + 20 * n, 17 + 20 * n)]
        pixels = torch.randn(height * width, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(n))
        images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
        images[TYPES] = torch.tensor([[int(token == IMAGE) for token in ids]])
        made.append(replace(Row.of(ids), more=images))
    return made


_RESTART = "positions that run on"
CASES = [
    Case("neighbors", "An edit of a row moves no other row, and no other row's tokens have a gradient: exactly zero.",
         neighbors_are_edited, "no borders"),
    Case("row alone", "Loss and gradients are those of the rows one by one.", each_row_alone, "no borders"),
    Case("first label", "Nothing predicts the first token of a row: not the last token of the row before.",
         first_labels_have_no_prediction, "labels at borders"),
    Case("shapes", "One row, many, equal ones, very uneven ones.", shapes, "no borders"),
    Case("rows without labels", "A row of one token, and one whose labels are all ignored.", without_labels,
         "no borders"),
    Case("shared prefix", "Rows begin with the same tokens: each has its own next token, its share of the gradient.",
         each_row_alone, "wrong fork", rows=rows(12, 9, 14, 7, begin=[5, 6, 7, 8, 4])),
    Case("accumulation", "The mean over accumulated micro-batches is that over all labels.", accumulated,
         "mean of means", rows=rows(14, 12, 3, 2)),
    Case("evaluation", "More than one row in a batch, and no dropout.", evaluated, "dropout",
         changes=dict(attention_dropout=0.5)),
    Case("absolute positions", "They restart at each row.", each_row_alone, _RESTART, "gpt2"),
    Case("dynamic RoPE", "Frequencies depend on the length of the row, not on that of a neighbor.",
         each_row_alone, _RESTART, "llama"),
    Case("long RoPE", "The same: short rows have the short factors.", each_row_alone, _RESTART, "phi3"),
    Case("M-RoPE (images)", "Positions behind an image depend on its size, and restart.", padded_right,
         "no image positions", "qwen2_5_vl", rows=_with_images()),
    Case("sliding window", "A packed mask keeps the window.", each_row_alone, "no window", "mistral"),
    Case("chunks", "Chunks of attention are counted from the row's begin.", each_row_alone, _RESTART, "llama4_text"),
    Case("sinks", "A sink takes its share in each row.", each_row_alone, "no borders", "gpt_oss"),
    Case("soft cap", "Scores are capped, windows kept.", each_row_alone, "no window", "gemma2"),
    Case("delta net", "The state and the convolution begin anew in each row (Qwen3-Next).", each_row_alone,
         "state runs on", "qwen3_next"),
    Case("delta net (Qwen3.5)", "The same.", each_row_alone, "state runs on", "qwen3_5_text"),
    Case("Mamba 2", "The same for a state-space scan.", each_row_alone, "state runs on", "mamba2"),
    Case("short convolution", "The same for the left context of a convolution (LFM2).", each_row_alone,
         "state runs on", "lfm2"),
    Case("experts' balance", "The load-balancing loss counts each token, and no padding.", balanced,
         "padding is routed", "qwen3_moe"),
    Case("padded left", "Positions and attention begin at the first real token.", padded_left, "no mask", "gpt2"),
    Case("padded right", "Padding has no part in the loss.", padded_right, "padding has labels", "gpt2"),
    Case("padded on both sides", "As reinforcement learning pads: prompts left, completions right.",
         padded_on_both_sides, "no mask", "gpt2"),
    Case("holes", "Nothing attends to a masked token in a row. Positions count it, as in the model alone.", with_holes,
         "no mask", "qwen3"),
    Case("pairs", "DPO: the loss of each pair is that of its answers alone.", pairs, "prompts are cut", "qwen3"),
    Case("pairs (absolute positions)", "The same where positions are absolute.", pairs, "prompts are cut", "gpt2"),
]  # fmt: skip
