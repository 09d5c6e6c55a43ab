"""
Counts the bytes of a training step without a GPU and without allocating them.

A step of the model runs on tensors with shapes and types but without values (torch's `FakeTensorMode`). Transformers,
PEFT and autograd allocate and free as in a training. A stand-in for attention saves the tensors that FlashAttention
saves, those for gated delta nets what the kernels of flash-linear-attention save. Stand-ins for 4-bit layers create a
layer's weights for each product and free them, as bitsandbytes does.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.mixers.mixers import FORKED, PACKED, Mixers
from ..core.mixers.primitives import LEFT_OUT, primitives_of
from ..trainers.temporary_attributes import temporarily_set
from .kernel_stand_ins import STAND_INS, FourBit, attend
from .reading import package_of, reason


try:
    from transformers.integrations import moe
except ImportError:  # before transformers 5
    moe = None


__all__ = ["CountedStep", "StepSettings", "count_step", "experts_of", "uncounted_mixers"]

TOKENS = (256, 65536)
"""
Tokens of the two steps that are counted. Peak memory is convex in the tokens, as a maximum of lines: with few tokens
the LM head has the peak, with many a layer. So between the two the line through both is an upper bound.
"""

ATTENTION = "padfix_counted"
"""Name of the stand-in for attention."""

DROPOUT = 0.05
"""Dropout of adapters: the default of TRL's `lora_dropout`."""


@dataclass(frozen=True)
class StepSettings:
    """Settings that the bytes of a step depend on."""

    checkpointing: bool = False
    lora: int = 0  # rank of adapters on all linear layers; 0 trains all weights
    quantized: bool = False  # frozen linear layers in 4 bits
    autocast: bool = True  # trained weights in float32, products in bfloat16; else everything in `dtype`
    dtype: torch.dtype = torch.bfloat16
    whole_head: bool = False  # logits of all tokens exist at the same time


@dataclass(frozen=True)
class CountedStep:
    """Bytes of a step beside weights, gradients and moments."""

    trained: int  # number of trained parameters, not bytes
    kept: float  # per token, saved from forward to backward
    kept_by_layer: float  # of these, those of one layer: its checkpoint, if layers are checkpointed
    working: float  # per token, in addition to `kept` at the peak
    fixed: int  # independent of the tokens


def count_step(config: PretrainedConfig, settings: StepSettings, layers: tuple[int, int]) -> CountedStep:
    """
    Count the bytes of a step of a text model.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Configuration of the model.
        settings ([`StepSettings`]):
            Settings of the step.
        layers (`tuple[int, int]`):
            Two numbers of layers to count with. Each further layer adds the mean of the layers between the two.

    Raises:
        NotImplementedError: If the model cannot be built or run as a decoder of one long row, or if its allocations
            depend on the values of tensors.
    """
    try:
        few, many = (_count(_with_layers(config, n), settings) for n in layers)
    except Exception as error:
        if package_of(error) == __name__.partition(".")[0]:
            raise
        raise NotImplementedError(
            f"A step of `{config.model_type}` with this configuration cannot be counted: {reason(error)}"
        ) from error
    more = (config.num_hidden_layers - layers[0]) / max(layers[1] - layers[0], 1)
    trained, kept, peak, fixed = (a + (b - a) * more for a, b in zip(few, many, strict=True))
    kept_by_layer = (many[1] - few[1]) / max(layers[1] - layers[0], 1)
    return CountedStep(round(trained), kept, kept_by_layer, peak - kept, max(0, round(fixed)))


def _count(config: PretrainedConfig, settings: StepSettings) -> tuple[float, float, float, float]:
    """Trained parameters, saved bytes per token, peak bytes per token, and bytes independent of the tokens."""
    with torch.device("meta"), _counted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about training, which does not happen
        model = _build(config, settings)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs the traceback of errors that are raised, too
    with FakeTensorMode(), _counted(), _counted_recurrences(model), temporarily_set(log, "disabled", True):
        _put_on_cpu(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)  # exists already: gradients are an item of the plan
        try:
            (few, least), (many, most) = (_run(model, settings, tokens) for tokens in TOKENS)
        except DataDependentOutputException as error:
            raise NotImplementedError(
                f"A step of `{config.model_type}` cannot be counted: what it allocates depends on numbers ({error})."
            ) from error
    more = TOKENS[1] - TOKENS[0]
    peak = (most - least) / more
    return sum(p.numel() for p in trained), (many - few) / more, peak, least - TOKENS[0] * peak


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Configuration with the first `layers` layers, lists with a value for each layer included."""
    cut = deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(cut, name, value[:layers])
    cut.num_hidden_layers = layers
    return cut


def experts_of(config: PretrainedConfig) -> tuple[int, int]:
    """Experts of a layer, and experts that a token is routed to; `(1, 1)` for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((n for n in (getattr(config, name, None) for name in names) if n), 1)
    return count, min(getattr(config, "num_experts_per_tok", None) or count, count)


def _build(config: PretrainedConfig, settings: StepSettings) -> nn.Module:
    config.dtype = settings.dtype if settings.lora or not settings.autocast else torch.float32
    has_experts = experts_of(config)[0] > 1
    experts = {"experts_implementation": "grouped_mm"} if has_experts and moe else {}
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, **experts)
    if settings.quantized:
        head = model.get_output_embeddings()
        for module in [m for m in model.modules() if type(m) is nn.Linear and m is not head]:
            module.__class__ = FourBit
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if settings.lora:
        from peft import LoraConfig, get_peft_model

        dropout = 0 if has_experts else DROPOUT  # PEFT supports adapters on experts only without dropout
        adapters = LoraConfig(
            r=settings.lora, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapters, autocast_adapter_dtype=settings.autocast)
        for parameter in (p for p in model.parameters() if p.requires_grad and settings.quantized):
            parameter.data = parameter.data.bfloat16()  # as TRL does on quantized layers
        if settings.checkpointing:
            model.enable_input_require_grads()
    return model.train()


def _put_on_cpu(model: nn.Module) -> None:
    """Replace the meta tensors of a model by CPU tensors: autocast and kernels are chosen by device."""
    replaced: dict[int, torch.Tensor] = {}  # tied weights are one tensor, and must stay one
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replaced[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                tensors[name] = replaced[id(tensor)]


def _run(model: nn.Module, settings: StepSettings, tokens: int) -> tuple[int, int]:
    """Live bytes between a forward and its backward, and the largest number at any time."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    existing = [
        *model.parameters(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        *model.buffers(),
        ids,
    ]
    head: dict[str, Any] = {"labels": ids} if settings.whole_head else {"logits_to_keep": 1}
    with _LiveBytes(existing) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast):
            out = model(input_ids=ids, use_cache=False, **head)
        loss = out.loss if settings.whole_head else out.logits.float().sum()
        del out  # only what the graph saves remains
        kept = live.now
        loss.backward()
    return kept, live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the live bytes that operations within the block have allocated; `existing` tensors do not count."""

    def __init__(self, existing: list[torch.Tensor]):
        super().__init__()
        self.now = self.peak = 0
        # The storages themselves are kept, too: otherwise a new storage could get the id of a dead one.
        self._existing = [tensor.untyped_storage() for tensor in existing]
        self._ids = {id(storage) for storage in self._existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._ids:
            return
        self._ids.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        # Nothing reads the count at exit.
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes()).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._ids.discard(key)
        self.now -= size


@contextmanager
def _counted() -> Iterator[None]:
    """Register the stand-in for attention, for which transformers builds no mask, and grouped products of experts."""
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = attend
    try:
        # transformers then computes grouped products in a way that runs on fake tensors.
        with temporarily_set(moe, "_can_use_grouped_mm", lambda *args: False):
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION]


def uncounted_mixers(decoder: nn.Module) -> list[str]:
    """Classes of mixers whose kernels save an unknown number of bytes."""
    others = [mixer for mixer in Mixers.of(decoder).mixers if mixer.mode != PACKED]
    return sorted(
        {
            type(mixer.module).__name__
            for mixer in others
            if mixer.mode != FORKED or primitives_of(mixer.module) - LEFT_OUT - STAND_INS.keys()
        }
    )


@contextmanager
def _counted_recurrences(model: nn.Module) -> Iterator[None]:
    """Replace the functions that mixers call by stand-ins."""
    with ExitStack() as stack:
        for module in {sys.modules[type(m).__module__] for m in model.modules()}:
            for name in STAND_INS.keys() & vars(module).keys():
                stack.enter_context(temporarily_set(module, name, STAND_INS[name]))
        yield
