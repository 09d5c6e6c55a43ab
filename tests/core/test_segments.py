"""Attention segment by segment on a CPU: what its graph keeps."""

import gc

import pytest
import torch
from kit.trainer_runs import build_model

import trl_padfix.core.attention.segments as kernels
from trl_padfix import remove_padding
from trl_padfix.core.call.batch_metadata import share_layouts


def kept(sharing: bool, shared: int = 1, **config) -> int:
    """Bytes that the graph of a forward keeps, for rows of nearly one length that share their first tokens."""
    model = build_model(num_hidden_layers=4, hidden_size=64, **config)
    ids = torch.randint(2, 38, (8, 40), generator=torch.Generator().manual_seed(0))
    ids[:, :shared] = 0
    mask = (torch.arange(40) < torch.tensor([40, 39, 38, 40, 37, 40, 39, 36])[:, None]).long()
    found, alive = {}, []

    def keep(tensor):
        alive.append(tensor.untyped_storage())
        found[alive[-1].data_ptr()] = alive[-1].nbytes()
        return tensor

    with remove_padding(model, prefix_sharing=sharing):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.square().mean()
        loss.backward()
    return sum(found.values())


@pytest.mark.parametrize("config", [{}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}])
def test_sharing_one_token_keeps_no_more_than_sharing_none(config, monkeypatch):
    assert kept(sharing=True, **config) <= kept(sharing=False, **config)
    # Rows that share most of what they are need masks. As it was: one of booleans for every layer, and keys copied for
    # every head of their group.
    now = kept(sharing=True, shared=24, **config)
    monkeypatch.setattr(kernels, "sdpa_attention_forward", None)
    assert kept(sharing=True, shared=24, **config) > 1.02 * now


def test_masks_live_as_long_as_a_graph_keeps_them():
    masks = lambda: [ref() for known in kernels._masks.values() for ref in known.values() if ref() is not None]  # noqa: E731
    gc.collect()
    before = len(masks())
    model = build_model()
    ids = torch.randint(2, 38, (4, 12), generator=torch.Generator().manual_seed(0))
    ids[:, :8] = ids[0, :8]
    with share_layouts(), remove_padding(model, prefix_sharing=True):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum()
        assert len(masks()) == before + 3  # one for each row that is no whole row, for both layers
        loss.backward()
        del loss
        gc.collect()
        assert len(masks()) == before
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        assert len(masks()) == before
