"""
Tiny trainings of models with experts by token budget; as a script, those of one process of several.

`accelerate launch tests/kit/expert_runs.py FOLDER` trains SFT and DPO with a budget for a whole step and with one that
splits it, and writes what they logged and the tokens of their forwards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, PrinterCallback, Qwen3MoeConfig


if __name__ == "__main__":  # a script sees its own folder only
    sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.budget_runs import ALL_TRAINERS, BUDGET, GLOBAL_BATCH, build_data
from kit.processes import leave_with
from kit.trainer_runs import SETTINGS, build_tokenizer


SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_experts_per_tok": 2, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 39,
}  # fmt: skip
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, intermediate_size=24),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, num_experts=4, intermediate_size=48, moe_intermediate_size=24),
}
COEFFICIENT = 0.5
WHOLE_STEP = 10**6


def build_model(kind: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]())


def make(name: str, kind: str, folder: Any, *, ours: bool, **config: Any) -> Any:
    trainer_class, config_class = ALL_TRAINERS[name][:2] if ours else ALL_TRAINERS[name][2:]
    budget = {"padding_free": True, "max_tokens_per_batch": BUDGET[name]} if ours else {}
    settings = {"output_dir": str(folder), "max_length": 26, "per_device_train_batch_size": GLOBAL_BATCH}
    data = build_data(name)
    trainer = trainer_class(
        model=build_model(kind),
        args=config_class(
            **settings | SETTINGS | {"router_aux_loss_coef": COEFFICIENT, "max_steps": 4} | budget | config
        ),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=build_tokenizer(),
        **{"ref_model": build_model(kind, seed=1)} if name in ("dpo", "kto") else {},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def entered(trainer: Any) -> list[int]:
    """Tokens of each forward of the policy."""
    found: list[int] = []
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: found.append(args[0].shape[:2].numel()))
    return found


def main(folder: Path) -> None:
    config = {"per_device_train_batch_size": GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])}
    if os.environ.get("ACCELERATE_USE_FSDP"):
        # accelerate shards over devices that it knows; the processes of this machine pass for GPUs that talk by gloo.
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        config |= {"use_cpu": False}
    logged = {}
    for name in ("sft", "dpo"):
        for budget in (WHOLE_STEP, BUDGET[name]):
            given = {"max_tokens_per_batch": budget, "parity_check": False, **config}
            trainer = make(name, "mixtral", folder, ours=True, **given)
            forwards = entered(trainer)
            trainer.train()
            logged.setdefault(name, []).append({"history": trainer.state.log_history, "forwards": forwards})
    leave_with(logged, trainer.accelerator, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
