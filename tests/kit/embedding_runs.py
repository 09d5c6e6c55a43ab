"""Tiny embedding models and rerankers of sentence-transformers, their trainers, and what these log."""

from __future__ import annotations

import random
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from kit.trainer_runs import SETTINGS, WORDS, build_model, lora, words
from packaging.version import Version
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder import losses as reranking
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer import losses as embedding
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import PrinterCallback, TrainerCallback

from trl_padfix.tools.tiny import train_tokenizer


INSTRUCTION = "w30 w31 w32 w33 w34 "
"""What all queries begin with."""

LOSSES = {
    "in-batch negatives": embedding.MultipleNegativesRankingLoss,
    "pairs": reranking.BinaryCrossEntropyLoss,
}


def _transformer(folder: Path, padding_side: str, task: str = "feature-extraction", kind: str = "causal") -> Any:
    """The first module of a pipeline, loaded from a folder as every model of sentence-transformers is."""
    # Of bytes: what is loaded beside a Qwen2 splits text as Qwen2 does. Without a chat template rows are plain texts.
    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 320)
    tokenizer.chat_template = None
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = build_model(
        kind, attn_implementation="sdpa", vocab_size=len(tokenizer), max_position_embeddings=512, **ids
    )
    (model.model if task == "feature-extraction" else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = Transformer(str(folder), transformer_task=task)
    transformer.tokenizer.padding_side = padding_side  # a saved tokenizer has none
    return transformer


def build_embedder(folder: Path, pooling: str = "lasttoken", padding_side: str = "right", *after: Any) -> Any:
    """A `SentenceTransformer` on a random decoder, with the modules `after` between the decoder and the pooling."""
    transformer = _transformer(folder, padding_side)
    pipeline = [transformer, *after, Pooling(transformer.get_embedding_dimension(), pooling)]
    return SentenceTransformer(modules=pipeline, device="cpu")


def build_reranker(folder: Path, kind: str) -> Any:
    """A `CrossEncoder` on a random decoder, with a score head or with the logits of two words."""
    if kind == "classifier":
        transformer, head = _transformer(folder, "right", "sequence-classification", "reward"), []
    else:  # sentence-transformers takes no other side for these
        transformer, head = _transformer(folder, "left", "text-generation"), [LogitScore(7, 8)]
    return CrossEncoder(modules=[transformer, *head], device="cpu")


def with_lora(model: Any) -> Any:
    needed = getattr(import_module("transformers.integrations.peft"), "MIN_PEFT_VERSION", "0")
    if Version(version("peft")) < Version(needed):
        pytest.skip(f"this transformers adds adapters with PEFT {needed} or later only")
    torch.manual_seed(0)
    model.add_adapter(lora(target_modules=["q_proj", "v_proj"]))
    return model


def triplets(count: int) -> Dataset:
    draw = random.Random(0)
    columns = {"anchor": (1, 9), "positive": (1, 20), "negative": (1, 20)}
    return Dataset.from_dict({name: [words(draw, *r) for _ in range(count)] for name, r in columns.items()})


def scored_pairs(count: int) -> Dataset:
    """Few long queries with many documents each."""
    draw = random.Random(0)
    asked = [words(draw, 9, 14) for _ in range(2)]
    rows = [{"query": draw.choice(asked), "document": words(draw, 1, 9)} for _ in range(count)]
    return Dataset.from_list([row | {"label": float(draw.random() < 0.5)} for row in rows])


def build_trainer(folder: Path, model: Any, loss: str, trainer_class: Any = None, **settings: Any) -> Any:
    """The trainer of sentence-transformers for a model and one of [`LOSSES`]; or another class in its place."""
    is_embedder = isinstance(model, SentenceTransformer)
    config_class = SentenceTransformerTrainingArguments if is_embedder else CrossEncoderTrainingArguments
    given = {name: settings.pop(name) for name in ("callbacks", "eval_dataset") if name in settings}
    of_embedder = {"prompts": {"anchor": INSTRUCTION}} if is_embedder else {}
    config = {"per_device_train_batch_size": 8} | of_embedder | SETTINGS | settings
    fields = config_class.__dataclass_fields__
    args = config_class(str(folder / "run"), **{k: v for k, v in config.items() if k in fields})
    data = triplets(40) if is_embedder else scored_pairs(40)
    trainer_class = trainer_class or (SentenceTransformerTrainer if is_embedder else CrossEncoderTrainer)
    trainer = trainer_class(model, args=args, train_dataset=data, loss=LOSSES[loss](model), **given)
    trainer.remove_callback(PrinterCallback)
    # Writes a model card from its own evaluation of example rows, which is no part of the training.
    for callback in [c for c in trainer.callback_handler.callbacks if "ModelCard" in type(c).__name__]:
        if isinstance(callback, TrainerCallback):
            trainer.remove_callback(callback)
    return trainer
