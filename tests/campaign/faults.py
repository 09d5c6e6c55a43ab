"""
Faults in forward, backward, collator, callback, optimizer and generation: the models are what they were.

The other kind of draw is a training of many steps over which memory, tensors and handles stay flat.
"""

from __future__ import annotations

import gc
import random
from copy import copy
from pathlib import Path
from typing import Any

import torch
from campaign import HELD
from kit.methods import make_trainer
from kit.trainer_runs import build_model, build_pairs, rows_for
from transformers import TrainerCallback

import trl_padfix
from trl_padfix.core.attention.attention import ViewPatch


WHERE = ["forward", "backward", "collator", "callback", "optimizer", "generation", "saving"]
ERRORS = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt, "MemoryError": MemoryError,
          "StopIteration": StopIteration}  # fmt: skip

FLAT_STEPS = 100
"""Steps of a draw that looks at memory."""


def draw(chance: random.Random) -> dict[str, Any]:
    return {
        "kind": chance.choice(["DPO", "SFT"]),
        "where": chance.choice([*WHERE, "nowhere"]),
        "error": chance.choice(list(ERRORS)),
        "call": chance.randint(1, 6),
        "module": chance.randrange(30),
        "config": {
            "padding_free": True,
            "prefix_sharing": chance.random() < 0.5,
            "padding_side": chance.choice(["left", "right"]),
            "gradient_checkpointing": chance.random() < 0.3,
            "gradient_accumulation_steps": chance.choice([1, 2]),
            **({"max_tokens_per_batch": 80} if chance.random() < 0.3 else {}),
        },
        "seed": chance.randrange(1000),
    }


class Fault:
    """Raises at its n-th call."""

    def __init__(self, error: type[BaseException], call: int):
        self.error, self.left = error, call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("a fault of the campaign")


class FaultyCallback(TrainerCallback):
    def __init__(self, fault: Fault):
        self.fault = fault

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.fault()


def attempt(case: dict[str, Any], folder: Path) -> str:
    data = rows_for(case["kind"], build_pairs(12, case["seed"], prompt=(1, 8), answer=(1, 8)))
    models = {"model": build_model()} | ({"ref_model": build_model(seed=1)} if case["kind"] == "DPO" else {})
    before = {name: model.config._attn_implementation for name, model in models.items()}
    flat = case["where"] == "nowhere"
    settings = {"max_steps": FLAT_STEPS if flat else 4, "per_device_train_batch_size": 2, "max_length": 30}
    settings |= {"logging_steps": 10} if flat else {}
    settings |= {"save_strategy": "steps", "save_steps": 1} if case["where"] == "saving" else {}
    if case["where"] == "generation":
        settings |= {"predict_with_generate": True, "generation_max_new_tokens": 3, "eval_strategy": "steps",
                     "eval_steps": 1}  # fmt: skip
    given = models | {"train_dataset": data, "eval_dataset": data.select(range(3))}
    trainer = make_trainer(trl_padfix, case["kind"], folder, **settings | case["config"] | given)
    assert all(traces_of(model) for model in models.values()), "nothing was attached"
    if flat:
        watch_memory(trainer)
    else:
        fault = Fault(ERRORS[case["error"]], case["call"])
        undo = put(fault, case, trainer)
        happened = False
        try:
            trainer.train()
        except BaseException as error:
            if "a fault of the campaign" not in f"{error} {error.__cause__}" and not isinstance(error, RuntimeError):
                raise AssertionError(f"another error than the fault: {error!r}") from error
            happened = True
        undo()
        # A backward of the parity check that cannot be computed is named in its report.
        reports = (report for found in trainer.padding.parity.values() for report in found)
        named = any("a fault of the campaign" in report.not_compared for report in reports)
        assert happened or named or fault.left > 0, "the fault was swallowed"
        # The attached model still works, with the same results.
        trainer.model.train()
        batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
        with torch.no_grad():
            packed = trainer.compute_loss(trainer.model, copy(batch))
        trainer.restore_padding()
        with torch.no_grad():
            padded = trainer.compute_loss(trainer.model, copy(batch))
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)
    trainer.restore_padding()
    # Where layers are checkpointed, attention stays able to recompute until the graph of the broken step is gone. A
    # backward hook that raises within a checkpoint leaves it in memory for good, in a plain model of transformers too.
    gc.collect()
    broken_off = case["where"] == "backward" and case["config"]["gradient_checkpointing"]
    for name, model in models.items():
        assert traces_of(model, but=ViewPatch if broken_off else ()) == [], f"the {name} is not what it was"
        assert model.config._attn_implementation == before[name]
    return HELD


def put(fault: Fault, case: dict[str, Any], trainer: Any) -> Any:
    """Put a fault where the case says; returns what takes it away."""
    if case["where"] in ("forward", "backward"):
        modules = list(trainer.model.modules())
        module = modules[case["module"] % len(modules)]
        backward = case["where"] == "backward"
        hook = (module.register_full_backward_hook if backward else module.register_forward_pre_hook)(fault)
        return hook.remove
    if case["where"] == "callback":
        callback = FaultyCallback(fault)
        trainer.add_callback(callback)
        return lambda: trainer.remove_callback(callback)
    owner, name = {
        "collator": (trainer.data_collator, "torch_call"),
        "optimizer": (trainer, "create_optimizer"),
        "generation": (trainer.model, "generate"),
        "saving": (trainer, "_save_rng_state"),
    }[case["where"]]
    call = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        fault()
        return call(*args, **kwargs)

    vars(owner)[name] = faulty
    return lambda: vars(owner).pop(name)


def traces_of(model: Any, but: Any = ()) -> list[str]:
    """Hooks, forwards and attributes of this package on a model, `but` for some. TRL and accelerate leave theirs."""
    found = []
    for name, module in model.named_modules():
        placed = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *vars(module).values()]
        for thing in placed:
            inner = getattr(thing, "func", thing)
            owner = str(getattr(inner, "__module__", "") or type(inner).__module__)
            if isinstance(inner, but):
                continue
            if owner.startswith("trl_padfix") or type(inner).__module__.startswith("trl_padfix"):
                found.append(f"{name}: {inner!r}")
    return found


def watch_memory(trainer: Any) -> None:
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (FLAT_STEPS // 2, FLAT_STEPS):
                gc.collect()
                tensors = sum(isinstance(x, torch.Tensor) for x in gc.get_objects())
                seen.append((tensors, resident()))

    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    trainer.remove_callback(watch)
    (tensors, memory), (tensors_then, memory_then) = seen
    assert tensors_then <= tensors + 20, f"{tensors} tensors became {tensors_then} in {FLAT_STEPS // 2} steps"
    assert memory_then <= memory + 24 * 2**20, f"{(memory_then - memory) / 2**20:.0f} MiB more"


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
