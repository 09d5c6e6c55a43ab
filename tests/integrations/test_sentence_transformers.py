"""Embedding models and rerankers of sentence-transformers on decoders: its numbers, without padding."""

from __future__ import annotations

import random
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest


pytest.importorskip("sentence_transformers")

import torch
from datasets import Dataset
from kit.observe import entered_tokens
from kit.tolerance import CONTROL, assert_close, tolerance
from kit.trainer_runs import SETTINGS, WORDS, break_mode, build_model, lora, train_beside_plain, words
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

from trl_padfix import PaddingRemovalError, check_parity, remove_padding
from trl_padfix.tools.tiny import train_tokenizer


INSTRUCTION = "w30 w31 w32 w33 w34 "
"""What all queries begin with."""

LOSSES = {"in-batch negatives": embedding.MultipleNegativesRankingLoss, "pairs": reranking.BinaryCrossEntropyLoss}


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


DEPTH = {"terms": 64, "depth": 2 * 8 * 3}
"""Sums of two layers and a head, with their backward, as in `tolerance`."""

MODELS = {
    "last token, right": lambda folder: build_embedder(folder, "lasttoken", "right"),
    "mean, left": lambda folder: build_embedder(folder, "mean", "left"),
    "mean, right, LoRA": lambda folder: with_lora(build_embedder(folder, "mean", "right")),
    "reranker, score head": lambda folder: build_reranker(folder, "classifier"),
    "reranker, logits of yes and no": lambda folder: build_reranker(folder, "yes and no"),
}


def rows_of(model):
    """Rows that have much in common, and the texts that they are made of."""
    texts = triplets(12)["positive"]
    if isinstance(model, SentenceTransformer):
        return [INSTRUCTION + text for text in texts]
    return [(INSTRUCTION * 2, text) for text in texts]  # one query with many documents


def outputs(model):
    """Embeddings or scores of all rows in one batch, and the gradient of every weight."""
    model.zero_grad()
    features = model.preprocess(rows_of(model))
    out = model(features)["sentence_embedding" if isinstance(model, SentenceTransformer) else "scores"]
    (out.flatten() * torch.linspace(-1, 1, out.numel())).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return out.detach(), torch.cat(gradients), features["attention_mask"]


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_scores_and_gradients_are_those_of_the_padded_model(name, tmp_path, monkeypatch):
    model = MODELS[name](tmp_path).eval()
    out, gradients, mask = outputs(model)
    is_left = "left" in name or "yes and no" in name
    assert (mask[:, 0] == 0).any() == is_left
    ids = model.preprocess(rows_of(model))["input_ids"]
    rows = [tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, mask, strict=True)]
    prefixes = {row[: i + 1] for row in rows for i in range(len(row))}
    for sharing, tokens in ((False, sum(map(len, rows))), (True, len(prefixes))):
        with remove_padding(model, prefix_sharing=sharing) as handle, entered_tokens(model) as entered:
            ours, our_gradients, _ = outputs(model)
        assert_close(ours, out, **DEPTH)
        assert (our_gradients - gradients).norm() <= tolerance(float(gradients.norm()), **DEPTH)
        assert list(entered) == [tokens]
        assert handle.stats.padded_tokens == mask.numel() > tokens
        assert not handle.stats.padded_forwards
    break_mode(monkeypatch, "prefix sharing")
    with remove_padding(model, prefix_sharing=True):
        wrong, wrong_gradients, _ = outputs(model)
    assert_close(out, out, **DEPTH, control=wrong)
    assert (wrong_gradients - gradients).norm() > CONTROL * tolerance(float(gradients.norm()), **DEPTH)


@pytest.mark.parametrize(
    ("way", "name", "loss"),
    [("callback", "last token, right", "in-batch negatives"), ("trainer", "reranker, score head", "pairs")],
)
def test_the_callback_and_the_trainer_compare_log_and_train_the_same(way, name, loss, tmp_path, monkeypatch):
    def make(**given):
        return build_trainer(tmp_path, MODELS[name](tmp_path / name), loss, **{"max_steps": 2} | given)

    train_beside_plain(way, make, monkeypatch)


class LastColumn(Pooling):
    """A pooling that adds the states of the last column, which are padding in most rows."""

    def forward(self, features, **kwargs):
        last = features["token_embeddings"][:, -1]
        pooled = super().forward(features, **kwargs)
        return pooled | {"sentence_embedding": pooled["sentence_embedding"] + last}


def test_a_pooling_that_reads_padding_fails_the_parity_check(tmp_path):
    model = build_embedder(tmp_path, "mean", "right").eval()
    features = model.preprocess(rows_of(model))
    batch = {name: features[name] for name in ("input_ids", "attention_mask")}
    with remove_padding(model):
        assert check_parity(model, batch).ok
        model[1] = LastColumn(model[0].get_embedding_dimension(), "mean")
        assert not check_parity(model, batch).ok


def test_queries_that_are_expanded_by_tokens_without_a_mask_are_refused(tmp_path):
    model = build_embedder(tmp_path, "mean", "right")
    model[0].query_expansion = {"strategy": "fixed", "attend": False, "token": None, "length": 8}
    with pytest.raises(PaddingRemovalError, match="`query_expansion` scores tokens outside of the attention mask"):
        remove_padding(model)
    model[0].query_expansion = {"strategy": "fixed", "attend": True, "token": None, "length": 8}
    remove_padding(model).remove()
