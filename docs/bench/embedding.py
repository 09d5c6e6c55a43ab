"""
A step of an embedding model or a reranker on a decoder: that of sentence-transformers, padded, and without padding.

    pip install "sentence-transformers[train]"
    python docs/bench/embedding.py embedding --data test.jsonl.gz --rows 16
    python docs/bench/embedding.py reranking --data test.jsonl.gz --rows 32

The data are preference pairs as texts (HH-RLHF). Of an embedding model, `--rows` are triplets: a dialogue behind an
instruction, and two answers, with in-batch negatives. Of a reranker they are the documents of one query: answers to a
dialogue. A step is forwards, backward and AdamW. The three models take turns on the same rows. If their losses
differ, the command fails.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from in_turns import report, timed_step
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import Qwen2ForSequenceClassification

from trl_padfix import remove_padding
from trl_padfix.tools.bench.data import load_examples
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


MODES = {"padded": None, "padding-free": False, "prefix sharing": True}
INSTRUCTION = "Instruct: Given a dialogue, retrieve the answer that helps most and harms nobody.\nQuery: "
ANSWER = "\n\nAssistant:"


def build(task: str, folder: str) -> Any:
    """A model of sentence-transformers on the decoder in `folder`, without dropout; the same in each mode."""
    if task == "embedding":
        first = Transformer(folder, max_seq_length=512)
        return SentenceTransformer(
            modules=[first, Pooling(first.get_embedding_dimension(), "lasttoken")], device="cpu"
        )
    first = Transformer(folder, transformer_task="sequence-classification", max_seq_length=512)
    return CrossEncoder(modules=[first], device="cpu")


def loss_of(task: str, model: Any, rows: list[tuple[str, str, str]]) -> torch.Tensor:
    """The loss of a step, as the trainers of sentence-transformers compute it."""
    if task == "embedding":
        anchors, positives, negatives = zip(*rows, strict=True)
        features = [model.preprocess(list(anchors), prompt=INSTRUCTION)]
        features += [model.preprocess(list(texts)) for texts in (positives, negatives)]
        return MultipleNegativesRankingLoss(model)(features, None)
    # One query with the documents of the step; every other one is relevant.
    documents = [document for _, document, _ in rows]
    labels = torch.arange(len(rows)) % 2
    return BinaryCrossEntropyLoss(model)([[rows[0][0]] * len(rows), documents], labels.float())


def triplets(pairs: Dataset) -> list[tuple[str, str, str]]:
    """The last prompt, the chosen and the rejected answer of each pair."""
    rows = []
    for pair in pairs:
        prompt, _, chosen = pair["chosen"].rpartition(ANSWER)
        rows.append((prompt, chosen, pair["rejected"].rpartition(ANSWER)[2]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["embedding", "reranking"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    options = parser.parse_args()
    count = options.rows * (options.steps + options.warmup)
    pairs = load_examples(options.data)
    rows = triplets(pairs.select(range(min(count, len(pairs)))))
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[options.shape]
        tokenizer = train_tokenizer((text for row in rows for text in row), shape["vocab_size"])
        tokenizer.chat_template = None  # rows are plain texts
        tokenizer.save_pretrained(folder)
        decoder = build_qwen2(tokenizer, **shape | {"vocab_size": len(tokenizer)})
        if options.task == "embedding":
            decoder.model.save_pretrained(folder)
        else:
            torch.manual_seed(0)
            decoder.config.num_labels = 1
            Qwen2ForSequenceClassification(decoder.config).save_pretrained(folder)
        models = {mode: build(options.task, folder).train() for mode in MODES}
        handles = {m: remove_padding(models[m], prefix_sharing=s) for m, s in MODES.items() if s is not None}
        optimizers = {mode: torch.optim.AdamW(model.parameters(), lr=1e-5) for mode, model in models.items()}
        steps = []
        for step in range(options.warmup + options.steps):
            batch = rows[step * options.rows : (step + 1) * options.rows]
            losses = {mode: partial(loss_of, options.task, model, batch) for mode, model in models.items()}
            steps.append(timed_step(losses, optimizers, step))
    report(options.task, steps[options.warmup :], handles["prefix sharing"].stats)


if __name__ == "__main__":
    main()
