"""What is refused of a trainer whose packed rows several processes compute; what it computes is in `end_to_end`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import ParallelismConfig, PartialState
from kit.models import build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core.layout.exchange import Group
from trl_padfix.trainers.packing import Padding
from trl_padfix.trainers.parts import Settings
from trl_padfix.trainers.split_rows import SplitRows


def part(cp_size: int = 2, takes_layouts: bool = True, deepspeed: bool = False, **settings: Any) -> SplitRows:
    padding = Padding(replace(Settings(padding_free=True), **settings))
    padding.task = SimpleNamespace(takes_layouts=takes_layouts)
    padding.handles = [remove_padding(build("qwen2"))]
    mesh = {"cp": SimpleNamespace(get_group=lambda: None)}
    trainer = SimpleNamespace(
        padding=padding,
        args=SimpleNamespace(torch_compile=False),
        is_deepspeed_enabled=deepspeed,
        accelerator=SimpleNamespace(parallelism_config=ParallelismConfig(cp_size=cp_size), torch_device_mesh=mesh),
    )
    return SplitRows(trainer)


@pytest.fixture
def two_processes(monkeypatch):
    PartialState(cpu=True)  # for the log
    monkeypatch.setattr(Group, "of", classmethod(lambda cls, group=None: cls(group, 0, 2)))


@pytest.mark.parametrize("attention", ["heads", "keys"])
def test_a_group_splits_the_rows_of_all_models(attention, two_processes):
    split = part(cp_attention=attention)
    split.attach()
    assert [(h.split.group.size, h.split.attention) for h in split.trainer.padding.handles] == [(2, attention)]


@pytest.mark.parametrize("given", [{"cp_size": 1}, {"padding_free": False}])
def test_without_context_parallelism_or_packing_nothing_is_split(given, two_processes):
    split = part(**given)
    split.attach()
    assert [handle.split for handle in split.trainer.padding.handles] == [None]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"takes_layouts": False}, "generates rows on every process"),
        ({"max_tokens_per_batch": 100}, "`max_tokens_per_batch` cuts a step"),
        ({"exact_eval_means": True}, "`exact_eval_means` tells rows"),
        ({"deepspeed": True}, "not split with DeepSpeed"),
    ],
)
def test_what_splits_steps_by_processes_is_refused(given, says, two_processes):
    split = part(**given)
    with pytest.raises(PaddingRemovalError, match=f"{says}.*`cp_size=1`"):
        split.attach()
    assert [handle.split for handle in split.trainer.padding.handles] == [None]


def test_another_way_to_attend_is_an_error():
    with pytest.raises(ValueError, match="`cp_attention` is 'heads' or 'keys', got 'ring'"):
        part(cp_attention="ring").check(None, {})
