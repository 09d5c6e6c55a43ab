"""verl's FSDP2 engine with its loss for SFT, as its workers build it; on the CPU by `simulated_gpu.verl_on_cpu`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from conformance.adapter import Adapter, NotRun, flash_stand_in
from conformance.arbiter import IGNORED, Row, Step
from conformance.words import save


sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))
os.environ.update(
    VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_USE_EXTERNAL_MODULES="simulated_gpu.verl_on_cpu"
)
import verl  # noqa: F401
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss


class SFT(Adapter):
    packages = ("torch", "transformers", "verl")

    def __init__(self, name: str, attention: str, use_remove_padding: bool) -> None:
        self.name, self.kernel, self.removes = name, attention, use_remove_padding
        self.setting = f"model.use_remove_padding={use_remove_padding}, attn_implementation={attention}, fsdp2"

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = [row for batch in batches for row in batch]
        if getattr(model.config, "output_router_logits", False):
            raise NotRun("Its loss has no load-balancing term.")
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            if self.kernel == "flash_attention_2":
                stack.enter_context(flash_stand_in(model))
            engine = self._engine(save(model, Path(name)))
            values = {
                "input_ids": [torch.tensor(row.ids) for row in rows],
                "position_ids": [torch.arange(len(row.ids)) for row in rows],
                "loss_mask": [torch.tensor([float(label != IGNORED) for label in row.labels]) for row in rows],
            }
            nested = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in values.items()}
            data = TensorDict(nested, batch_size=len(rows))
            tensordict_utils.assign_non_tensor(
                data, use_remove_padding=self.removes, use_dynamic_bsz=False, temperature=1.0, pad_token_id=0,
                micro_batch_size_per_gpu=len(batches[0]),
            )  # fmt: skip
            with engine.train_mode():
                engine.optimizer_zero_grad()
                losses: list[float] = []

                def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
                    value, metrics = sft_loss(None, model_output, data, dp_group)
                    losses.append(float(value.detach()))
                    return value, metrics

                engine.forward_backward_batch(data, loss)
                found = {n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None}
                whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
        return Step(sum(losses), {n: g.detach().clone() for n, g in whole.items()})

    def _engine(self, folder: str) -> Any:
        engine = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=HFModelConfig(
                path=folder, model_type="language_model", use_remove_padding=self.removes,
                enable_gradient_checkpointing=False, override_config={"attn_implementation": self.kernel},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2", use_torch_compile=False, mixed_precision={"param_dtype": "fp32"}
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-4, total_training_steps=1),
            checkpoint_config=CheckpointConfig(),
        )  # fmt: skip
        engine.initialize()
        return engine


ADAPTERS = [
    SFT("verl-padded", "sdpa", use_remove_padding=False),
    SFT("verl-remove-padding-flash", "flash_attention_2", use_remove_padding=True),
    SFT("verl-remove-padding-sdpa", "sdpa", use_remove_padding=True),
]
