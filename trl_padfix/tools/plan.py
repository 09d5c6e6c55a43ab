"""
Plans a training: the memory of each GPU by item, and the sharding, checkpointing and token budget that fit.

Weights, gradients and moments follow from the parameters of the model ([`ModelSizes`]), which is built on the meta
device. The bytes of a token are counted: [`count_step`] runs a step of the model on tensors without values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice, product
from typing import Any

from .counted_step import StepSettings, experts_of
from .model_sizes import ModelSizes


__all__ = ["Memory", "Plan", "Training", "check_experts", "memory", "smallest_fit"]

ROOM = 0.92
"""Fraction of a GPU's memory to plan with. The rest is for the CUDA context, kernels and gaps of the allocator."""

ENOUGH = 4096
"""Tokens of a forward above which more tokens hardly make a step faster."""

MOST_GPUS = 4096
"""Largest number of GPUs that an error message proposes."""

ON_DEVICE = 1
"""Offloaded checkpoints that are on the GPU at one time: that of the layer which is computed again."""

FOUR_BITS = 0.5 + 4 / 64
"""Bytes of a weight in bitsandbytes' four bits: half a byte, and a float32 scale per 64 weights (not nested)."""


@dataclass(frozen=True)
class Training:
    """Settings of a training."""

    gpus: int = 1
    sharded: bool = False  # FSDP2 shards weights, gradients and moments over the GPUs; else each GPU has all
    checkpointing: bool = False
    lora: int = 0  # rank of adapters on all linear layers; 0 trains all weights
    quantized: bool = False  # QLoRA: the linear layers below the adapters are in four bits
    reference: bool = False  # whether there is a reference model; with adapters it needs no memory
    head_tokens: int = 1024  # tokens whose logits exist at the same time; 0 for all of a forward
    split: int = 1  # GPUs that compute a packed row together (accelerate's `cp_size`)
    expert_parallel: int = 1  # GPUs that have the experts of a layer together (transformers' `ep_size`)
    tensor_parallel: int = 1  # GPUs that have each layer together (`tp_size`); the sizes are then those `of_one`
    offload: bool = False  # checkpoints wait on the host

    @property
    def loads_sharded(self) -> bool:
        """Whether the model shards itself when it is loaded (transformers' `DistributedConfig`)."""
        return max(self.expert_parallel, self.tensor_parallel) > 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU: `items` independent of the tokens of a forward, and the cost `per_token`."""

    items: dict[str, int]
    per_token: dict[str, int]

    @property
    def fixed(self) -> int:
        return sum(self.items.values())

    @property
    def token(self) -> int:
        return sum(self.per_token.values())

    def total(self, tokens: int) -> int:
        """Bytes with this number of tokens in a forward."""
        return self.fixed + tokens * self.token


@dataclass(frozen=True)
class Plan:
    """A training that fits."""

    training: Training
    memory: Memory
    tokens: int  # tokens of a forward: the budget, or the largest number that fits
    available: int  # bytes of a GPU

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.memory.total(self.tokens)}


def memory(sizes: ModelSizes, training: Training) -> Memory:
    """Memory of one GPU by item. docs/scaling.md explains the items."""
    size = 2  # of what is frozen, and of what a forward gathers, in bfloat16; trained weights are in float32
    shards = training.gpus // training.tensor_parallel if training.sharded else 1
    step = sizes.step(
        StepSettings(
            checkpointing=training.checkpointing,
            lora=training.lora,
            quantized=training.quantized,
            autocast=not training.sharded,
            whole_head=not training.head_tokens,
        )
    )
    trained = step.trained if training.lora else sizes.parameters
    # Weight, gradient and two moments: in float32 4 * 4 bytes. TRL casts adapters on quantized layers to bfloat16.
    items = {"weights, gradients, moments": (8 if training.quantized else 16) * trained // shards}
    frozen = size * sizes.parameters
    if training.quantized:
        frozen += int((FOUR_BITS - size) * sizes.linear_weights)
    if training.lora:
        items["frozen weights"] = frozen // shards
    elif training.reference:
        items["reference"] = 4 * sizes.parameters // shards  # in float32, as the policy
    if training.sharded:
        # FSDP2 gathers the next layer while one computes; under accelerate the LM head stays gathered in between.
        # Experts of other GPUs are not gathered: tokens go to them.
        pairs = zip(sizes.layer_parameters, sizes.layer_experts, strict=True)
        largest = max(layer - experts + experts // training.expert_parallel for layer, experts in pairs)
        layer = frozen * largest // sizes.parameters
        items["gathered layers, LM head"] = 2 * layer + size * sizes.head_parameters
    items["copies while it computes"] = step.fixed
    if training.head_tokens:  # scores, their log-softmax and its gradient, in float32
        items["scores"] = 3 * 4 * sizes.config.vocab_size * training.head_tokens
    name, kept = "checkpoints" if training.checkpointing else "activations", step.kept
    if training.offload:
        layers = sizes.config.num_hidden_layers
        kept -= step.kept_by_layer * max(layers - ON_DEVICE, 0)
    per_token = {name: kept, "at the peak": step.working}
    if training.expert_parallel > 1:  # the states of a token go to each of its experts, and come back
        per_token["exchanged"] = 2 * size * sizes.config.hidden_size * experts_of(sizes.config)[1]
    return Memory(items, {item: round(n / training.split) for item, n in per_token.items()})


def smallest_fit(
    sizes: ModelSizes, base: Training, *, available: int, longest: int, budget: int | None = None,
    may_split: bool = True,
) -> Plan:  # fmt: skip
    """
    Choose the simplest training that fits: unsharded before sharded, without checkpointing before with it. Rows are
    split over GPUs only if one GPU cannot hold the longest.

    Args:
        sizes ([`ModelSizes`]):
            Sizes of the model; under tensor parallelism those [`~ModelSizes.of_one`] GPU.
        base ([`Training`]):
            The GPUs, what is trained, and how layers are distributed. Sharding, checkpointing, split rows and
            offloading are chosen.
        available (`int`):
            Bytes of each GPU.
        longest (`int`):
            Largest number of tokens that one forward cannot divide: a row, or a pair.
        budget (`int`, *optional*):
            Token budget that must fit; by default the largest that fits is planned.
        may_split (`bool`):
            Whether rows may be split over GPUs. With experts or layers of several GPUs they are not.

    Raises:
        ValueError: If nothing fits. The message names what would do.
    """
    if budget is not None and budget < longest:
        raise ValueError(f"A budget of {budget} tokens does not hold {longest}. Raise it, or lower `--max-length`.")
    needed = max(longest, budget or 0)
    search = _Search(sizes, base, available, may_split and not base.loads_sharded)
    plans: list[Plan] = []
    for sharded, checkpointing in product(_shardings(base), (False, True)):
        plans.append(search.plan(replace(base, sharded=sharded, checkpointing=checkpointing)))
        if plans[-1].tokens >= max(needed, budget or ENOUGH):
            break
    plan = max(plans, key=lambda p: p.tokens)
    if plan.tokens < needed:
        plans += search.split_plans(base.gpus)
        plan = next((p for p in plans if p.tokens >= needed), plan)
    if plan.tokens >= needed:
        return plan if budget is None else replace(plan, tokens=budget)
    least = min(plans, key=lambda p: p.memory.total(needed))
    remedies = search.remedies(needed)
    if plan.tokens:
        remedies.append(f"at most {plan.tokens} tokens in a forward (a lower `--max-length`)")
    raise ValueError(
        f"Nothing fits: with {needed} tokens in a forward the least that a GPU must hold is "
        f"{least.memory.total(needed) / 1e9:.1f} GB, and of {available / 1e9:.1f} GB {ROOM * available / 1e9:.1f} are "
        f"planned with. What would do: {'; or '.join(remedies) or 'larger GPUs'}."
    )


def _shardings(base: Training) -> tuple[bool, ...]:
    """Whether FSDP2 may shard the training, the simpler choice first."""
    if base.expert_parallel > 1:
        return (True,)
    if base.tensor_parallel > 1:  # groups of GPUs shard what one group has
        return (base.gpus > base.tensor_parallel,)
    return (False, True) if base.gpus > 1 else (False,)


def check_experts(sizes: ModelSizes, gpus: int, size: int) -> None:
    """Raise a `ValueError` if `size` of the GPUs cannot have the experts of a layer together."""
    experts, _ = experts_of(sizes.config)
    for count, of in ((gpus, "GPUs"), (experts, "experts of a layer")):
        if count % size or experts == 1:
            number = "no experts" if experts == 1 else f"{count} {of}"
            raise ValueError(f"{size} GPUs share the experts of a layer evenly, and there are {number}.")


@dataclass(frozen=True, eq=False)
class _Search:
    """Plans of a model on GPUs of one size."""

    sizes: ModelSizes
    base: Training
    available: int
    may_split: bool

    def plan(self, training: Training) -> Plan:
        """The plan of a training, with the most tokens that fit: 0 if not even the model does."""
        bytes_needed = memory(self.sizes, training)
        room = int(ROOM * self.available) - bytes_needed.fixed
        tokens = room // bytes_needed.token // 256 * 256  # in steps of 256: a plan is no more exact than that
        return Plan(training, bytes_needed, max(tokens, 0), self.available)

    def frugal(self, **changes: Any) -> Plan:
        """The plan with the least memory whose rows are not split."""
        training = replace(self.base, checkpointing=True, **changes)
        return self.plan(replace(training, sharded=training.gpus > training.tensor_parallel))

    def split_plans(self, gpus: int) -> Iterator[Plan]:
        """Plans in which several GPUs compute a row together, the fewest first; then those whose checkpoints wait on
        the host."""
        # `cp_size` divides the number of GPUs; with more GPUs than heads some would have no head.
        most = min(gpus, self.sizes.config.num_attention_heads) if self.may_split else 0
        training = replace(self.base, gpus=gpus, sharded=True, checkpointing=True)
        for offload, split in product((False, True), range(2, most + 1)):
            if gpus % split == 0:
                yield self.plan(replace(training, split=split, offload=offload))

    def remedies(self, needed: int) -> list[str]:
        """Changes with which `needed` tokens fit, as words of an error message."""
        base = self.base
        counts = [base.gpus * 2**i for i in range(1, MOST_GPUS.bit_length()) if base.gpus * 2**i <= MOST_GPUS]
        enough = (n for n in counts if any(p.tokens >= needed for p in (self.frugal(gpus=n), *self.split_plans(n))))
        remedies = [f"{n} GPUs of this size (`--gpus {n}`)" for n in islice(enough, 1)]
        if find_spec("peft") is None or base.loads_sharded:
            return remedies
        lora = base.lora or 16
        adapters = {"lora": lora, "reference": False}  # the policy without its adapters is the reference
        if not base.lora and self.frugal(**adapters).tokens >= needed:
            remedies.append(f"adapters (`--lora {lora}`)")
        if not base.quantized and self.frugal(**adapters, quantized=True).tokens >= needed:
            remedies.append(f"adapters on four-bit weights (`--lora {lora} --load-in-4bit`)")
        return remedies
