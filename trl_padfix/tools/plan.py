"""
What a training needs of each GPU's memory, and the sharding, checkpointing and token budget that fit.

The formulas are those of docs/scaling.md: the parameters are those of the model, built without memory; what a token
costs follows from the sizes of a layer. Decoders of gated MLPs and attention, as Llama, Qwen and Mistral are, are
counted; others are refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .reading import reading


__all__ = [
    "Memory",
    "ModelSizes",
    "Plan",
    "Training",
    "flags",
    "load_sizes",
    "memory",
    "smallest_fit",
    "splitting_flags",
]

ROOM = 0.92
"""Share of a GPU's memory that is planned with; the rest is for the context, the allocator's gaps and the kernels."""

ENOUGH = 4096
"""Tokens of a forward from which on more of them make a step hardly faster."""


@dataclass(frozen=True)
class ModelSizes:
    """What the memory of a model follows from."""

    parameters: int  # tied ones once
    layer_parameters: int  # those of the largest decoder layer
    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_size: int
    linear_sides: int  # inputs and outputs of all linear layers but the LM head, summed: adapters of rank 1

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """The sizes of a text model of attention and one gated MLP a layer; no memory is taken for its weights."""
        text = config.get_text_config()
        experts = [n for n in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(text, n, None)]
        kinds = set(getattr(text, "layer_types", None) or [])
        mixers = {kind for kind in kinds if "attention" not in kind or "linear" in kind}
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        missing = [name for name in names if not isinstance(getattr(text, name, None), int)]
        if experts or mixers or missing:
            why = f"has experts (`{experts[0]}`)" if experts else f"has layers of {sorted(mixers)}" if mixers else ""
            why = why or f"has no {missing} in its config"
            raise NotImplementedError(
                f"A plan counts decoders of attention and one gated MLP a layer, and `{text.model_type}` {why}. "
                "Measure a step of a small shape of it instead: `trl-padfix bench` prints the peak."
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
        head: Any = model.get_output_embeddings()
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == text.num_hidden_layers)
        linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            vocab_size=text.vocab_size,
            heads=text.num_attention_heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            linear_sides=sum(m.in_features + m.out_features for m in linear),
        )


@dataclass(frozen=True)
class Training:
    """How a model is trained."""

    gpus: int = 1
    sharded: bool = False  # weights, gradients and moments, over the GPUs (FSDP2); else each has all
    checkpointing: bool = False
    lora: int = 0  # rank of adapters on all linear layers; 0 trains all weights
    reference: bool = False  # a frozen model beside it; with adapters it is the policy without them
    half: bool = True  # forwards compute in bfloat16, trained weights being float32; else all is float32
    head_tokens: int = 1024  # tokens whose scores over the vocabulary are held at once; 0 for all of a forward
    split: int = 1  # GPUs that compute a packed row together (accelerate's `cp_size`)


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU by item: what does not depend on the tokens of a forward, and what one token costs."""

    items: dict[str, int]
    per_token: dict[str, int]

    @property
    def fixed(self) -> int:
        return sum(self.items.values())

    @property
    def token(self) -> int:
        return sum(self.per_token.values())

    def total(self, tokens: int) -> int:
        """Bytes with so many tokens in a forward."""
        return self.fixed + tokens * self.token


@dataclass(frozen=True)
class Plan:
    """A training that fits."""

    training: Training
    memory: Memory
    tokens: int  # `max_tokens_per_batch`: most tokens of a forward that there is room for
    available: int  # bytes of a GPU

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.memory.total(self.tokens)}


def load_sizes(model: str) -> ModelSizes:
    """The sizes of a model by its name, its folder, or the file of its config."""
    with reading(f"the config of {model!r}", "Give the id of a model, its folder, or its `config.json`."):
        config = AutoConfig.from_pretrained(model)
    return ModelSizes.of(config)


def memory(sizes: ModelSizes, how: Training) -> Memory:
    """Memory of one GPU by item, by the formulas of docs/scaling.md."""
    size = 2 if how.half else 4
    shards = how.gpus if how.sharded else 1
    adapters = how.lora * sizes.linear_sides
    trained = adapters or sizes.parameters
    items = {"weights, gradients, moments": 16 * trained // shards}
    if how.lora:
        items["frozen weights"] = size * sizes.parameters // shards
    elif how.reference:
        items["reference"] = size * sizes.parameters // shards
    if how.sharded:
        items["two gathered layers"] = 2 * size * sizes.layer_parameters
    elif how.half and not how.lora:
        items["weights in bfloat16"] = 2 * sizes.parameters  # autocast keeps them until backward has used them
    # Scores, their log-softmax and its gradient, in float32.
    scores = 3 * 4 * sizes.vocab_size
    if how.head_tokens:
        items["LM head"] = scores * how.head_tokens
    attention = 2 * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size
    # The norms of frozen weights keep what comes in, and not what their weights are multiplied with.
    streams = (4 if how.lora else 6) * sizes.hidden_size
    layer = size * (streams + attention + 4 * sizes.intermediate_size)
    if how.lora:
        layer += 7 * size * how.lora
    scores = 0 if how.head_tokens else scores
    if how.checkpointing:
        # Beside what it saves, a layer holds gradients of its own when it is recomputed; the scores are gone by then.
        recomputed = layer + 2 * size * sizes.intermediate_size
        per_token = {
            "checkpoints": size * sizes.hidden_size * sizes.layers,
            "LM head" if scores > recomputed else "recomputed layer": max(scores, recomputed),
        }
    else:
        per_token = {"activations": layer * sizes.layers} | ({"LM head": scores} if scores else {})
    return Memory(items, {name: -(-n // how.split) for name, n in per_token.items()})


def smallest_fit(
    sizes: ModelSizes, *, gpus: int, available: int, longest: int, lora: int = 0, reference: bool = False,
    head_tokens: int = 1024, may_split: bool = True,
) -> Plan:  # fmt: skip
    """
    The simplest training that fits: without sharding before with it, without checkpointing before with it; rows split
    over GPUs only where one GPU does not hold the longest.

    `available` are the bytes of each GPU, and `longest` the tokens of the longest row: a forward must hold it. That
    nothing fits is a `ValueError` that says what is missing.
    """
    room, found = int(ROOM * available), []

    def planned(*how: Any, split: int = 1) -> Plan:
        training = Training(gpus, *how, lora, reference, head_tokens=head_tokens, split=split)
        needed = memory(sizes, training)
        tokens = (room - needed.fixed) // needed.token // 256 * 256
        found.append(Plan(training, needed, max(tokens, 0), available))
        return found[-1]

    whole = [
        planned(sharded, remade) for sharded in (False, True)[: 1 if gpus == 1 else 2] for remade in (False, True)
    ]
    # The first one with room for enough tokens; else that with room for the most, if it holds a row.
    plan = next((p for p in whole if p.tokens >= max(longest, ENOUGH)), max(whole, key=lambda p: p.tokens))
    for split in range(2, min(gpus, sizes.heads) + 1 if may_split else 0):
        if gpus % split == 0 and plan.tokens < longest:
            plan = planned(True, True, split=split)
    if plan.tokens < longest:
        least = min(found, key=lambda p: p.memory.total(longest))
        raise ValueError(
            f"Nothing fits: with a row of {longest} tokens the least that a GPU must hold is "
            f"{least.memory.total(longest) / 1e9:.1f} GB, and of {available / 1e9:.1f} GB {room / 1e9:.1f} are "
            "planned with. Take more GPUs, LoRA (`--lora 16`), or a smaller `--max-length`."
        )
    return plan


def splitting_flags(how: Training) -> str:
    """The flags of `accelerate launch` with which GPUs share packed rows; none if they do not."""
    if how.split == 1:
        return ""
    sizes = f"--parallelism_config_cp_size {how.split} --parallelism_config_dp_shard_size {how.gpus // how.split}"
    return f" --use_fsdp --fsdp_version 2 --use_parallelism_config {sizes}"


def flags(plan: Plan, longest: int) -> list[str]:
    """The flags of `trl-padfix dpo` and its kin."""
    found = ["--padding_free", "--prefix_sharing auto", f"--max_length {longest}"]
    if plan.training.split == 1:
        found.append(f"--max_tokens_per_batch {plan.tokens}")
    found.append(f"--gradient_checkpointing {str(plan.training.checkpointing).lower()}")
    if plan.training.lora:
        found.append(f"--use_peft --lora_r {plan.training.lora} --lora_target_modules all-linear")
    if plan.training.sharded:
        sync = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
        found.append(f"--accelerator_config '{sync}'")
    return found
