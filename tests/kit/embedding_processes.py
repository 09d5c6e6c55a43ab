"""A trainer of sentence-transformers in one process of several: padded, packed, and with layouts that are wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kit.callback_runs import figures
from kit.embedding_runs import build_embedder, build_reranker, build_trainer
from kit.processes import on_gpus
from kit.trainer_runs import confusing_layout
from torch.distributed.tensor import DTensor

from trl_padfix import PaddingRemovalCallback
from trl_padfix.core.call import layout_of


def weights(model: Any) -> list[float]:
    """The norm of every weight, whole."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [p.detach().norm().item() for p in whole]


def main(folder: str, kind: str) -> dict[str, Any]:
    build, loss = (build_embedder, "in-batch negatives") if kind == "embedder" else (build_reranker, "pairs")
    own = Path(folder) / os.environ["RANK"]  # a process must not read what another one is writing

    def train(*callbacks: PaddingRemovalCallback) -> tuple[list[list[float]], list[float]]:
        settings = {"max_steps": 3, "use_cpu": not on_gpus(), "per_device_train_batch_size": 4}
        trainer = build_trainer(own, build(own), loss, callbacks=list(callbacks), **settings)
        trainer.train()
        return figures(trainer), weights(trainer.model)

    untrained, (theirs, trained) = weights(build(own)), train()
    callback = PaddingRemovalCallback(prefix_sharing=True)
    ours, _ = train(callback)
    stats = callback.stats
    assert stats is not None
    tokens = [stats.packed_tokens, stats.real_tokens, stats.padded_tokens]
    layout_of.prefix_sharing_layout = confusing_layout
    wrong, _ = train(PaddingRemovalCallback(prefix_sharing=True, parity_check=False))
    steps = {"theirs": theirs, "ours": ours, "wrong": wrong}
    return steps | {"tokens": tokens, "untrained": untrained, "trained": trained}
