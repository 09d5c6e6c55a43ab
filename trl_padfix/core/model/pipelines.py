"""
Models of sentence-transformers: a transformers model, followed by modules that pool its states.

They are recognized without an import of sentence-transformers, by the table of modalities of their first module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


__all__ = ["ENCODERS", "by_name", "padding_reader", "pipeline_in"]

ENCODERS = (
    "sentence-transformers unpads encoders itself, with FlashAttention: "
    "`model_kwargs={'attn_implementation': 'flash_attention_2'}`"
)
"""Remedy in the refusal of encoders, whose tokens see later ones."""


def pipeline_in(model: nn.Module) -> nn.Sequential | None:
    """The pipeline of sentence-transformers in `model`: itself, or a module that a wrapper or a loss holds."""
    sequences = (m for m in model.modules() if isinstance(m, nn.Sequential) and len(m))
    return next((m for m in sequences if hasattr(m[0], "modality_config")), None)


def by_name(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model`, called with keyword arguments; a pipeline itself takes one dictionary."""
    if (pipeline := pipeline_in(model)) is None:
        return model
    # Chat models have no modality "text"; each modality of tokens calls the same forward.
    modality = next(iter(pipeline[0].modality_config))  # type: ignore[call-overload]
    return lambda **inputs: model({**inputs, "modality": modality})


def padding_reader(model: nn.Module) -> str | None:
    """
    The reader of the states of padding in a pipeline, in words; `None` if there is none. A packed forward has zeros
    there.

    Runs the modules after the transformer on states of two short rows, with and without the states of padding: in
    evaluation and in training, and for each task that a module knows. Buffers, modes and random state stay.
    """
    pipeline = pipeline_in(model)
    if pipeline is None or getattr(pipeline[0], "module_output_name", None) != "token_embeddings":
        return None
    expansion = getattr(pipeline[0], "query_expansion", None)
    if expansion and not expansion.get("attend"):
        return "`query_expansion` scores tokens outside of the attention mask (set its `attend`)"
    weight = next(pipeline[0].parameters())
    devices = [weight.device] if weight.device.type == "cuda" else []
    modules = list(pipeline)[1:]  # a list, because a slice of a pipeline is a new pipeline
    with torch.no_grad(), torch.random.fork_rng(devices), ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                stack.callback(setattr, part, "training", part.training)
            for buffer in module.buffers():
                stack.callback(buffer.copy_, buffer.clone())
        for task, training in itertools.product(_tasks(modules), (False, True)):
            for module in modules:
                module.train(training)
            if reader := _first_difference(pipeline[0], modules, weight, task):
                return reader
    return None


def _tasks(modules: list[nn.Module]) -> list[str | None]:
    """The values of `task` for which a pipeline may compute something else: routes, or queries and documents."""
    routers = [part for module in modules for part in module.modules() if hasattr(part, "sub_modules")]
    tasks: list[str | None] = [*dict.fromkeys(route for router in routers for route in router.sub_modules)]  # type: ignore[union-attr]
    if not tasks and any(map(_takes_task, modules)):
        tasks = ["query", "document"]
    return tasks if any(router.default_route is None for router in routers) else [None, *tasks]


def _takes_task(module: nn.Module) -> bool:
    return "task" in getattr(module, "forward_kwargs", ())


def _first_difference(first: Any, modules: list[Any], weight: torch.Tensor, task: str | None) -> str | None:
    """The first module after which the values of real tokens, or of rows, depend on the states of padding."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=weight.device)
    if getattr(getattr(first, "tokenizer", None), "padding_side", "right") == "left":
        mask = mask.flip(1)
    states = torch.randn(*mask.shape, first.get_embedding_dimension(), device=weight.device, dtype=weight.dtype)
    row = {"attention_mask": mask, "input_ids": mask, "modality": "text", "prompt_length": 1}
    # The outputs of a padded and of a packed forward.
    features: list[Any] = [row | {"token_embeddings": values} for values in (states, states * mask.unsqueeze(-1))]
    for module in modules:
        kwargs = {"task": task} if task and _takes_task(module) else {}
        name, computed = f"`{type(module).__name__}` after it", []
        for values in features:
            torch.manual_seed(0)  # the same dropout for both
            try:
                computed.append(module(dict(values), **kwargs))
            except Exception as error:
                return f"{name} may read the states of padding: on two short rows it raised {error!r}"
        features = computed
        if any(not torch.equal(a, b) for a, b in zip(*(_values(x, mask) for x in features), strict=True)):
            return f"{name} reads the states of padding"
    return None


def _values(features: dict[str, Any], mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of rows and of real tokens in the features of a pipeline."""
    for value in features.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value[mask.bool()] if value.shape[:2] == mask.shape else value
