"""Fields of a configuration and arguments of a trainer that are of another type than is meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import ProcessorMixin


__all__ = ["check_field_types", "check_processing_class"]

FLAGS = (bool, bool | None, "bool", "bool | None")

OURS = ("padding_free", "prefix_sharing", "parity_check", "stop_on_nonfinite", "predict_with_generate",
        "exact_eval_means", "pool_last_token")  # fmt: skip


def check_field_types(config: Any) -> None:
    """
    Check fields that Python would take for something else.

    Args:
        config ([`DPOConfig`] or another, *optional*):
            A configuration of this package, or of TRL.

    Raises:
        TypeError: For a flag that is neither `True` nor `False` (every string that is not empty counts as true), and
            for `model_init_kwargs` that are no mapping.
    """
    if not is_dataclass(config):
        return
    for field in fields(config):
        value = getattr(config, field.name, None)
        if field.type not in FLAGS or value in (None, False, True):
            continue
        if field.name in OURS or str(value).strip().lower() in ("true", "false"):  # some of TRL's take others
            raise TypeError(
                f"`{field.name}={value!r}` is of type `{type(value).__name__}`, and a flag is True or False: Python "
                f"takes {value!r} for {bool(value)}. Write `{field.name}={_meant(value)}`."
            )
    given = getattr(config, "model_init_kwargs", None)
    if given is not None and not isinstance(given, (Mapping, str)):
        raise TypeError(
            f"`model_init_kwargs={given!r}` is of type `{type(given).__name__}`, and the keyword arguments of "
            "`from_pretrained` are a dictionary. Write `model_init_kwargs={'dtype': 'bfloat16'}`, for instance."
        )


def _meant(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "yes", "on", "1")


def check_processing_class(processing_class: Any) -> None:
    """
    Raises:
        TypeError: If `processing_class` is no tokenizer and no processor.
    """
    if processing_class is None or isinstance(processing_class, ProcessorMixin):
        return
    if not (callable(processing_class) and hasattr(processing_class, "pad_token")):
        raise TypeError(
            f"`processing_class` is a `{type(processing_class).__name__}`, and a tokenizer or processor is needed. "
            "Pass `AutoTokenizer.from_pretrained(...)`, or leave it out: TRL then loads that of the model."
        )
