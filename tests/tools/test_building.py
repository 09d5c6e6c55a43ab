"""`bench` measures what users run, and builds its models on their device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trl_padfix.tools.bench.building as building
from trl_padfix.tools.bench.settings import BenchSettings


def the_default_precision_is_measured() -> None:
    assert building._arguments(BenchSettings(pairs=2, shape="tiny", dtype="autocast")).bf16
    assert BenchSettings(dtype="autocast").weights_dtype == torch.float32


def test_a_bench_of_pure_bfloat16_is_noticed(monkeypatch):
    the_default_precision_is_measured()
    config = building.trl.DPOConfig
    monkeypatch.setattr(building.trl, "DPOConfig", lambda **given: config(**given | {"bf16": False}))
    with pytest.raises(AssertionError):
        the_default_precision_is_measured()


class DrawsOnHost(TorchDispatchMode):
    """Counts the numbers that are drawn on the CPU."""

    drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if "normal" in str(func) and args[0].device.type == "cpu":
            self.drawn += args[0].numel()
        return func(*args, **kwargs or {})


def weights_are_drawn_on_the_device() -> None:
    tokenizer = building.train_tokenizer([""], 1024)
    with DrawsOnHost() as host:
        model = building._model(tokenizer, BenchSettings(pairs=2, shape="tiny", device="meta"), seed=0)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert host.drawn == 0


def test_models_that_are_built_on_the_host_are_noticed(monkeypatch):
    weights_are_drawn_on_the_device()
    build = building.build_qwen2

    def on_host(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return build(*args, **kwargs)

    monkeypatch.setattr(building, "build_qwen2", on_host)
    with pytest.raises(AssertionError):
        weights_are_drawn_on_the_device()
