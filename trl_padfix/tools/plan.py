"""
What a training needs of each GPU's memory, and the sharding, checkpointing and token budget that fit.

Weights, gradients and moments follow from the parameters of the model, built without memory. What a token costs is
counted: [`count_step`] runs a step of the model without numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .counted_step import Numbers, Step, count_step, experts_of
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

MOST_GPUS = 4096
"""Most GPUs that are looked for when fewer do not do."""

FOUR_BITS = 0.5 + 4 / 64
"""Bytes of a weight in bitsandbytes' four bits, with a float32 scale for each 64 (no nested quantization)."""


@dataclass(frozen=True, eq=False)
class ModelSizes:
    """What the memory of a model follows from."""

    config: Any  # of the text model
    name: str  # what `--model_name_or_path` is given
    parameters: int  # tied ones once
    active: int  # those that compute a token: all but the experts that it is not sent to
    layer_parameters: tuple[int, ...]  # those of each decoder layer
    head_parameters: int
    linear_weights: int  # of all linear layers but the LM head: what `--load_in_4bit` quantizes
    steps: dict[Numbers, Step] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: Any, name: str = "") -> ModelSizes:
        """The sizes of a text model whose layers attend; no memory is taken for its weights."""
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or [])
        if mixers := sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind):
            raise NotImplementedError(
                f"A plan counts models whose layers attend, and `{text.model_type}` has layers of {mixers}: what "
                "their kernels keep is not known without a GPU. `trl-padfix bench --trainer sft --shape hybrid` "
                "prints what the steps of a small model of such layers hold."
            )
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(text)
        head = model.get_output_embeddings()
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == text.num_hidden_layers)
        parameters = sum(p.numel() for p in model.parameters())
        experts, used = experts_of(text)
        of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        return cls(
            config=text,
            name=name,
            parameters=parameters,
            active=parameters - of_experts * (experts - used) // experts,
            layer_parameters=tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
            head_parameters=head.weight.numel(),
            linear_weights=sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and m is not head),
        )

    def step(self, how: Numbers) -> Step:
        """[`count_step`], once for each way to compute."""
        if how not in self.steps:
            self.steps[how] = count_step(self.config, how, self._counted_layers())
        return self.steps[how]

    def _counted_layers(self) -> tuple[int, int]:
        """Two numbers of layers after which the rest repeats those between them."""
        sizes = self.layer_parameters
        for first, period in product(range(1, len(sizes)), (1, 2, 4)):
            if first + period <= len(sizes) and sizes[first:-period] == sizes[first + period :]:
                return first, first + period
        return len(sizes), len(sizes)


@dataclass(frozen=True)
class Training:
    """How a model is trained."""

    gpus: int = 1
    sharded: bool = False  # weights, gradients and moments, over the GPUs (FSDP2); else each has all
    checkpointing: bool = False
    lora: int = 0  # rank of adapters on all linear layers; 0 trains all weights
    quantized: bool = False  # the linear layers below the adapters in four bits (QLoRA)
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
    tokens: int  # of a forward: the budget, or the most that there is room for
    available: int  # bytes of a GPU

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.memory.total(self.tokens)}


def load_sizes(model: str) -> ModelSizes:
    """The sizes of a model by its name, its folder, or the file of its config."""
    with reading(f"the config of {model!r}", "Give the id of a model, its folder, or its `config.json`."):
        config = AutoConfig.from_pretrained(model)
        path, name = Path(model), model
        if path.is_file():
            name = json.loads(path.read_text()).get("_name_or_path") or str(path.parent)
        return ModelSizes.of(config, name)


def memory(sizes: ModelSizes, how: Training) -> Memory:
    """Memory of one GPU by item, as docs/scaling.md explains them."""
    size = 2 if how.half else 4
    shards = how.gpus if how.sharded else 1
    step = sizes.step(
        Numbers(
            how.checkpointing, how.lora, how.quantized, autocast=how.half and not how.sharded,
            dtype=torch.bfloat16 if how.half else torch.float32, whole_head=not how.head_tokens,
        )
    )  # fmt: skip
    # TRL makes adapters on quantized layers bfloat16; else what is trained and its moments are float32.
    items = {"weights, gradients, moments": (8 if how.quantized else 16) * step.trained // shards}
    frozen = size * sizes.parameters
    if how.quantized:
        frozen += int((FOUR_BITS - size) * sizes.linear_weights)
    if how.lora:
        items["frozen weights"] = frozen // shards
    elif how.reference:
        items["reference"] = 4 * sizes.parameters // shards  # of the type of the policy
    if how.sharded:
        # Of the layers one computes and one is on its way; accelerate does not give the LM head back in between.
        layer = frozen * max(sizes.layer_parameters) // sizes.parameters
        items["gathered layers, LM head"] = 2 * layer + size * sizes.head_parameters
    items["copies while it computes"] = step.fixed
    if how.head_tokens:  # scores, their log-softmax and its gradient, in float32
        items["scores"] = 3 * 4 * sizes.config.vocab_size * how.head_tokens
    kept = "checkpoints" if how.checkpointing else "activations"
    per_token = {kept: step.kept, "at the peak": step.working}
    return Memory(items, {name: round(n / how.split) for name, n in per_token.items()})


def smallest_fit(
    sizes: ModelSizes, *, gpus: int, available: int, longest: int, budget: int | None = None, may_split: bool = True,
    **how: Any,
) -> Plan:  # fmt: skip
    """
    The simplest training that fits: without sharding before with it, without checkpointing before with it; rows split
    over GPUs only where one GPU does not hold the longest.

    `available` are the bytes of each GPU, and `longest` the most tokens of what a forward cannot part: it must hold
    them, and those of the `budget`, if there is one. `how` are other fields of [`Training`].

    Raises:
        ValueError: If nothing fits; it says what would.
    """
    if budget is not None and budget < longest:
        raise ValueError(f"A budget of {budget} tokens does not hold {longest}. Raise it, or lower `--max-length`.")
    needed = max(longest, budget or 0)

    def planned(sharded: bool, checkpointing: bool, gpus: int = gpus, split: int = 1, **more: Any) -> Plan:
        training = Training(gpus, sharded, checkpointing, split=split, **how | more)
        held = memory(sizes, training)
        tokens = (int(ROOM * available) - held.fixed) // held.token // 256 * 256
        return Plan(training, held, max(tokens, 0), available)

    def with_shared_rows(gpus: int) -> Iterator[Plan]:
        for split in range(2, min(gpus, sizes.config.num_attention_heads) + 1 if may_split else 0):
            if gpus % split == 0:
                yield planned(True, True, gpus, split)

    def frugal(gpus: int = gpus, **more: Any) -> Plan:
        return planned(gpus > 1, True, gpus, **more)

    found: list[Plan] = []
    for sharded, checkpointing in product((False, True)[: 1 if gpus == 1 else 2], (False, True)):
        found.append(planned(sharded, checkpointing))
        if found[-1].tokens >= max(needed, budget or ENOUGH):
            break
    plan = max(found, key=lambda p: p.tokens)
    if plan.tokens < needed:
        found += with_shared_rows(gpus)
        plan = next((p for p in found if p.tokens >= needed), plan)
    if plan.tokens >= needed:
        return plan if budget is None else replace(plan, tokens=budget)

    least = min(found, key=lambda p: p.memory.total(needed))
    lora = how.get("lora") or 16
    more = [gpus * 2**i for i in range(1, MOST_GPUS.bit_length()) if gpus * 2**i <= MOST_GPUS]
    enough = (n for n in more if any(p.tokens >= needed for p in (frugal(n), *with_shared_rows(n))))
    would = [f"{n} GPUs of this size (`--gpus {n}`)" for n in islice(enough, 1)]
    has_peft = find_spec("peft") is not None
    if has_peft and not how.get("lora") and frugal(lora=lora, reference=False).tokens >= needed:
        would.append(f"adapters (`--lora {lora}`)")
    if has_peft and not how.get("quantized") and frugal(lora=lora, reference=False, quantized=True).tokens >= needed:
        would.append(f"adapters on four-bit weights (`--lora {lora} --load-in-4bit`)")
    if plan.tokens:
        would.append(f"at most {plan.tokens} tokens in a forward (a lower `--max-length`)")
    raise ValueError(
        f"Nothing fits: with {needed} tokens in a forward the least that a GPU must hold is "
        f"{least.memory.total(needed) / 1e9:.1f} GB, and of {available / 1e9:.1f} GB {ROOM * available / 1e9:.1f} are "
        f"planned with. What would do: {'; or '.join(would) or 'larger GPUs'}."
    )


def splitting_flags(how: Training) -> str:
    """The flags of `accelerate launch` with which GPUs share packed rows; none if they do not."""
    if how.split == 1:
        return ""
    sizes = f"--parallelism_config_cp_size {how.split} --parallelism_config_dp_shard_size {how.gpus // how.split}"
    return f" --use_fsdp --fsdp_version 2 --use_parallelism_config {sizes}"


def flags(plan: Plan, longest: int | None, rows: int = 1, has_experts: bool = False) -> list[str]:
    """
    The flags of `trl-padfix dpo` and its kin; a forward cannot part `rows` of at most `longest` tokens, if that is a
    setting of the method.
    """
    how = plan.training
    found = ["--padding_free", "--prefix_sharing auto"]
    found += [f"--max_length {longest}"] if longest else []
    if how.split == 1:
        found.append(f"--max_tokens_per_batch {plan.tokens}")
    else:  # a budget splits no rows that several GPUs compute together
        found.append(f"--per_device_train_batch_size {max(1, plan.tokens // ((longest or plan.tokens) * rows))}")
    found.append(f"--gradient_checkpointing {str(how.checkpointing).lower()}")
    if how.lora:
        found.append(f"--use_peft --lora_r {how.lora} --lora_target_modules all-linear --dtype bfloat16")
        found += ["--lora_dropout 0"] if has_experts else []  # PEFT puts adapters on experts without dropout only
    if how.quantized:
        found.append("--load_in_4bit" + " --bnb_4bit_quant_storage bfloat16" * how.sharded)
    if how.sharded:
        sync = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
        found.append(f"--accelerator_config '{sync}'")
    return found
