"""trl_padfix: its trainers, and `remove_padding` around a model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from conformance.adapter import Adapter, backward
from conformance.adapters import in_transformers, in_trl
from conformance.arbiter import Row, Step
from trl_padfix import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, remove_padding


class SFT(in_trl.SFT):
    packages = ("torch", "transformers", "trl", "trl-padfix")
    trainer, config = SFTTrainer, SFTConfig


class DPO(in_trl.DPO):
    packages = ("torch", "transformers", "trl", "trl-padfix")
    trainer, config = DPOTrainer, DPOConfig


class RemovePadding(Adapter):
    """A padded batch of any code, under `remove_padding`."""

    packages = ("torch", "transformers", "trl-padfix")

    def __init__(self, name: str, prefix_sharing: bool) -> None:
        self.name, self.prefix_sharing = name, prefix_sharing
        self.setting = f"with remove_padding(model, prefix_sharing={prefix_sharing}): model(...)"

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        with remove_padding(model, prefix_sharing=self.prefix_sharing, strict=True):
            return in_transformers.Padded().step(model, batches)

    def padded_step(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor) -> Step:
        with remove_padding(model, prefix_sharing=self.prefix_sharing, strict=True):
            return backward(model, model(input_ids=ids, attention_mask=mask, use_cache=False, **more).loss)


ADAPTERS = [
    RemovePadding("padfix-remove-padding", False),
    RemovePadding("padfix-remove-padding-sharing", True),
    SFT("padfix-sft-padding-free", padding_free=True),
    SFT("padfix-sft-sharing", padding_free=True, prefix_sharing=True),
    SFT("padfix-sft-budget", padding_free=True, max_tokens_per_batch=24),
    DPO("padfix-dpo-left", "left", padding_free=True, prefix_sharing=True),
    DPO("padfix-dpo-right", "right", padding_free=True, prefix_sharing=True),
]
