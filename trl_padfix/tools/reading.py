"""
Read rows, YAML, tokenizers and weights that a user names.

Libraries read them. Any error that they raise becomes one [`UnreadableError`], with what could not be read and why.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import is_missing_path


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["SAFE_LOADING", "UnreadableError", "load_model", "load_tokenizer", "package_of", "reading", "reason"]
__all__ += ["shortened"]

SAFE_LOADING = {"trust_remote_code": False, "use_safetensors": True}
"""Arguments of `from_pretrained`: no code from the model's folder is run, and no pickle is loaded."""

_PACKAGE = Path(__file__).parents[1]
_NOT_ON_HUB = r"(?:Couldn't reach|Dataset) '([^']+)' (?:on the Hub|doesn't exist on the Hub)"
_MAX_REASON = 1200
"""Characters of a library's message that are repeated: the metrics of an evaluation in DPO, listed, have 900."""


class UnreadableError(ValueError):
    """A file, folder or Hub id of the user cannot be read; the message says which, why, and what to do."""


@contextmanager
def reading(what: str, advice: str) -> Iterator[None]:
    """
    Turn the errors of libraries in the block into an [`UnreadableError`]; errors of this package pass unchanged.

    Args:
        what (`str`):
            The object that is read, with its path or id.
        advice (`str`):
            A sentence that tells the user what to do.
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
    """The message of an error in one line. Errors of `datasets` often name the failed step only: then of its cause."""
    while error.__cause__ is not None and type(error).__module__.startswith("datasets"):
        error = error.__cause__
    text = " ".join(str(error).split())
    # Of a name with at most one slash, `datasets` speaks of the Hub alone, where a folder may have been meant.
    if type(error).__module__.startswith(("datasets", "builtins")) and (name := re.search(_NOT_ON_HUB, text)):
        text = f"{text.rstrip('.')}, and there is no folder {name[1]!r} here ({Path.cwd()})"
    # The message of a `KeyError` is only the key: the name of its class says what is wrong.
    if not text or isinstance(error, (KeyError, AttributeError, IndexError, TypeError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shortened(text, _MAX_REASON)


def shortened(text: str, length: int) -> str:
    """A text of one line, cut after a word if it is longer than `length` characters."""
    # A word as long as that (a row of a file, in base64) is cut all the same.
    return text if len(text) <= length else f"{text[: length + 1].rpartition(' ')[0] or text[:length]} [...]"


def package_of(error: BaseException) -> str | None:
    """The installed package whose code raised an error, skipping the standard library; `None` if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if _PACKAGE in path.parents:
            return _PACKAGE.name
        if "site-packages" in path.parts:
            return path.parts[path.parts.index("site-packages") + 1].removesuffix(".py")
        if path.suffix in (".pxi", ".pyx"):  # compiled code names its source relative to its project
            return path.parts[0]
    return None


def _refuse_missing(what: str, name: str, advice: str) -> None:
    if is_missing_path(name):  # transformers would look for it on the Hub
        raise UnreadableError(f"{what} cannot be read: there is no such folder here ({Path.cwd()}). {advice}")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hub id without running code from there."""
    from transformers import AutoTokenizer

    advice = "Give a folder with `tokenizer.json` (or the id of a Hub model that has one)."
    _refuse_missing(f"the tokenizer {name!r}", name, advice)
    with reading(f"the tokenizer {name!r}", advice):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        ids = tokenizer("a text", add_special_tokens=False)["input_ids"]
    if not ids:  # for a folder without tokenizer files transformers returns a tokenizer without a vocabulary
        raise UnreadableError(f"the tokenizer {name!r} makes no token of any text: its files are missing. {advice}")
    return tokenizer


def load_model(name: str, **options: Any) -> PreTrainedModel:
    """Load the causal language model of a folder or Hub id, from safetensors and without running code from there."""
    from transformers import AutoModelForCausalLM

    advice = (
        "Give a folder with `config.json` and whole `.safetensors` weights of a causal language model, or a Hub id of "
        "one; weights in pickles (`pytorch_model.bin`) and code beside a model are not loaded."
    )
    _refuse_missing(f"the model {name!r}", name, advice)
    with reading(f"the model {name!r}", advice):
        return AutoModelForCausalLM.from_pretrained(name, **SAFE_LOADING, **options)
