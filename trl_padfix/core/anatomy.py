"""
The parts of a model that padding removal works on, found within the wrappers of other libraries.

[`Anatomy`] holds the parts, and the functions `find_*` find them. The others are about what libraries put around a
model: PEFT, sentence-transformers (recognized by the table of modalities of its first module, without an import), FSDP
and ZeRO-3 (whose modules gather their parameters from other processes in each call). [`set_attention`] switches a
loaded model to another attention implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from .errors import require
from .mixers.mixers import Mixers
from .model.older import decoder_of
from .model.positions import length_dependent_ropes, position_embeddings


__all__ = [
    "ENCODERS", "Anatomy", "differentiates_in_parts", "find_decoder", "find_multimodal", "find_peft",
    "find_pretrained", "forward_by_name", "gathered_head", "gathers_in_parts", "outermost_pretrained",
    "peft_configs_in", "pipeline_in", "reset_gather_order", "reshard_parameters", "restore_attention",
    "scores_added_tokens", "set_attention",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Anatomy:
    """
    The parts of a model that padding removal works on.

    The properties search the model when they are first read: a model may be refused before a search that would fail.

    Attributes:
        pretrained ([`~transformers.PreTrainedModel`]):
            The transformers model, without a PEFT or other wrapper around it.
        decoder (`torch.nn.Module`):
            The text decoder between embeddings and head: the only part that runs packed.
        multimodal (`torch.nn.Module`, *optional*):
            The module around the decoder that turns images and other inputs into embeddings.
        peft_configs (`tuple`):
            Configurations of the PEFT adapters in the wrapper.
    """

    pretrained: PreTrainedModel
    decoder: Any  # an `nn.Module` with a `config`; transformers has no type for it
    multimodal: PreTrainedModel | None = None
    peft_configs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """
        The anatomy of `model`: a transformers model, or a module that contains one.

        The wrapper itself is not stored: handles keep the anatomy, and a deep copy of the model would copy it.

        Raises:
            TypeError: If there is no transformers model in `model`, or more than one.
        """
        pretrained = find_pretrained(model)
        decoder = find_decoder(pretrained)
        return cls(pretrained, decoder, find_multimodal(pretrained, decoder), peft_configs_in(model))

    @cached_property
    def mixers(self) -> Mixers:
        """The modules of the decoder that mix tokens."""
        return Mixers.of(self.decoder)

    @cached_property
    def position_tables(self) -> list[nn.Embedding]:
        """Embeddings that a decoder without `position_ids` calls with the positions of its columns."""
        return position_embeddings(self.decoder)

    @cached_property
    def length_dependent_ropes(self) -> list[nn.Module]:
        """Rotary embeddings whose frequencies depend on the largest position of a forward."""
        return list(length_dependent_ropes(self.decoder))

    @property
    def has_virtual_tokens(self) -> bool:
        """Whether a PEFT adapter puts learned tokens before every row (prompt tuning, p-tuning)."""
        return any(config.is_prompt_learning for config in self.peft_configs)

    @property
    def head(self) -> nn.Module | None:
        """The LM head of a model that itself calls its decoder or multimodal module; `None` for other models."""
        # BLIP-2 returns the head of the language model that it wraps, and that model calls the decoder. OPT's decoder
        # is within a module that the model bypasses.
        head, children = self.pretrained.get_output_embeddings(), [*self.pretrained.children()]
        return head if (self.multimodal or self.decoder) in children or head in children else None


def find_decoder(model: PreTrainedModel) -> Any:
    """The text decoder of a model: the module between the embeddings and the head."""
    decoder = decoder_of(model)
    if isinstance(decoder, PreTrainedModel) and decoder is not model and decoder.get_output_embeddings() is not None:
        return find_decoder(decoder)  # a language model with a head of its own (BLIP-2's)
    if not isinstance(decoder, PreTrainedModel) or decoder.get_output_embeddings() is not None:
        # `get_decoder` returns no decoder: some models call their output layer `decoder`, some return themselves.
        inner = [module for module in model.children() if isinstance(module, PreTrainedModel)]
        decoder = inner[0] if len(inner) == 1 else decoder
    return decoder


def find_pretrained(model: nn.Module) -> PreTrainedModel:
    """
    The one transformers model in `model`, a wrapper or the model itself.

    Raises:
        TypeError: If there is none, or more than one.
    """
    require(nn.Module, model=model)
    outermost = outermost_pretrained(model)
    if len(outermost) != 1:
        names = ", ".join(type(m).__name__ for m in outermost) or "none"
        raise TypeError(
            f"`remove_padding` takes a transformers model or a wrapper around one, and `{type(model).__name__}` "
            f"contains {names}. If there are several, attach to each, or to the decoder that they share."
        )
    return outermost[0]


def outermost_pretrained(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in `model`, without those that others contain (a decoder)."""
    if isinstance(model, PreTrainedModel):  # most steps need no walk over all modules
        return [model]
    found = list(dict.fromkeys(m for child in model.children() for m in outermost_pretrained(child)))
    inside = {inner for m in found for inner in m.modules() if inner is not m} if len(found) > 1 else set()
    return [m for m in found if m not in inside]


def find_peft(model: nn.Module) -> nn.Module | None:
    """PEFT's wrapper in `model`, or `model` itself; `None` without adapters of PEFT's own."""
    return next((module for module in model.modules() if hasattr(module, "get_base_model")), None)


def peft_configs_in(model: nn.Module) -> tuple[Any, ...]:
    """PEFT's configurations of all adapters of `model`, which PEFT keeps on its wrapper, by the adapter's name."""
    return tuple(c for m in model.modules() for c in (getattr(m, "peft_config", None) or {}).values())


def find_multimodal(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel | None:
    """The module of `model` that turns images and other inputs into embeddings for `decoder`, if it has one."""
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not decoder]
    around = [m for m in models if _is_composite(m.config) and any(inner is decoder for inner in m.modules())]
    return around[-1] if around else None  # the innermost: `modules()` lists outer ones first


def _is_composite(config: PretrainedConfig) -> bool:
    """Whether a config has a sub-config for its text decoder."""
    try:
        return config.get_text_config() is not config
    except ValueError:  # more than one text config
        return True


ENCODERS = (
    "sentence-transformers unpads encoders itself, with FlashAttention: "
    "`model_kwargs={'attn_implementation': 'flash_attention_2'}`"
)
"""Remedy in the refusal of encoders, whose tokens see later ones."""


def pipeline_in(model: nn.Module) -> nn.Sequential | None:
    """The pipeline of sentence-transformers in `model`: itself, or a module that a wrapper or a loss holds."""
    sequences = (m for m in model.modules() if isinstance(m, nn.Sequential) and len(m))
    return next((m for m in sequences if hasattr(m[0], "modality_config")), None)


def forward_by_name(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model`, called with keyword arguments; a pipeline itself takes one dictionary."""
    if (pipeline := pipeline_in(model)) is None:
        return model
    # Chat models have no modality "text"; each modality of tokens calls the same forward.
    modality = next(iter(pipeline[0].modality_config))  # type: ignore[call-overload]
    return lambda **inputs: model({**inputs, "modality": modality})


def scores_added_tokens(model: nn.Module) -> bool:
    """Whether a pipeline scores the tokens that it appends to queries, outside of the attention mask."""
    pipeline = pipeline_in(model)
    expansion = getattr(pipeline[0], "query_expansion", None) if pipeline is not None else None
    return bool(expansion) and not expansion.get("attend")


_UNITS = {"FSDPModule", "FullyShardedDataParallel"}


def gathers_in_parts(module: nn.Module) -> bool:
    """
    Whether modules inside `module` gather parameters when they are called: units of FSDP, or all under ZeRO-3.

    Gathering is a collective: a process that calls other modules than the rest, because of its rows, would hang.
    """
    names = {cls.__name__ for m in module.modules() if m is not module for cls in type(m).__mro__}
    return bool(names & _UNITS) or _is_of_zero_3(module)


def differentiates_in_parts(module: nn.Module) -> bool:
    """Whether hooks of FSDP or DeepSpeed take part in the backward pass of `module`."""
    names = {cls.__name__ for m in module.modules() for cls in type(m).__mro__}
    return bool(names & (_UNITS | {"DeepSpeedEngine"})) or _is_of_zero_3(module)


def reset_gather_order(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """
    Let ZeRO-3 record again in which order the modules of `model` gather their parameters; other models are unchanged.

    ZeRO-3 records the order in the first forwards and raises at a parameter out of order (DeepSpeed 0.19). TRL's loss
    reads the weight of the LM head in another place than a forward that returns logits. A module call after the last
    one of the recorded order discards the record: here, the embedding of the first of `ids`.
    """
    if _is_of_zero_3(model):
        model.get_input_embeddings()(ids[:1, :1])


def reshard_parameters(model: nn.Module) -> None:
    """
    Free the gathered parameters of FSDP units, so that their next forward gathers the current ones.

    After a forward without backward the outermost unit keeps its gathered parameters, even beyond an optimizer step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for unit in FullyShardedDataParallel.fsdp_modules(model, root_only=True):  # FSDP1 has no public function for it
        if unit._handle is not None and unit._handle.uses_sharded_strategy:
            _reshard(unit, unit._handle, True)


@contextmanager
def gathered_head(model: PreTrainedModel, decoder: nn.Module) -> Iterator[None]:
    """
    Gather an LM head that FSDP2 shards on its own after each forward of the decoder, for a loss that reads its weight.

    TRL's fused head (1.16) does not call the module and reads `weight.full_tensor()`. In backward each process then
    keeps only its own gradient for its shard, and nothing is averaged. The gradient of a head that is gathered is
    averaged at the end of backward. accelerate (1.15) shards the head together with the final norm, whose call gathers
    both; it shards the head on its own if it does not find that norm, as in models with images.
    """
    head: Any = model.get_output_embeddings()
    if not issubclass(type(head), FSDPModule):
        yield
        return

    def gather(*_: Any) -> None:
        if torch.is_grad_enabled() and isinstance(head.weight, DTensor) and head.weight.requires_grad:
            head.unshard()

    with decoder.register_forward_hook(gather):
        yield


def has_shards(module: nn.Module) -> bool:
    """Whether FSDP1 (empty parameters), FSDP2 or ZeRO-3 shards the weights of a module."""
    return _is_of_zero_3(module) or any(p.numel() == 0 or isinstance(p, DTensor) for p in module.parameters())


def _is_of_zero_3(module: nn.Module) -> bool:
    return any("ds_id" in vars(parameter) for parameter in module.parameters())


def set_attention(model: nn.Module, implementation: dict[str, str] | str) -> list[tuple[PretrainedConfig, str | None]]:
    """
    Switch a loaded model to another attention implementation.

    Returns:
        `list`: the configurations of the model, each with its implementation before: for [`restore_attention`].

    Raises:
        ValueError: If the model cannot be switched after loading.
    """
    if "auto" in (implementation.values() if isinstance(implementation, dict) else [implementation]):
        raise ValueError(
            "`attn_implementation='auto'` is for the trainers of trl_padfix. Name one, for instance 'sdpa'."
        )
    pretrained = find_pretrained(model)
    # The parts of a vision model have configurations of their own, and several modules may share one.
    configs = {id(m.config): m.config for m in pretrained.modules() if isinstance(m, PreTrainedModel)}.values()
    before = [(config, config._attn_implementation_internal) for config in configs]
    names = ["", *pretrained.config.sub_configs]
    wanted = dict.fromkeys(names, implementation) if isinstance(implementation, str) else implementation
    parts = {name: getattr(pretrained.config, name) if name else pretrained.config for name in wanted}
    if all(part is None or part._attn_implementation == wanted[name] for name, part in parts.items()):
        return before
    current = str(pretrained.config._attn_implementation)
    pretrained.set_attn_implementation(implementation)
    # transformers only warns if it cannot switch, so compare. With a kernel of the Hub ("org/name") equal names are no
    # sign of failure: the kernel may be registered for the requested name already.
    if "/" not in current and all(config._attn_implementation_internal == name for config, name in before):
        raise ValueError(
            f"{type(pretrained).__name__} cannot be switched to `attn_implementation={implementation!r}` once it is "
            f"loaded; it runs with {current!r}. Load it with that implementation: pass its id, or "
            "`from_pretrained(..., attn_implementation=...)`."
        )
    return before


def restore_attention(before: list[tuple[PretrainedConfig, str | None]]) -> None:
    """Undo [`set_attention`], which returned `before`."""
    for config, name in before:
        config._attn_implementation_internal = name
