"""
Random models, and tokenizers trained on given texts, for recipes and benchmarks that run offline.

A recipe builds its model in its output folder: once, and it does not reuse it for other settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets.fingerprint import Hasher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ..files import write_whole_folder


__all__ = [
    "CHAT_TEMPLATE", "SHAPES", "build_qwen2", "build_tiny", "built_once", "texts_of", "train_tokenizer",
]  # fmt: skip

TRAINED = ("prompt", "chosen", "rejected", "completion", "text", "messages")
"""Columns that hold text or messages."""

RECORD = "built_from.json"
"""File in the folder of a model with the settings that it was built from."""

PAD, EOS, START = "<|pad|>", "<|end|>", "<|start|>"

UNKNOWN = "<|endoftext|>"
"""The token that `AutoTokenizer` adds to the tokenizer of any Qwen2; a model without it would lack an embedding."""

_MESSAGE = (
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}" + EOS
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}" + "{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}" + _MESSAGE + "{% endgeneration %}"
    "{% else %}" + _MESSAGE + "{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + f"{START}assistant\n" + "{% endif %}"
)
"""Chat template. Messages of the assistant with their end token are marked for `assistant_only_loss`."""

SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(layers=2, hidden_size=128, heads=4, kv_heads=2, intermediate_size=352, vocab_size=2048),
    "small": dict(layers=6, hidden_size=512, heads=8, kv_heads=2, intermediate_size=1408, vocab_size=8192),
}
"""Shapes of Qwen2 for CPUs."""

_FIELDS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
"""Names in a shape, and the fields of transformers' configurations."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Train a byte-level BPE tokenizer with pad and EOS tokens and a chat template.

    The vocabulary has at most `vocab_size` entries, special tokens included; with little text it has fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes: no text has unknown tokens
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, special_tokens=[PAD, EOS, START], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([UNKNOWN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )


def build_qwen2(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """
    Build a randomly initialized Qwen2 for a tokenizer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer with the special tokens, and with the vocabulary unless `shape` has a `vocab_size`.
        seed (`int`):
            Seed of the weights. The global generator keeps its state.
        **shape:
            One of [`SHAPES`], and other fields of [`~transformers.Qwen2Config`].
    """
    fields = dict(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,  # Qwen2 begins no text with a token
    ) | {_FIELDS.get(name, name): value for name, value in shape.items()}
    with torch.random.fork_rng(devices=[]):  # of the CPU only
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**fields, tie_word_embeddings=True))


def built_once(directory: str | Path, built_from: dict[str, Any], build: Callable[[Path], object]) -> str:
    """
    Build a model and its tokenizer in a folder, or reuse them if they were built from equal settings.

    The folder appears complete or not at all. With several processes, the main one builds it.

    Args:
        directory (`str` or `Path`):
            Folder of the model.
        built_from (`dict`):
            Everything that the model depends on, as JSON can store it. It is saved in the folder.
        build (`Callable`):
            Function that saves model and tokenizer in the empty folder that it gets.

    Returns:
        `str`: The folder.

    Raises:
        ValueError: If the folder holds a model that was built from other settings.
    """
    directory, text = Path(directory), json.dumps(built_from, indent=2) + "\n"
    # As with `use_cpu=True`. Otherwise, on a machine without a GPU, accelerate counts one process.
    with PartialState(cpu=not torch.accelerator.is_available()).main_process_first():
        if not any(directory.glob("*")):  # also a folder that `tempfile.mkdtemp` has made
            write_whole_folder(directory, lambda beside: (build(beside), (beside / RECORD).write_text(text)))
    record = directory / RECORD
    if not record.exists() or record.read_text() != text:
        raise ValueError(
            f"{str(directory)!r} exists, and was built from other data or settings, or by another program. Delete it "
            "to build it again, or choose another folder."
        )
    return str(directory)


def build_tiny(shape: str, rows: Any, directory: str | Path) -> str:
    """
    Train a tokenizer on the data, build a random Qwen2 for it, and save both like a downloaded model.

    For trying things out: no download, and seconds on a CPU. A folder that holds the same model already is kept.

    Args:
        shape (`str`):
            `"tiny"` or `"small"`.
        rows (`Iterable[dict]`):
            Rows of any of TRL's formats.
        directory (`str` or `Path`):
            Folder of the model.

    Returns:
        `str`: the folder, for `from_pretrained` or a trainer.

    Raises:
        ValueError: For an unknown shape.

    Example:

    ```python
    from datasets import load_dataset
    from trl_padfix import build_tiny

    pairs = load_dataset("recipes/data/preferences", split="train")
    folder = build_tiny("tiny", pairs, "runs/tiny")
    ```
    """
    if shape not in SHAPES:
        raise ValueError(f"`build_tiny` has the shapes {', '.join(SHAPES)}, but none is called {shape!r}.")

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer(texts_of(rows), SHAPES[shape]["vocab_size"])
        tokenizer.save_pretrained(folder)
        build_qwen2(tokenizer, **SHAPES[shape] | {"vocab_size": len(tokenizer)}).save_pretrained(folder)

    texts = Hasher.hash([*texts_of(rows)])
    return built_once(directory, {"tiny_model": shape, **SHAPES[shape], "texts": texts}, build)


def texts_of(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """All text of rows, plain or conversational, to train a tokenizer on."""
    for value in (row[name] for row in rows for name in TRAINED if row.get(name)):
        for message in [{"content": value}] if isinstance(value, str) else value:
            content = message.get("content") or ""
            yield from [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
            yield from (json.dumps(call) for call in message.get("tool_calls") or ())
