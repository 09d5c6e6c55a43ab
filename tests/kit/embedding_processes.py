"""A trainer of sentence-transformers in one process of several: padded, packed, and with layouts that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kit.callback_runs import figures
from kit.embedding_runs import build_embedder, build_reranker, build_trainer
from kit.trainer_runs import confusing_layout

from trl_padfix import PaddingRemovalCallback
from trl_padfix.core.call import layout_of


def main(folder: str, kind: str) -> dict[str, Any]:
    build, loss = (build_embedder, "in-batch negatives") if kind == "embedder" else (build_reranker, "pairs")

    def train(*callbacks: PaddingRemovalCallback) -> list[list[float]]:
        settings = {"max_steps": 3, "use_cpu": False, "per_device_train_batch_size": 4}
        trainer = build_trainer(Path(folder), build(Path(folder)), loss, callbacks=list(callbacks), **settings)
        trainer.train()
        return figures(trainer)

    callback = PaddingRemovalCallback(prefix_sharing=True)
    found = {"theirs": train(), "ours": train(callback), "ok": [report.ok for report in callback.reports]}
    stats = callback.stats
    assert stats is not None
    layout_of.prefix_sharing_layout = confusing_layout
    layout_of.LayoutInputs.rows_that_differ = lambda key, layout: torch.zeros(1, dtype=torch.bool)
    found["wrong"] = train(PaddingRemovalCallback(prefix_sharing=True, parity_check=False))
    return found | {"tokens": [stats.packed_tokens, stats.real_tokens, stats.padded_tokens]}
