"""
Adapters that are wrong on purpose, one fault each: a case that they pass has no teeth.

`Packed` is right for attention: one row, an explicit mask, positions that restart. `Alone` is right for everything: it
computes the rows one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from conformance.adapter import Adapter, backward
from conformance.arbiter import IGNORED, Pair, Row, Step
from conformance.families import WINDOW


class Packed(Adapter):
    """All rows in one, with a dense mask; each argument plants a fault."""

    def __init__(self, name: str, *, borders=True, restart=True, labels=True, window=True, mask=True) -> None:
        self.name, self.borders, self.restart = name, borders, restart
        self.labels, self.window, self.mask = labels, window, mask

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        (batch,) = batches
        lengths = torch.tensor([len(row.ids) for row in batch])
        row = torch.repeat_interleave(torch.arange(len(batch)), lengths)
        place = torch.arange(len(row))
        position = torch.cat([torch.arange(n) for n in lengths]) if self.restart else place
        labels = torch.tensor([label for row in batch for label in row.labels])
        if self.labels:
            labels[lengths.cumsum(0)[:-1]] = IGNORED
        sees = (place[:, None] >= place) & ((row[:, None] == row) | (not self.borders))
        config = model.config
        if self.window and getattr(config, "sliding_window", None):
            sees &= place[:, None] - place < WINDOW
        if getattr(config, "attention_chunk_size", None):
            sees &= position[:, None] // WINDOW == position // WINDOW
        more = {"attention_mask": torch.where(sees, 0.0, -1e30)[None, None]} if self.mask else {}
        ids = torch.tensor([[token for row in batch for token in row.ids]])
        output = model(input_ids=ids, position_ids=position[None], use_cache=False, **more)
        return backward(model, torch.nn.functional.cross_entropy(output.logits[0, :-1], labels[1:]))


class Alone(Adapter):
    """The rows one by one, after `spoil` has changed the micro-batches or the model."""

    def __init__(
        self, name: str, spoil: Callable[[list[list[Row]]], list[list[Row]]] = lambda batches: batches
    ) -> None:
        self.name, self.spoil = name, spoil

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        batches = self.spoil(batches)
        return backward(model, self.loss(model, [row for batch in batches for row in batch]))

    def loss(self, model: PreTrainedModel, rows: list[Row]) -> torch.Tensor:
        total = 0.0
        for row in rows:
            logits = model(input_ids=torch.tensor([row.ids]), use_cache=False, **row.more).logits[0, :-1]
            labels = torch.tensor(row.labels[1:], dtype=torch.long)
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return total / sum(row.targets() for row in rows)

    def evaluate(self, model: PreTrainedModel, rows: list[Row]) -> float:
        with torch.no_grad():
            return float(self.loss(model, rows))  # in training mode: with dropout


class MeanOfMeans(Alone):
    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        return backward(model, sum(self.loss(model, batch) for batch in batches) / len(batches))


class PaddingIsRouted(Adapter):
    """Pads on the right without a mask: attention does not see it, the experts do."""

    name = "padding is routed"

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        (batch,) = batches
        width = max(len(row.ids) for row in batch)
        ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch])
        labels = torch.tensor([row.labels + [IGNORED] * (width - len(row.ids)) for row in batch])
        return backward(model, model(input_ids=ids, labels=labels, use_cache=False).loss)


class WrongPadding(Adapter):
    """A padded batch without its mask, or with labels for its padding, or without the positions of its images."""

    def __init__(self, name: str) -> None:
        self.name = name

    def padded_step(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor) -> Step:
        more |= {"attention_mask": mask, "labels": more["labels"].clone()}
        if self.name == "no mask":
            del more["attention_mask"]
        elif self.name == "padding has labels":
            more["labels"][mask == 0] = 0
        else:
            more["position_ids"] = torch.arange(ids.shape[1]).expand(3, *ids.shape)
        return backward(model, model(input_ids=ids, use_cache=False, **more).loss)


class PromptsAreCut(Adapter):
    """DPO on answers that see only the last token of their prompt."""

    name = "prompts are cut"

    def preference_step(
        self, model: PreTrainedModel, reference: PreTrainedModel, pairs: list[Pair], beta: float
    ) -> Step:
        def logp(model: PreTrainedModel, pair: Pair, answer: list[int]) -> torch.Tensor:
            ids = torch.tensor([pair.prompt[-1:] + answer])
            logps = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            return logps.gather(1, ids[0, 1:, None]).sum()

        total = torch.zeros(())
        for pair in pairs:
            chosen, rejected = (logp(model, pair, a) - logp(reference, pair, a).detach() for a in pair[1:])
            total = total - torch.nn.functional.logsigmoid(beta * (chosen - rejected))
        return backward(model, total / len(pairs))


def _fork(batches: list[list[Row]]) -> list[list[Row]]:
    """The last shared token predicts the first row's next token in every row."""
    (batch,) = batches
    return [[replace(row, labels=[*row.labels[:5], batch[0].labels[5], *row.labels[6:]]) for row in batch]]


LEAKS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Packed("no borders", borders=False),
        Packed("labels at borders", labels=False),
        Packed("positions that run on", restart=False),
        Packed("no window", window=False),
        Packed("state runs on", mask=False),
        Alone("wrong fork", _fork),
        Alone("dropout"),
        MeanOfMeans("mean of means"),
        PaddingIsRouted(),
        WrongPadding("no mask"),
        WrongPadding("padding has labels"),
        WrongPadding("no image positions"),
        PromptsAreCut(),
    )
}
"""Faults by name."""
