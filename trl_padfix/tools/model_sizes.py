"""Sizes of a model that determine its memory: its parameters by layer, and the bytes of its steps."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..core.model.find import find_decoder
from .counted_step import CountedStep, StepSettings, count_step, experts_of, uncounted_mixers
from .reading import reading


__all__ = ["ModelSizes", "load_sizes"]

_SHARDED_SIZES = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
"""Fields of a configuration that tensor parallelism divides among GPUs."""

_SHARDING = ("colwise", "packed_colwise", "rowwise", "embedding")
"""Beginnings of the styles of a `tp_plan` that leave a GPU a part of a weight."""


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """Sizes of a model that determine its memory."""

    config: PretrainedConfig  # of the text model
    name: str  # value of `--model_name_or_path`
    parameters: int  # tied ones counted once
    active: int  # parameters that compute a token: without the experts that it is not routed to
    layer_parameters: tuple[int, ...]  # parameters of each decoder layer
    layer_experts: tuple[int, ...]  # those of its experts
    head_parameters: int
    linear_weights: int  # weights that `--load_in_4bit` quantizes: of all linear layers except the LM head
    steps: dict[StepSettings, CountedStep] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: PretrainedConfig, name: str = "") -> ModelSizes:
        """Sizes of a text model whose layers attend, or are gated delta nets; its weights take no memory."""
        text = config.get_text_config()
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(text)
        if mixers := uncounted_mixers(find_decoder(model)):
            raise NotImplementedError(
                f"A plan counts layers that attend, gated delta nets and short convolutions. `{text.model_type}` has "
                f"{mixers}: what their kernels keep is not known. `trl-padfix bench --trainer sft --shape hybrid` "
                "prints what the steps of a small hybrid hold."
            )
        head = model.get_output_embeddings()
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == text.num_hidden_layers)
        parameters = sum(p.numel() for p in model.parameters())
        experts, used = experts_of(text)
        expert_parameters = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        own = [
            tuple(sum(p.numel() for name, p in layer.named_parameters() if which in f".{name}") for layer in layers)
            for which in ("", ".experts.")
        ]
        return cls(
            config=text,
            name=name,
            parameters=parameters,
            active=parameters - expert_parameters * (experts - used) // experts,
            layer_parameters=own[0],
            layer_experts=own[1],
            head_parameters=head.weight.numel(),
            linear_weights=sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and m is not head),
        )

    def of_one(self, size: int) -> ModelSizes:
        """
        Sizes of what one of `size` GPUs has by the model's own `tp_plan`: a model with fewer heads and narrower MLPs.

        Raises:
            NotImplementedError: If the plan of the model shards something else.
            ValueError: If `size` does not divide the heads or a width.
        """
        config = deepcopy(self.config)
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name in _SHARDED_SIZES:
            if (width := getattr(config, name, None)) is not None:
                if width % size:
                    raise ValueError(f"{size} GPUs share a layer evenly, and `{name}` is {width}.")
                setattr(config, name, width // size)
        with torch.device("meta"):
            whole, narrow = (AutoModelForCausalLM.from_config(each) for each in (self.config, config))
        plan, ends = getattr(whole, "_tp_plan", None) or {}, 0
        for (name, parameter), own in zip(whole.named_parameters(), narrow.parameters(), strict=True):
            module, _, kind = re.sub(r"\.\d+\.", ".*.", name).rpartition(".")
            style = plan.get(f"{module}.{kind}") or plan.get(module) or ""
            # Each GPU has the whole bias of a sum over columns.
            is_sharded = style.startswith(_SHARDING[: 2 if kind == "bias" else None])
            numel = parameter.numel() // (size if is_sharded else 1)
            if own.numel() != numel:
                if ".layers." in name:
                    raise NotImplementedError(
                        f"The `tp_plan` of `{self.config.model_type}` leaves {numel} values of `{name}` to each of "
                        f"{size} GPUs, and a plan counts {own.numel()}. Plan with FSDP2 (without `--tensor-parallel`)."
                    )
                ends += own.numel() - numel  # of embedding and LM head, whose width is that of the vocabulary
        sizes = ModelSizes.of(config, self.name)
        head = sizes.head_parameters // (size if plan.get("lm_head", "").startswith(_SHARDING) else 1)
        counts = {"parameters": sizes.parameters - ends, "active": sizes.active - ends, "head_parameters": head}
        return replace(sizes, **counts, steps={})

    @property
    def has_experts(self) -> bool:
        return self.active < self.parameters

    def describe(self) -> str:
        """Name and parameters in words."""
        active = f" ({self.active / 1e9:.2f}e9 for a token)" if self.has_experts else ""
        return f"{self.name}: {self.parameters / 1e9:.2f}e9 parameters{active}"

    def step(self, settings: StepSettings) -> CountedStep:
        """[`count_step`], cached: a count takes seconds."""
        if settings not in self.steps:
            self.steps[settings] = count_step(self.config, settings, self._counted_layers())
        return self.steps[settings]

    def _counted_layers(self) -> tuple[int, int]:
        """
        Two numbers of layers to count a step with: all further layers repeat those between the two.

        Layers of sizes `(9, 5, 5, 5)` give `(1, 2)`; `(5, 7, 5, 7, 5, 7)`, with a period of 2, gives `(1, 3)`.
        """
        sizes = self.layer_parameters
        for first, period in product(range(1, len(sizes)), (1, 2, 4)):
            if first + period <= len(sizes) and sizes[first:-period] == sizes[first + period :]:
                return first, first + period
        return len(sizes), len(sizes)


def load_sizes(model: str) -> ModelSizes:
    """Load the sizes of a model from its Hub id, its folder, or its `config.json`."""
    with reading(f"the config of {model!r}", "Give the id of a model, its folder, or its `config.json`."):
        config = AutoConfig.from_pretrained(model)
        path, name = Path(model), model
        if path.is_file():
            name = json.loads(path.read_text()).get("_name_or_path") or str(path.parent)
        return ModelSizes.of(config, name)
