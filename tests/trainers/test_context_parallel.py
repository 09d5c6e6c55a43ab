"""What is refused of a trainer whose packed rows several processes compute; what it computes is in `end_to_end`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig, PartialState
from kit.observe import StandIn
from zoo.models import build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core.parallel.collectives import Group
from trl_padfix.trainers.distributed import local_metrics_only
from trl_padfix.trainers.parts.context_parallel import ContextParallel
from trl_padfix.trainers.parts.part import Padding
from trl_padfix.trainers.settings import Settings


def part(
    cp_size: int = 2, tp_size: int = 1, generates: bool | None = False, deepspeed: bool = False,
    own: dict[str, Any] | None = None, **settings: Any,
) -> ContextParallel:  # fmt: skip
    padding = Padding(replace(Settings(padding_free=True), **settings))
    padding.task = SimpleNamespace(generates_rows=generates)
    padding.handles = [remove_padding(build("qwen2"))]
    mesh = {"cp": SimpleNamespace(get_group=lambda: None)}
    trainer = StandIn(
        padding=padding,
        args=SimpleNamespace(torch_compile=False),
        is_deepspeed_enabled=deepspeed,
        accelerator=SimpleNamespace(
            parallelism_config=ParallelismConfig(cp_size=cp_size, tp_size=tp_size),
            torch_device_mesh=mesh,
            num_processes=2,
        ),
    )
    vars(trainer).update(own or {})
    vars(made := ContextParallel(trainer)).update(kept=trainer)
    return made


@pytest.fixture
def two_processes(monkeypatch):
    PartialState(cpu=True)  # for the log
    monkeypatch.setattr(Group, "of", classmethod(lambda cls, group=None: cls(group, 0, 2)))


def test_without_context_parallelism_or_packing_nothing_is_split(two_processes):
    for given in ({"cp_size": 1}, {"padding_free": False}):
        split = part(**given)
        split.attach_to_models()
        assert [handle.context_parallel for handle in split.trainer.padding.handles] == [None]


REFUSED = [
    ({"generates": None}, "generates rows on every process, and with `cp_size`"),
    ({"generates": True}, "generates rows on every process, and with `cp_size`"),
    ({"generates": True, "cp_size": 1, "tp_size": 2}, "generates rows on every process, and with `tp_size`"),
    ({"tp_size": 2}, "`tp_size` splits the weights"),
    ({"deepspeed": True}, "not split with DeepSpeed"),
]


def test_what_splits_steps_by_processes_is_refused(two_processes):
    for given, says in REFUSED:
        split = part(**given)
        with pytest.raises(PaddingRemovalError, match=f"{says}.*`[ct]p_size=1`"):
            split.attach_to_models()
        assert [handle.context_parallel for handle in split.trainer.padding.handles] == [None]


class Accelerator:
    num_processes, process_index, device = 4, 3, "cpu"

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.dim() else x[None]
        return torch.cat([x, x, x + 1, x + 1])  # of each process

    def gather_for_metrics(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x)


def test_what_a_user_gathers_holds_the_rows_of_a_group_once():
    """Also by a `gather` set on the accelerator itself, within blocks of ours, and where metrics stay local."""
    split, accelerator, seen = part(), Accelerator(), []
    split.group, split.trainer.accelerator = Group(None, 1, 2), accelerator
    rows = torch.tensor([[1.0], [2.0]])

    def users(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return Accelerator.gather(accelerator, x)

    accelerator.gather = accelerator.gather_for_metrics = users
    assert len(accelerator.gather(rows)) == 8  # each group twice
    with split._gather_without_duplicates(), split._gather_without_duplicates():
        for gathering in (accelerator.gather, accelerator.gather_for_metrics):
            assert gathering({"rows": rows})["rows"].flatten().tolist() == [1, 2, 2, 3]
            assert gathering(torch.tensor(1.0)).tolist() == [1, 2]
        with split.around_label_count():  # Trainer divides what it has counted on all
            assert accelerator.gather(torch.tensor(1.0)).tolist() == [1, 1, 2, 2]
        with local_metrics_only(accelerator), split._gather_without_duplicates():
            assert accelerator.gather(rows) is rows
    assert len(seen) == 5
    assert accelerator.gather is accelerator.gather_for_metrics is users
