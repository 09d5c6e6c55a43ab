"""
The bits of a row: its log-probabilities are the same to the last bit beside other rows and alone.

This is promised where a product does not depend on its number of rows: with AVX-512 on one thread, and with
`MKL_CBWR=AVX512,STRICT` or `AVX2,STRICT`. `kit.row_bits` tries it; elsewhere the tests are skipped.
"""

import os
from contextlib import nullcontext

import pytest
import torch
from kit.row_bits import SIZE, skip_without_one_order, with_calls_of_segments
from kit.trainer_runs import build_model
from torch.nn.utils.rnn import pad_sequence

from trl_padfix import remove_padding


# The weights, and what autocast computes in.
PRECISIONS = {
    "float32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),  # TRL's default
    "bf16 weights": (torch.bfloat16, None),
    "fp16": (torch.float32, torch.float16),
    "fp16 weights": (torch.float16, None),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 150, "max_window_layers": 0}
# Tokens before and after the end of the shared prefix. The prefixes are nested: few new tokens, ends within 16 keys of
# the prefix, and lengths on both sides of 192, 384 and 512 keys.
LENGTHS = [(101, 7), (101, 103), (60, 400), (190, 1), (190, 2), (190, 430), (400, 50), (400, 230), (540, 90)]


def rows() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    prefix = torch.randint(2, 38, (540,), generator=draw)
    return [torch.cat([prefix[:n], torch.randint(2, 38, (own,), generator=draw)]) for n, own in LENGTHS]


@pytest.fixture(autouse=True)
def machine():
    skip_without_one_order()


def model_of(precision: str, **config) -> torch.nn.Module:
    return build_model(hidden_size=SIZE, intermediate_size=2 * SIZE, **config).eval().to(PRECISIONS[precision][0])


@torch.no_grad()
def log_probs(model, batches: list[list[int]], precision: str, all_rows=None, **settings) -> dict[int, torch.Tensor]:
    """The log-probabilities of the tokens of each row, computed in these batches of rows; plain without settings."""
    all_rows = rows() if all_rows is None else all_rows
    attached = remove_padding(model, **settings) if settings else nullcontext()
    found, dtype = {}, PRECISIONS[precision][1]
    with attached, torch.autocast("cpu", dtype, enabled=dtype is not None):
        for batch in batches:
            chosen = [all_rows[i] for i in batch]
            ids = pad_sequence(chosen, batch_first=True)
            mask = pad_sequence([torch.ones_like(row) for row in chosen], batch_first=True)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for i, row, of_row in zip(batch, chosen, logits, strict=True):
                scores = of_row[: len(row) - 1].float().log_softmax(-1)
                found[i] = scores.gather(1, row[1:, None])[:, 0]
    return found


def unequal(got: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> dict[int, int]:
    """Rows that lost bits, with the number of their tokens that did."""
    return {i: n for i in expected if (n := int((got[i] != expected[i]).sum()))}


ALONE = [[i] for i in range(len(LENGTHS))]
BATCHES = {
    "all": [list(range(len(LENGTHS)))],
    "in another order": [list(range(len(LENGTHS)))[::-1]],
    "micro-batches": [[8, 0, 3], [1, 5], [7, 2], [4, 6]],  # as an RL step shuffles what one batch scored
}


@pytest.mark.parametrize("config", [{}, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_share_prefixes_have_their_own_bits(precision, config):
    model = model_of(precision, **config)
    alone = log_probs(model, ALONE, precision, prefix_sharing=True)
    for batches in BATCHES.values():
        assert unequal(log_probs(model, batches, precision, prefix_sharing=True), alone) == {}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_padding_free_rows_have_the_bits_of_the_plain_model(precision):
    model = model_of(precision)
    plain = log_probs(model, ALONE, precision)
    for batches in BATCHES.values():
        assert unequal(log_probs(model, batches, precision, prefix_sharing=False), plain) == {}
    if precision == "float32":  # the control: padded beside longer rows
        assert unequal(log_probs(model, BATCHES["all"], precision), plain)


def test_with_calls_of_segments_bits_are_lost(monkeypatch):
    """The control: the softmax of a shared prefix then ends in another place than that of a row."""
    model = model_of("float32")
    with_calls_of_segments(monkeypatch)
    alone = log_probs(model, ALONE, "float32", prefix_sharing=True)
    assert unequal(log_probs(model, BATCHES["all"], "float32", prefix_sharing=True), alone)


SHORT = [5, 16, 2, 9, 30, 3]
"""Lengths of rows of which most have fewer than 16 tokens; they begin alike."""


@pytest.mark.parametrize("sharing", [False, True])
def test_short_rows_keep_their_bits_in_packed_rows_of_a_multiple_of_16(sharing):
    model = model_of("float32")
    short = [torch.cat([rows()[0][: length // 2], rows()[-1][-length + length // 2 :]]) for length in SHORT]
    lone, batches = [[i] for i in range(len(short))], [[*range(len(short))], [4, 0], [2, 5, 1], [3]]

    def bits(batches, **settings):
        return log_probs(model, batches, "float32", short, prefix_sharing=sharing, **settings)

    alone = bits(lone, packed_multiple_of=16)
    for chosen in (batches[:1], batches[1:]):
        assert unequal(bits(chosen, packed_multiple_of=16), alone) == {}
    if not os.environ.get("MKL_CBWR"):  # the control: rows of fewer than 16 tokens
        assert unequal(bits(lone), alone)
