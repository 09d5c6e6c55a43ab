"""
Plans a training: the memory of each GPU by item, and the sharding, checkpointing and token budget that fit.

Weights, gradients and moments follow from the parameters of the model, which is built on the meta device. The bytes of
a token are counted: [`count_step`] runs a step of the model on tensors without values.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..core.model.find import find_decoder
from .counted_step import CountedStep, StepSettings, count_step, experts_of, uncounted_mixers
from .reading import reading


__all__ = [
    "DataLengths",
    "Memory",
    "ModelSizes",
    "Plan",
    "Training",
    "accelerate_config",
    "check_experts",
    "flags",
    "load_sizes",
    "memory",
    "read_lengths",
    "smallest_fit",
    "splitting_flags",
    "training_command",
]

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


@dataclass(frozen=True)
class Training:
    """Settings of a training."""

    gpus: int = 1
    sharded: bool = False  # FSDP2 shards weights, gradients and moments over the GPUs; else each GPU has all
    checkpointing: bool = False
    lora: int = 0  # rank of adapters on all linear layers; 0 trains all weights
    quantized: bool = False  # QLoRA: the linear layers below the adapters are in four bits
    reference: bool = False  # whether there is a reference model; with adapters it needs no memory
    half: bool = True  # forwards in bfloat16, trained weights in float32; else everything in float32
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


def load_sizes(model: str) -> ModelSizes:
    """Load the sizes of a model from its Hub id, its folder, or its `config.json`."""
    with reading(f"the config of {model!r}", "Give the id of a model, its folder, or its `config.json`."):
        config = AutoConfig.from_pretrained(model)
        path, name = Path(model), model
        if path.is_file():
            name = json.loads(path.read_text()).get("_name_or_path") or str(path.parent)
        return ModelSizes.of(config, name)


def memory(sizes: ModelSizes, training: Training) -> Memory:
    """Memory of one GPU by item. docs/scaling.md explains the items."""
    size = 2 if training.half else 4
    shards = training.gpus // training.tensor_parallel if training.sharded else 1
    step = sizes.step(
        StepSettings(
            training.checkpointing, training.lora, training.quantized, autocast=training.half and not training.sharded,
            dtype=torch.bfloat16 if training.half else torch.float32, whole_head=not training.head_tokens,
        )
    )  # fmt: skip
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
    sizes: ModelSizes, *, gpus: int, available: int, longest: int, budget: int | None = None, may_split: bool = True,
    expert_parallel: int = 1, tensor_parallel: int = 1, **settings: Any,
) -> Plan:  # fmt: skip
    """
    Choose the simplest training that fits: unsharded before sharded, without checkpointing before with it. Rows are
    split over GPUs only if one GPU cannot hold the longest.

    Args:
        sizes ([`ModelSizes`]):
            Sizes of the model.
        gpus (`int`):
            Number of GPUs.
        available (`int`):
            Bytes of each GPU.
        longest (`int`):
            Largest number of tokens that one forward cannot divide: a row, or a pair.
        budget (`int`, *optional*):
            Token budget that must fit; by default the largest that fits is planned.
        may_split (`bool`):
            Whether rows may be split over GPUs.
        expert_parallel (`int`):
            GPUs that have the experts of a layer together, under FSDP2.
        tensor_parallel (`int`):
            GPUs that have each layer together; `gpus / tensor_parallel` such groups shard it with FSDP2.
        **settings:
            Other fields of [`Training`].

    Raises:
        ValueError: If nothing fits, or the experts cannot be distributed so. The message names what would do.
    """
    if expert_parallel > 1:
        check_experts(sizes, gpus, expert_parallel)
        settings, may_split = settings | {"expert_parallel": expert_parallel}, False
    if tensor_parallel > 1:
        if gpus % tensor_parallel:
            raise ValueError(f"{tensor_parallel} GPUs share each layer, and do not divide {gpus} GPUs.")
        sizes = sizes.of_one(tensor_parallel)
        settings, may_split = settings | {"tensor_parallel": tensor_parallel}, False
    if budget is not None and budget < longest:
        raise ValueError(f"A budget of {budget} tokens does not hold {longest}. Raise it, or lower `--max-length`.")
    needed = max(longest, budget or 0)
    search = _Search(sizes, available, settings, may_split)
    plans: list[Plan] = []
    shardings = (True,) if expert_parallel > 1 else (False, True)[: 1 if gpus == 1 else 2]
    if tensor_parallel > 1:
        shardings = (gpus > tensor_parallel,)
    for sharded, checkpointing in product(shardings, (False, True)):
        plans.append(search.plan(gpus, sharded, checkpointing))
        if plans[-1].tokens >= max(needed, budget or ENOUGH):
            break
    plan = max(plans, key=lambda p: p.tokens)
    if plan.tokens < needed:
        plans += search.split_plans(gpus)
        plan = next((p for p in plans if p.tokens >= needed), plan)
    if plan.tokens >= needed:
        return plan if budget is None else replace(plan, tokens=budget)
    least = min(plans, key=lambda p: p.memory.total(needed))
    remedies = search.remedies(gpus, needed)
    if plan.tokens:
        remedies.append(f"at most {plan.tokens} tokens in a forward (a lower `--max-length`)")
    raise ValueError(
        f"Nothing fits: with {needed} tokens in a forward the least that a GPU must hold is "
        f"{least.memory.total(needed) / 1e9:.1f} GB, and of {available / 1e9:.1f} GB {ROOM * available / 1e9:.1f} are "
        f"planned with. What would do: {'; or '.join(remedies) or 'larger GPUs'}."
    )


def check_experts(sizes: ModelSizes, gpus: int, size: int) -> None:
    """
    Raises:
        ValueError: If `size` GPUs cannot have the experts of a layer together.
    """
    experts, _ = experts_of(sizes.config)
    for count, of in ((gpus, "GPUs"), (experts, "experts of a layer")):
        if count % size or experts == 1:
            number = "no experts" if experts == 1 else f"{count} {of}"
            raise ValueError(f"{size} GPUs share the experts of a layer evenly, and there are {number}.")


@dataclass(frozen=True, eq=False)
class _Search:
    """Plans of a model on GPUs of one size."""

    sizes: ModelSizes
    available: int
    settings: dict[str, Any]  # fields of `Training`
    may_split: bool

    def plan(self, gpus: int, sharded: bool, checkpointing: bool, split: int = 1, **changes: Any) -> Plan:
        """The plan of a training, with the most tokens that fit: 0 if not even the model does."""
        training = Training(gpus, sharded, checkpointing, split=split, **self.settings | changes)
        bytes_needed = memory(self.sizes, training)
        room = int(ROOM * self.available) - bytes_needed.fixed
        tokens = room // bytes_needed.token // 256 * 256  # in steps of 256: a plan is no more exact than that
        return Plan(training, bytes_needed, max(tokens, 0), self.available)

    def frugal(self, gpus: int, **changes: Any) -> Plan:
        """The plan with the least memory whose rows are not split."""
        return self.plan(gpus, gpus > self.settings.get("tensor_parallel", 1), True, **changes)

    def split_plans(self, gpus: int) -> Iterator[Plan]:
        """Plans in which several GPUs compute a row together, the fewest first; then those whose checkpoints wait on
        the host."""
        # `cp_size` divides the number of GPUs; with more GPUs than heads some would have no head.
        most = min(gpus, self.sizes.config.num_attention_heads) if self.may_split else 0
        for offload, split in product((False, True), range(2, most + 1)):
            if gpus % split == 0:
                yield self.plan(gpus, True, True, split, offload=offload)

    def remedies(self, gpus: int, needed: int) -> list[str]:
        """Changes with which `needed` tokens fit, as words of an error message."""
        lora = self.settings.get("lora") or 16
        counts = [gpus * 2**i for i in range(1, MOST_GPUS.bit_length()) if gpus * 2**i <= MOST_GPUS]
        enough = (n for n in counts if any(p.tokens >= needed for p in (self.frugal(n), *self.split_plans(n))))
        remedies = [f"{n} GPUs of this size (`--gpus {n}`)" for n in islice(enough, 1)]
        if find_spec("peft") is None or self.settings.keys() & {"expert_parallel", "tensor_parallel"}:
            return remedies
        adapters = {"lora": lora, "reference": False}  # the policy without its adapters is the reference
        if not self.settings.get("lora") and self.frugal(gpus, **adapters).tokens >= needed:
            remedies.append(f"adapters (`--lora {lora}`)")
        if not self.settings.get("quantized") and self.frugal(gpus, **adapters, quantized=True).tokens >= needed:
            remedies.append(f"adapters on four-bit weights (`--lora {lora} --load-in-4bit`)")
        return remedies


@dataclass(frozen=True)
class DataLengths:
    """Lengths of data, from the figures of `trl-padfix stats`."""

    longest: int  # tokens of the longest row
    distinct_per_row: float | None  # mean over batches of the last size in the file; `None` without batches
    data: str  # name of the data


def read_lengths(path: Path, max_length: int | None) -> DataLengths:
    """
    Read the file that `trl-padfix stats --json` wrote.

    Raises:
        ValueError: If it is another file.
    """
    with path.open("rb") as file, reading(f"the figures {str(path)!r}", "Give what `trl-padfix stats --json` wrote."):
        figures = json.load(file)
    try:
        lengths = figures["lengths"]
        longest = int(lengths["sequence" if "sequence" in lengths else "text"]["max"])
        batches, data = figures["batches"], figures["data"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} has no {error}: give what `trl-padfix stats --json` wrote.") from error
    limits = [n for n in (longest, figures.get("max_length"), max_length) if n]
    per_row = [batch["distinct"] / batch["batch_size"] for batch in batches]
    return DataLengths(min(limits), per_row[-1] if per_row else None, data)


def training_command(plan: Plan, model: str, method: str, data: str, accelerate: Path, flags: list[str]) -> str:
    """
    The command that starts a planned training.

    Args:
        plan ([`Plan`]):
            Plan of the training.
        model (`str`):
            Value of `--model_name_or_path`.
        method (`str`):
            Command of `trl-padfix`.
        data (`str`):
            Name of the data, or a recipe.
        accelerate (`Path`):
            File of accelerate's configuration.
        flags (`list[str]`):
            Further flags, as of [`flags`].
    """
    launch = f"accelerate launch --config_file {shlex.quote(str(accelerate))}{splitting_flags(plan.training)}"
    if data.endswith((".yaml", ".yml")):
        source = ["--config", data]
    else:  # `--dataset_name` takes no single file
        source = ["--dataset_name", "DATA" if Path(data).is_file() else data]
    command = f"{launch} -m trl_padfix {method} {shlex.join(['--model_name_or_path', model, *source])}"
    return " \\\n  ".join([command, *flags])


def accelerate_config(training: Training, folder: Path) -> str:
    """Accelerate's configuration of a training, in YAML: one of those in `folder`, with its number of GPUs."""
    name = "fsdp2" if training.sharded else "multi_gpu" if training.gpus > 1 else "single_gpu"
    if training.loads_sharded:
        name = "multi_gpu"
    config = yaml.safe_load((folder / f"{name}.yaml").read_text()) | {"num_processes": training.gpus}
    return yaml.safe_dump(config, sort_keys=False)


def splitting_flags(training: Training) -> str:
    """Flags of `accelerate launch` for context parallelism; empty without it."""
    if training.split == 1:
        return ""
    shards = training.gpus // training.split
    sizes = f"--parallelism_config_cp_size {training.split} --parallelism_config_dp_shard_size {shards}"
    return f" --use_fsdp --fsdp_version 2 --use_parallelism_config {sizes}"


def flags(plan: Plan, longest: int | None, has_experts: bool = False, row_tokens: int = 1024) -> list[str]:
    """
    Flags of `trl-padfix dpo`, `sft` and so on for a plan.

    Args:
        plan ([`Plan`]):
            Plan of the training.
        longest (`int`, *optional*):
            `--max_length`; `None` for methods without it.
        has_experts (`bool`):
            Whether the model is a mixture of experts.
        row_tokens (`int`):
            Tokens of the longest row, or pair: under tensor parallelism a batch has a number of rows, not a budget.
    """
    training = plan.training
    result = ["--padding_free", "--prefix_sharing auto"]
    result += [f"--max_length {longest}"] if longest else []
    if training.tensor_parallel > 1:  # a budget is refused: the GPUs of a group have one batch
        result.append(f"--per_device_train_batch_size {max(1, plan.tokens // row_tokens)}")
    else:
        result.append(f"--max_tokens_per_batch {plan.tokens}")
    result.append(f"--activation_checkpointing {str(training.checkpointing).lower()}")
    if training.offload:
        result.append("""--activation_checkpointing_kwargs '{"offload": true}'""")
    if training.lora:
        result.append(f"--use_peft --lora_r {training.lora} --lora_target_modules all-linear --dtype bfloat16")
        result += ["--lora_dropout 0"] if has_experts else []  # PEFT puts adapters on experts without dropout only
    if training.quantized:
        result.append("--load_in_4bit" + " --bnb_4bit_quant_storage bfloat16" * training.sharded)
    if training.loads_sharded:
        sizes = {"fsdp_size": training.gpus // training.tensor_parallel, "tp_size": training.tensor_parallel}
        sizes = {name: n for name, n in (sizes | {"ep_size": training.expert_parallel}).items() if n > 1}
        more = {"tp_plan": "auto"} if training.tensor_parallel > 1 else {}
        more |= {"fsdp_mixed_precision": True} if training.sharded else {}
        config = json.dumps({"distributed_config": sizes | more})
        result += [f"--model_init_kwargs '{config}' --save_only_model true"]
    if training.sharded:
        sync = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
        result.append(f"--accelerator_config '{sync}'")
    return result
