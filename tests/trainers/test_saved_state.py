"""A step that only compares leaves a trainer as it was, also if the step raises."""

import copy
import random
from collections import Counter, defaultdict, deque
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from trl_padfix.core.anatomy import reshard_parameters
from trl_padfix.trainers.parts.saved_state import saved_state


class Rows(list):
    """A list of rows, which may be long."""

    def __iter__(self):
        raise AssertionError("a dataset was copied")


def build() -> SimpleNamespace:
    metrics = {"train": defaultdict(list, loss=[1.0])}
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.grad = torch.ones(2, 2)
    return SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cpu")),
        model=model,
        metrics=metrics,
        same_metrics=metrics["train"],
        recent=deque([1, 2], maxlen=2),
        ids={1, 2},
        means=[torch.zeros(2)],
        draws=[torch.Generator(), random.Random(0), np.random.default_rng(0)],
        step=1,
    )


def write(trainer: SimpleNamespace) -> None:
    trainer.same_metrics["loss"].append(2.0)
    trainer.metrics["train"]["reward"].append(2.0)
    trainer.metrics = {"eval": trainer.metrics.pop("train")}
    trainer.recent.append(3)
    trainer.ids.add(3)
    trainer.means.append(trainer.means[0].add_(1))
    trainer.step += random.randrange(1, 9)
    torch.rand(1, generator=trainer.draws[0])
    trainer.step += trainer.draws[1].random() + trainer.draws[2].random()
    trainer.model(torch.randn(4, 2)).sum().backward()
    trainer.model.requires_grad_(False)  # PEFT changes these flags when an adapter is switched


def state(trainer: SimpleNamespace) -> str:
    """All values, and the next random number."""
    gradients = [(parameter.grad, parameter.requires_grad) for parameter in trainer.model.parameters()]
    generator, numbers, arrays = trainer.draws
    drawn = torch.random.get_rng_state().sum(), random.getstate(), numbers.getstate(), arrays.bit_generator.state
    drawn += (generator.get_state().tolist(),)
    values = {name: value for name, value in vars(trainer).items() if name != "draws"}
    return repr((copy.deepcopy(values), trainer.model.state_dict(), gradients, drawn))


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_step_that_only_compares_leaves_a_trainer_as_it_was(error):
    trainer = build()
    before, metrics = state(trainer), trainer.metrics
    with suppress(RuntimeError), saved_state(trainer):
        assert trainer.model[0].weight.grad is None
        write(trainer)
        if error:
            raise error
    assert state(trainer) == before
    assert trainer.metrics is metrics
    assert metrics["train"] is trainer.same_metrics
    write(trainer)  # the control
    assert state(trainer) != before


def test_contents_are_read_without_the_init_of_a_users_container_which_may_contain_itself():
    class Counts(Counter):
        def __init__(self, owner):
            super().__init__()

    trainer = build()
    trainer.counts = Counts("mine")
    trainer.counts["rows"], trainer.counts["me"] = 1, trainer.counts
    with saved_state(trainer):
        trainer.counts["rows"] += 1
    assert trainer.counts["rows"] == 1
    assert trainer.counts["me"] is trainer.counts


def test_a_dataset_is_not_copied():
    trainer = build()
    trainer.train_dataset = Rows([{"input_ids": [1]}])
    with saved_state(trainer):
        pass
    trainer.rows = trainer.train_dataset
    with pytest.raises(AssertionError, match="a dataset was copied"), saved_state(trainer):
        pass


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_fsdp2_gets_its_gradients_back_after_a_forward_without_backward(one_process):
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    trainer, rows = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")), model=model), torch.ones(1, 2)
    model(rows).sum().backward()
    gradient = model.weight.grad.full_tensor().clone()
    model(rows)  # as in an evaluation
    with saved_state(trainer):
        model(rows).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), gradient)


def test_fsdp1_without_shards_has_nothing_to_free(one_process):
    reshard_parameters(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
