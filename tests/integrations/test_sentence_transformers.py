"""Embedding models and rerankers of sentence-transformers on decoders: its numbers, without padding."""

import pytest


pytest.importorskip("sentence_transformers")

import torch
from kit.embedding_runs import INSTRUCTION, build_embedder, build_reranker, build_trainer, triplets, with_lora
from kit.observe import entered_tokens
from kit.tolerance import CONTROL, assert_close, tolerance
from kit.trainer_runs import break_mode, train_beside_plain
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from trl_padfix import PaddingRemovalError, check_parity, remove_padding


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
