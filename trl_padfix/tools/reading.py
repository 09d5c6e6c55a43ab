"""
What a user names is read by libraries: rows, YAML, tokenizers, weights. Whatever they raise becomes one error that
says what could not be read and why.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


__all__ = ["TRUSTING_NOTHING", "UnreadableError", "load_model", "load_tokenizer", "package_of", "reading", "reason"]

TRUSTING_NOTHING = {"trust_remote_code": False, "use_safetensors": True}
"""How a model is loaded: no code that lies beside it, no pickles."""

_PACKAGE = Path(__file__).parents[1]
_LONGEST = 600


class UnreadableError(ValueError):
    """Something that the user named cannot be read; the message says what, why and what to do."""


@contextmanager
def reading(what: str, advice: str) -> Iterator[None]:
    """
    Make whatever the libraries in the block raise an [`UnreadableError`], which names `what` is read (with its path or
    id) and what to do (`advice`, a sentence). What our own code raises is left as it is.
    """
    try:
        yield
    except UnreadableError:
        raise
    except Exception as error:
        if package_of(error) == _PACKAGE.name:
            raise
        raise UnreadableError(f"{what} cannot be read: {reason(error).rstrip('.')}. {advice}") from error


def reason(error: BaseException) -> str:
    """What an error says, in one line; where a library only says that something failed, what that was caused by."""
    while error.__cause__ is not None and type(error).__module__.startswith("datasets"):
        error = error.__cause__
    text = " ".join(str(error).split())
    if not text or isinstance(error, (KeyError, AttributeError, IndexError, TypeError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def package_of(error: BaseException) -> str | None:
    """The installed package whose code raised an error, past the standard library's; `None` if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if _PACKAGE in path.parents:
            return _PACKAGE.name
        if "site-packages" in path.parts:
            return path.parts[path.parts.index("site-packages") + 1].removesuffix(".py")
        if path.suffix in (".pxi", ".pyx"):  # compiled code names its source relative to its project
            return path.parts[0]
    return None


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or Hub id; code that lies there is not run."""
    from transformers import AutoTokenizer

    advice = "Give a folder with `tokenizer.json` (or the id of a Hub model that has one)."
    with reading(f"the tokenizer {name!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        ids = tokenizer("a text", add_special_tokens=False)["input_ids"]
    if not ids:  # transformers makes a tokenizer without a vocabulary for a model folder that has none
        raise UnreadableError(f"the tokenizer {name!r} makes no token of any text: its files are missing. {advice}")
    return tokenizer


def load_model(name: str, **how: Any) -> Any:
    """The causal language model of a folder or Hub id: weights from safetensors alone, and no code that lies there."""
    from transformers import AutoModelForCausalLM

    advice = (
        "Give a folder with `config.json` and whole `.safetensors` weights of a causal language model, or a Hub id of "
        "one; weights in pickles (`pytorch_model.bin`) and code beside a model are not loaded."
    )
    with reading(f"the model {name!r}", advice):
        return AutoModelForCausalLM.from_pretrained(name, **TRUSTING_NOTHING, **how)
