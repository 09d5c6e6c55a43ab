"""A packed forward enters its dispatch once, however many layers there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from zoo.gpu_models import build, pairs

import trl_padfix.core.attention.attention as attention
import trl_padfix.core.patches.plan as patches
from trl_padfix import remove_padding


def dispatch_is_entered_once(layers: int) -> None:
    entered, within = [], patches.within

    @contextlib.contextmanager
    def counted(**fields: Any) -> Iterator[None]:
        entered.append(fields)
        with within(**fields):
            yield

    model, (ids, mask) = build(layers), pairs(8)
    with pytest.MonkeyPatch.context() as patch, remove_padding(model), torch.no_grad():
        patch.setattr(patches, "within", counted)
        model(ids, attention_mask=mask, use_cache=False)
    assert len(entered) == 1


def test_a_dispatch_in_every_layer_is_noticed(monkeypatch):
    for layers in (2, 4):
        dispatch_is_entered_once(layers)
    call_once = attention.ViewPatch.call

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patches.within(packed=attention.packed_call()):
            return call_once(self, *args, **kwargs)

    monkeypatch.setattr(attention.ViewPatch, "call", call)
    with pytest.raises(AssertionError):
        dispatch_is_entered_once(2)
