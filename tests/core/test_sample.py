"""The slices of the parity check: short ones, and for decoders with scans a pair that crosses from chunk to chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.cells import slow_but
from zoo.families import build

import trl_padfix.core.mixers.mixers
from trl_padfix import check_parity
from trl_padfix.core.anatomy import find_decoder
from trl_padfix.core.mixers.mixers import Mixers
from trl_padfix.core.mixers.node_tree import NodeTree
from trl_padfix.core.parity.sample import padded_batch


# Chunks


def uneven(*lengths: int, common: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of these lengths, the last two of which have their first tokens in common."""
    ids = torch.randint(3, 60, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    ids[-1, :common] = ids[-2, :common]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def with_chunks(model: Any, chunk: int) -> Any:
    """A model whose state-space scans have chunks of the size of real models."""
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = chunk
    return model


SCANS = {"qwen3_5_text": 64, "kimi_linear": 64, "mamba2": 256, "nemotron_h": 128}
LONG = {"input_ids": uneven(20, 31, 700, 640, common=350)[0], "attention_mask": uneven(20, 31, 700, 640)[1]}


def build_scan(family: str) -> Any:
    return with_chunks(build(family), SCANS[family])


def test_chunks_are_read_from_the_model():
    for family in (*SCANS, "lfm2", "jamba", "bloom"):
        assert Mixers.of(find_decoder(with_chunks(build(family), SCANS.get(family, 64)))).chunk == SCANS.get(family, 0)


@pytest.mark.parametrize(
    ("family", "sharing"), slow_but([("qwen3_5_text", True)], [("qwen3_5_text", True), ("mamba2", False)])
)
def test_rows_cross_chunks_and_a_scan_that_loses_its_state_there_is_caught(family, sharing, monkeypatch):
    scan, chunk = NodeTree.scan, SCANS[family]
    right = check_parity(build_scan(family), LONG, prefix_sharing=sharing)
    right.raise_if_failed()
    assert right.packed_tokens > 3 * chunk

    def forgetting(self: NodeTree, step: Any, *others: Any, **kwargs: Any) -> torch.Tensor:
        def in_two(parts: list[torch.Tensor], initial: Any, *more: Any) -> Any:
            if parts[0].shape[1] <= chunk:
                return step(parts, initial, *more)
            first, _ = step([x[:, :chunk] for x in parts], initial, *more)
            rest, final = step([x[:, chunk:] for x in parts], None, *more)
            return torch.cat([first, rest], 1), final

        return scan(self, in_two, *others, **kwargs)

    monkeypatch.setattr(NodeTree, "scan", forgetting)
    model = build_scan(family)
    assert not check_parity(model, LONG, prefix_sharing=sharing, gradients=False).ok
    # Rows of the usual length do not see it.
    monkeypatch.setattr(trl_padfix.core.mixers.mixers, "chunk_of", lambda module: 0)
    assert check_parity(model, LONG, prefix_sharing=sharing, gradients=False).ok


def test_bounds_without_positions_give_the_rows_of_a_packed_batch():
    packed = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
    assert padded_batch(packed)[0].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert check_parity(build("qwen2"), packed).ok
