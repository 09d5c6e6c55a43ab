"""
Sequence classifiers score the last token of the attention mask, whatever its id, as if each row were alone.

transformers looks for the pad token's id instead. Where the pad token is the EOS token and a sequence ends in it, the
token before is scored: the tests show it, as their negative control.
"""

from __future__ import annotations

import pytest
import torch
from kit.cells import by_turns
from kit.tolerance import assert_close, tolerance
from torch import nn
from transformers import AutoModelForSequenceClassification
from zoo.stack_models import CASES, EOS, backward, build, pad, relative_error

from trl_padfix import check_parity, remove_padding
from trl_padfix.core.layout.layout import Layout


pytestmark = [pytest.mark.stacks, pytest.mark.usefixtures("flash")]

ROWS = [
    [5, 6, 7, 8, 9, EOS],
    [5, 6, 7, 8, 20, 21, 22, 23, EOS],
    [5, 6, 7, 16],  # cut off: no EOS
    [29, 6, EOS, 7, EOS, EOS],  # turns that end in EOS, and two at the end
]
DISTINCT = 18


def classifier(name: str = "qwen2", implementation: str = "sdpa", **config) -> nn.Module:
    config = {"pad_token_id": EOS, "num_labels": 1} | config
    return build(name, implementation, AutoModelForSequenceClassification, **config)


def same_scores(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(found.detach(), expected.detach(), terms=64, depth=16)


def scores_of_last_tokens(model: nn.Module) -> torch.Tensor:
    """Each row alone, its last token scored by hand."""
    rows = [torch.tensor([row]) for row in ROWS]
    states = [model.base_model(row, attention_mask=torch.ones_like(row))[0][:, -1] for row in rows]
    return model.score(torch.cat(states))


@pytest.mark.parametrize(("name", "implementation", "sharing"), by_turns(CASES[1::4], [True, False]))
def test_scores_and_gradients_equal_rows_alone_where_pad_is_eos(name, implementation, sharing):
    model = classifier(name, implementation)
    expected = scores_of_last_tokens(model)
    expected_gradient = backward(model, expected)
    for side in ("left", "right", "mixed"):
        ids, mask = pad(ROWS, side, pad_id=EOS)
        with remove_padding(model, prefix_sharing=sharing, pool_last_token=True) as handle:
            found = model(ids, attention_mask=mask).logits
            gradient = backward(model, found)
        same_scores(found, expected)
        assert relative_error(gradient, expected_gradient) < tolerance(1, terms=64, depth=32)
        assert handle.stats.packed_tokens == (DISTINCT if sharing else mask.sum())


def test_negative_control_transformers_scores_another_token():
    model = classifier()
    ids, mask = pad(ROWS, "left", pad_id=EOS)
    positions = (torch.arange(ids.shape[1]) - mask.argmax(1, keepdim=True)).clamp(min=0)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        wrong = (padded - scores_of_last_tokens(model)).abs() > 0.05
    assert wrong.flatten().tolist() == [True, True, False, True]
    # A batch without any padding is scored wrongly as well, and rightly with the package.
    row = torch.tensor([ROWS[0]])
    assert not torch.allclose(model(row).logits, scores_of_last_tokens(model)[:1], atol=0.05)
    with remove_padding(model, pool_last_token=True):
        found = model(row, attention_mask=torch.ones_like(row)).logits
    same_scores(found, scores_of_last_tokens(model)[:1])


def test_check_parity_fails_where_the_last_token_is_not_the_one_pooled(monkeypatch):
    model = classifier()
    ids, mask = pad(ROWS, "right", pad_id=EOS)
    index_of = Layout.packed_index_of
    with remove_padding(model, pool_last_token=True):
        assert check_parity(model, {"input_ids": ids, "attention_mask": mask}).ok
        monkeypatch.setattr(Layout, "packed_index_of", lambda layout, index: index_of(layout, index) - 1)
        assert not check_parity(model, {"input_ids": ids, "attention_mask": mask}).ok


def test_loss_is_the_models_own_on_the_right_scores():
    model = classifier(num_labels=3)
    ids, mask = pad(ROWS, "left", pad_id=EOS)
    labels = torch.tensor([0, 2, 1, 1])
    expected = nn.functional.cross_entropy(scores_of_last_tokens(model), labels)
    with remove_padding(model, pool_last_token=True):
        found = model(ids, attention_mask=mask, labels=labels).loss
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, labels=labels).loss
    same_scores(found, expected)
    same_scores(embedded, expected)


def test_a_model_without_a_pad_token_is_told_to_get_one_and_nothing_else(caplog):
    model, (ids, mask) = classifier(pad_token_id=None), pad(ROWS, "right", pad_id=EOS)
    with remove_padding(model), pytest.raises(ValueError, match="no padding token"):  # of transformers
        model(ids, attention_mask=mask)
    assert "`model.config.pad_token_id = " in caplog.text
    assert "pool_last_token" not in caplog.text
