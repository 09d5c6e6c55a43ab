"""
The bytes that a training step holds, counted without a GPU and without the memory.

A step of the model runs on tensors that have shapes and types but no numbers (torch's `FakeTensorMode`): transformers,
PEFT and autograd allocate and free what they would allocate and free. Attention keeps what FlashAttention keeps;
4-bit layers are stand-ins that make a layer's weights for each product and forget them, as bitsandbytes does.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..trainers.temporary_attributes import temporarily_set
from .reading import package_of, reason


try:
    from transformers.integrations import moe
except ImportError:  # before transformers 5
    moe = None


__all__ = ["CountedStep", "StepSettings", "count_step", "experts_of"]

TOKENS = (256, 65536)
"""Of the two steps that are counted. The most that is held is convex in the tokens (with few of them it is at the LM
head, with many in a layer), so that in between the line through both is no less than it."""

ATTENTION = "padfix_counted"

DROPOUT = 0.05
"""Of adapters: TRL's `lora_dropout`."""


@dataclass(frozen=True)
class StepSettings:
    """How a step computes: what its bytes depend on."""

    checkpointing: bool = False
    lora: int = 0  # rank of adapters on all linear layers; 0 trains all weights
    quantized: bool = False  # frozen linear layers in 4 bits
    autocast: bool = True  # trained weights are float32 and products bfloat16; else all has `dtype`
    dtype: torch.dtype = torch.bfloat16
    whole_head: bool = False  # scores of all tokens at once


@dataclass(frozen=True)
class CountedStep:
    """Bytes that a step holds beside weights, gradients and moments."""

    trained: int  # parameters, no bytes
    kept: float  # of each token, from its forward to its backward
    working: float  # of each token beside these, when most is held
    fixed: int  # whatever the tokens


def count_step(config: Any, how: StepSettings, layers: tuple[int, int]) -> CountedStep:
    """
    What a step of a text model holds; no memory is taken for it.

    It is counted with two numbers of `layers`: each layer beyond them holds as much as one of those by which they
    differ.

    Raises:
        NotImplementedError: If the model cannot be built or run as a decoder of one long row, or not without numbers:
            what it computes depends on them.
    """
    try:
        few, many = (_count(_with_layers(config, n), how) for n in layers)
    except Exception as error:
        if package_of(error) == __name__.partition(".")[0]:
            raise
        raise NotImplementedError(
            f"A step of `{config.model_type}` with this configuration cannot be counted: {reason(error)}"
        ) from error
    more = (config.num_hidden_layers - layers[0]) / max(layers[1] - layers[0], 1)
    trained, kept, peak, fixed = (a + (b - a) * more for a, b in zip(few, many, strict=True))
    return CountedStep(round(trained), kept, peak - kept, max(0, round(fixed)))


def _count(config: Any, how: StepSettings) -> tuple[float, float, float, float]:
    """Trained parameters, bytes that a token keeps, bytes of a token at the peak, and bytes whatever the tokens."""
    with torch.device("meta"), _counted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these libraries say is for those who train
        model = _build(config, how)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # prints the traceback of what is raised anyway
    with FakeTensorMode(), _counted(), temporarily_set(log, "disabled", True):
        _put_on_cpu(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        try:
            (few, least), (many, most) = (_run(model, how, tokens) for tokens in TOKENS)
        except DataDependentOutputException as error:
            raise NotImplementedError(
                f"A step of `{config.model_type}` cannot be counted: what it allocates depends on numbers ({error})."
            ) from error
    more = TOKENS[1] - TOKENS[0]
    peak = (most - least) / more
    return sum(p.numel() for p in trained), (many - few) / more, peak, least - TOKENS[0] * peak


def _with_layers(config: Any, layers: int) -> Any:
    """The configuration of a model with that many of its layers."""
    cut = deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(cut, name, value[:layers])
    cut.num_hidden_layers = layers
    return cut


def experts_of(config: Any) -> tuple[int, int]:
    """How many experts a layer has, and to how many of them a token is sent; ones for a model without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((n for n in (getattr(config, name, None) for name in names) if n), 1)
    return count, min(getattr(config, "num_experts_per_tok", None) or count, count)


def _build(config: Any, how: StepSettings) -> nn.Module:
    config.dtype = how.dtype if how.lora or not how.autocast else torch.float32
    has_experts = experts_of(config)[0] > 1
    experts = {"experts_implementation": "grouped_mm"} if has_experts and moe else {}
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, **experts)
    if how.quantized:
        head = model.get_output_embeddings()
        for module in [m for m in model.modules() if type(m) is nn.Linear and m is not head]:
            module.__class__ = _FourBit
    if how.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if how.lora:
        from peft import LoraConfig, get_peft_model

        dropout = 0 if has_experts else DROPOUT  # PEFT puts adapters on experts without dropout only
        adapters = LoraConfig(r=how.lora, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=how.autocast)
        for parameter in (p for p in model.parameters() if p.requires_grad and how.quantized):
            parameter.data = parameter.data.bfloat16()  # as TRL does on quantized layers
        if how.checkpointing:
            model.enable_input_require_grads()
    return model.train()


def _put_on_cpu(model: nn.Module) -> None:
    """Tensors of the CPU, as autocast and kernels tell devices apart, for those of a model that was built on none."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    there = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                tensors[name] = known[id(tensor)]


def _run(model: nn.Module, how: StepSettings, tokens: int) -> tuple[int, int]:
    """Bytes held between a forward and its backward, and the most at any time."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    there = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers(), ids]
    scored: dict[str, Any] = {"labels": ids} if how.whole_head else {"logits_to_keep": 1}
    with _LiveBytes(there) as held:
        with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
            out = model(input_ids=ids, use_cache=False, **scored)
        loss = out.loss if how.whole_head else out.logits.float().sum()
        del out
        kept = held.now
        loss.backward()
    return kept, held.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operations allocate, until it is freed."""

    def __init__(self, there: list[torch.Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self._known = {id(tensor.untyped_storage()) for tensor in there}
        self._there = [tensor.untyped_storage() for tensor in there]  # so that no other one gets their ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes()).atexit = False

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextmanager
def _counted() -> Iterator[None]:
    """Attention under a name that no mask is made for, and products of experts that can be made without numbers."""
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = _attend
    try:
        with temporarily_set(moe, "_can_use_grouped_mm", lambda *args: False):
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION]


def _attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    return _Attention.apply(query, key, value), None


class _Attention(torch.autograd.Function):
    """What FlashAttention keeps: queries, keys, values, outputs `(B, T, N, D)` and a sum for each query."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class _FourBit(nn.Linear):
    """A frozen layer whose weights are made for each product; the bytes of its 4 bits are counted elsewhere."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any) -> Any:
        ctx.weight = weight
        return input @ torch.empty_like(weight).T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ torch.empty_like(ctx.weight), None
