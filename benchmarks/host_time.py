"""
Host time of a packed step over TRL's padded one, for every trainer: what decides where a batch is small on a GPU.

    PYTHONPATH=tests python benchmarks/host_time.py
    PYTHONPATH=tests python benchmarks/host_time.py --trainer DPO --profile

A model of many narrow layers and two rows: nearly all of its time is the host's. A step is loss and backward, without
generation and optimizer. Steps alternate; the median of their CPU time on one thread counts.

cpu: with the attention of a CPU, which computes segment by segment. one call: attention is one call for all segments,
of the operator that runs on a GPU; its kernel and that of TRL's attention compute nothing. ours: milliseconds in
Python of this package, with one call, under a profiler. launches and waits: of a step on the simulated GPU; waits of
lines of this package behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from kit.methods import ONLINE, make_trainer
from kit.trainer_runs import build_model
from simulated_gpu.simulated_cuda import simulated_cuda
from simulated_gpu.simulated_steps import on_simulated, place_models, step

import trl_padfix
from trl_padfix.core.attention import attention


TRAINERS = ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation")

VARIANTS: dict[str, dict[str, Any]] = {
    "TRL, padded": {},
    "padding-free": {"padding_free": True, "parity_check": False},
    "prefix sharing": {"padding_free": True, "prefix_sharing": True, "parity_check": False},
}

COLUMNS = ("trainer", "variant", "cpu", "one call", "ours, ms", "launches", "waits (ours)")


def _forward(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0]), query, query, query


def _padded_forward(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), query.new_empty(query.shape[:3])


def _backward(gradient: torch.Tensor, *states: Any, **_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.empty_like, states[:3]))


def _always(*_: Any) -> bool:
    return True


@contextlib.contextmanager
def attention_in_one_call() -> Iterator[None]:
    """The operators of attention, ours and that of padded batches on a CPU, with kernels that compute nothing."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these have kernels
        library.impl("_scaled_dot_product_flash_attention_for_cpu", _padded_forward, "CPU")
        library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _backward, "CPU")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    # A mock would cost time of its own.
    with mock.patch.object(attention, "torch_varlen_applies", new=_always):
        yield
    library._destroy()


class HostStep:
    """The steps of a trainer on one batch, whose tensors are new in each step: no layout is kept."""

    def __init__(self, trainer: str, layers: int, settings: dict[str, Any]):
        library = trl_padfix if settings else trl
        sizes = dict(num_hidden_layers=layers, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        models = {"model": build_model("reward" if trainer == "Reward" else "causal", **sizes)}
        if trainer in ("DPO", "KTO"):
            models["ref_model"] = build_model(seed=1, **sizes)
        if trainer == "Distillation":
            models["teacher_model"] = build_model(seed=1, **sizes)
        rows = {"per_device_train_batch_size": 2}
        if trainer in ("GRPO", "RLOO"):
            rows |= {"num_generations": 2, "beta": 0.0}
        self.trainer = make_trainer(library, trainer, tempfile.mkdtemp(), **models, **rows, **settings)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1  # `train` sets it
        self.batch = next(iter(self.trainer.get_train_dataloader()))
        if trainer in ONLINE:
            self.batch = self.trainer._prepare_inputs(self.batch)

    def run(self) -> None:
        batch = {k: v.clone() if isinstance(v, torch.Tensor) else copy(v) for k, v in self.batch.items()}
        self.trainer.compute_loss(self.trainer.model, batch).backward()

    def seconds(self) -> float:
        start = time.process_time()
        self.run()
        return time.process_time() - start

    def own_milliseconds(self, steps: int, *, show: bool) -> float:
        """Time of a step in functions of this package, without what they call."""
        with cProfile.Profile(time.process_time) as profile:
            for _ in range(steps):
                self.run()
        found = pstats.Stats(profile)
        if show:
            found.sort_stats("tottime").print_stats("trl_padfix", 25)
        own = str(Path(trl_padfix.__file__).parent)
        spent = sum(row[2] for (file, *_), row in vars(found)["stats"].items() if file.startswith(own))
        return 1000 * spent / steps

    def counts(self) -> tuple[int, int, int]:
        """Launches, waits, and waits of this package on the simulated GPU. Call it last: the models move there."""
        with simulated_cuda() as counts:
            place_models(self.trainer)
            if teacher := getattr(self.trainer, "teacher_model", None):
                place_models(mock.Mock(model=teacher, ref_model=None))
            step(self.trainer, on_simulated(self.batch))
            batch = on_simulated(self.batch)
            counts.reset()
            step(self.trainer, batch)
            return counts.launches, counts.synchronisations.total(), counts.ours().total()


def ratios(steps: dict[str, HostStep], count: int) -> dict[str, float]:
    """CPU time of each variant over TRL's, by medians of alternating steps."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count):
        for name, host_step in steps.items():
            found[name].append(host_step.seconds())
    medians = [statistics.median(times[len(times) // 4 :]) for times in found.values()]  # the first warm up
    return {name: median / medians[0] for name, median in zip(steps, medians, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=TRAINERS, help="only this one")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each variant")
    parser.add_argument("--profile", action="store_true", help="also the functions of this package that take longest")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    transformers.logging.set_verbosity_error()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for trainer in [options.trainer] if options.trainer else TRAINERS:
        steps = {name: HostStep(trainer, options.layers, settings) for name, settings in VARIANTS.items()}
        by_segment = ratios(steps, options.steps)
        with attention_in_one_call():
            in_one_call = ratios(steps, options.steps)
            own = {name: s.own_milliseconds(5, show=options.profile) for name, s in steps.items()}
        for name, host_step in steps.items():
            launches, waits, ours = host_step.counts()
            figures = f"{by_segment[name]:.2f} | {in_one_call[name]:.2f} | {own[name]:.2f}"
            print(f"| {trainer} | {name} | {figures} | {launches:,} | {waits} ({ours}) |", flush=True)


if __name__ == "__main__":
    main()
