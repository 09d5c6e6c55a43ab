"""Fields for generation in evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, GenerationMixin


__all__ = ["EvaluationConfig", "check_generation_settings"]


@dataclass
class EvaluationConfig:
    """Fields of the configurations whose trainers evaluate by generation and exactly; in front of the others."""

    exact_eval_means: bool = False
    predict_with_generate: bool = False
    generation_max_new_tokens: int = 256
    generation_kwargs: dict[str, Any] | str | None = None
    eval_generation_samples: int | None = None
    generation_rows_shown: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.predict_with_generate:
            check_generation_settings(self)


def check_generation_settings(config: Any) -> None:
    """Check the fields that say how to generate in evaluation, before there is a model."""
    for name in ("generation_max_new_tokens", "eval_generation_samples"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` must be a positive whole number, got {value!r}.")
    if not isinstance(config.generation_rows_shown, int) or config.generation_rows_shown < 0:
        raise ValueError(
            f"`generation_rows_shown` must be a whole number, 0 for none, got {config.generation_rows_shown!r}."
        )
    kwargs = config.generation_kwargs or {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"`generation_kwargs` must be a dictionary, got `{type(kwargs).__name__}`.")
    taken = {
        "max_new_tokens": "`generation_max_new_tokens` is the field for it",
        "max_length": "`generation_max_new_tokens` says how many tokens are generated after a prompt",
        "num_return_sequences": "every prompt has one prediction",
        "return_dict_in_generate": "only the tokens are kept",
        "inputs": "prompts come from the evaluation set",
    }
    for name in taken.keys() & kwargs.keys():
        raise ValueError(f"`generation_kwargs` holds `{name}={kwargs[name]!r}`: {taken[name]}. Leave it out.")
    fields, generate = set(GenerationConfig().to_dict()), getattr(GenerationMixin, "generate")  # noqa: B009
    unknown = sorted(kwargs.keys() - fields - set(inspect.signature(generate).parameters))
    if unknown:
        raise ValueError(
            f"`generation_kwargs` holds {unknown}, which neither `GenerationConfig` nor `generate` knows. Check the "
            "spelling."
        )
    GenerationConfig(**{name: value for name, value in kwargs.items() if name in fields})
