"""transformers by itself: the model is called with what its own collators make."""

from __future__ import annotations

import torch
from transformers import DataCollatorWithFlattening, PreTrainedModel

from conformance.adapter import Adapter, NotRun, backward, flash_stand_in, one_at_a_time
from conformance.arbiter import IGNORED, Row, Step


class PositionIds(Adapter):
    """`DataCollatorWithFlattening`: one row whose positions start anew at each border, without a mask."""

    def __init__(self, name: str, attention: str, mask: bool = False, **fields: bool) -> None:
        self.name, self.attention, self.mask, self.fields = name, attention, mask, fields
        given = ", ".join(f"{k}={v!r}" for k, v in fields.items())
        self.setting = f'DataCollatorWithFlattening({given}), attn_implementation="{attention}"'
        self.setting += ", and a mask of ones" * mask

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = one_at_a_time(batches)
        batch = DataCollatorWithFlattening(**self.fields)([{"input_ids": r.ids, "labels": r.labels} for r in rows])
        if self.mask:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return backward(model, model(**batch, use_cache=False).loss)


class Padded(Adapter):
    """A padded batch with its mask, as most trainers call a model."""

    name = "transformers-padded"
    setting = "model(input_ids, attention_mask=..., labels=...)"

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = one_at_a_time(batches)
        width = max(len(row.ids) for row in rows)
        rows = [(row, width - len(row.ids)) for row in rows]
        return self.padded_step(
            model,
            torch.tensor([row.ids + [0] * n for row, n in rows]),
            torch.tensor([[1] * len(row.ids) + [0] * n for row, n in rows]),
            labels=torch.tensor([row.labels + [IGNORED] * n for row, n in rows]),
        )

    def padded_step(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor) -> Step:
        return backward(model, model(input_ids=ids, attention_mask=mask, use_cache=False, **more).loss)


class Flash(PositionIds):
    """The same with transformers' FlashAttention-2 code, on functions that compute on a CPU what the kernels do."""

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        with flash_stand_in(model):
            if not model._supports_flash_attn:
                raise NotRun("transformers has no FlashAttention for this model.")
            model.set_attn_implementation("flash_attention_2")
            return super().step(model, batches)


_flash = Flash("transformers-flattening-flash", "flash_attention_2")
_flash.attention = None  # the suite builds the model before there is something that stands in for flash-attn
_bounds = dict(return_flash_attn_kwargs=True, return_seq_idx=True)
ADAPTERS = [
    PositionIds("transformers-flattening-sdpa", "sdpa"),
    PositionIds("transformers-flattening-eager", "eager"),
    PositionIds("transformers-flattening-bounds", "sdpa", **_bounds),
    PositionIds("transformers-flattening-mask", "sdpa", mask=True),
    _flash,
    Padded(),
]
