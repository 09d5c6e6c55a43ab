"""
The forwards of an RL run: actor, critic and reward model, on prompts padded left and responses padded right.

On transformers 4.52 with FlashAttention 2 they raise. Each test first shows that, and then the same call with
`remove_padding`, against each row computed alone.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from kit.observe import each_row_alone
from packaging.version import Version
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification
from zoo.stack_models import EOS, PAD, backward, build, logps, relative_error

from trl_padfix import remove_padding


pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("4.53"),
    reason=f"transformers {transformers.__version__} does not raise here any more; 4.52 does: `nox -s stories`",
)

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12]]
RESPONSES = [[13, 14, 15], [16, 17, 18, 19], [20]]

raises = pytest.raises(ValueError, match="batched generation with padding_side='right'")


@pytest.fixture(autouse=True, scope="module")
def flash():
    with flash_attention_stand_in():
        yield


def rollout() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded left, responses padded right: what generation leaves behind."""
    rows = [[PAD] * (3 - len(p)) + p + r + [PAD] * (4 - len(r)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    sequences = torch.tensor(rows)
    return sequences, (sequences != PAD).long()


def rollout_cut_at_eos() -> tuple[torch.Tensor, torch.Tensor]:
    """What PPO makes of it: the tail after the first EOS is overwritten by EOS, and masked out."""
    rows = [[0, 0, 5, 6, 13, 14, EOS, EOS], [7, 8, 9, 10, 15, EOS, EOS, EOS], [0, 3, 4, 2, 8, 8, 8, 8]]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
    return torch.tensor(rows), mask


ROLLOUTS = pytest.mark.parametrize("batch", [rollout, rollout_cut_at_eos])
MODES = pytest.mark.parametrize("sharing", [False, True], ids=["padding-free", "sharing"])


class ValueHead(nn.Module):
    """A critic: a decoder and a linear head on its last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("qwen2", "flash_attention_2", AutoModel)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.value = nn.Linear(32, 1)

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.value(self.model(sequences, attention_mask=attention_mask)[0]).squeeze(-1)


class ValueHeadOnCausalLM(nn.Module):
    """A critic around a language model, which asks it for all hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = build("qwen2", "flash_attention_2")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.v_head = nn.Linear(32, 1)

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        output = self.pretrained_model(sequences, attention_mask=attention_mask, output_hidden_states=True)
        return self.v_head(output.hidden_states[-1]).squeeze(-1)


def check(model: nn.Module, compute, batch, sharing: bool) -> None:
    """`compute` raises; with `remove_padding(model)` it gives the numbers and gradients of each row alone."""
    sequences, mask = batch()
    with raises:
        compute(sequences, mask)
    expected = each_row_alone(compute, sequences, mask)
    gradient = backward(model, expected)
    with remove_padding(model, prefix_sharing=sharing) as handle:
        found = compute(sequences, mask)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert relative_error(backward(model, found), gradient) < 1e-5
    assert handle.stats.packed_tokens == mask.sum() < mask.numel()
    with raises:
        compute(sequences, mask)


@MODES
@ROLLOUTS
def test_actor(batch, sharing):
    model = build("qwen2", "flash_attention_2")

    def log_probabilities(sequences, mask):
        return logps(model(sequences, attention_mask=mask).logits, sequences, mask)

    check(model, log_probabilities, batch, sharing)


@MODES
@ROLLOUTS
@pytest.mark.parametrize("critic", [ValueHead, ValueHeadOnCausalLM])
def test_value_head(critic, batch, sharing):
    model = critic()
    check(model, lambda sequences, mask: model(sequences, attention_mask=mask)[mask.bool()], batch, sharing)


@MODES
def test_reward_model(sharing):
    model = build("qwen2", "flash_attention_2", AutoModelForSequenceClassification, num_labels=1)
    check(model, lambda sequences, mask: model(sequences, attention_mask=mask).logits, rollout, sharing)


@MODES
def test_reward_model_scores_the_first_eos_where_pad_is_eos(sharing):
    model = build("qwen2", "flash_attention_2", AutoModelForSequenceClassification, num_labels=1, pad_token_id=EOS)
    sequences, mask = rollout_cut_at_eos()
    with raises:
        model(sequences, attention_mask=mask)

    def score_of_the_last_token(row, ones):
        return model.score(model.model(row, attention_mask=ones)[0])[:, -1]

    expected = each_row_alone(score_of_the_last_token, sequences, mask)
    with remove_padding(model, prefix_sharing=sharing, pool_last_token=True):
        found = model(sequences, attention_mask=mask).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    # Around the exception, transformers scores the token before the EOS: it takes the EOS for padding. So does the
    # model without padding, unless it is asked for the last token.
    around = model(sequences, attention_mask=mask, use_cache=False).logits
    with remove_padding(model, prefix_sharing=sharing):
        torch.testing.assert_close(model(sequences, attention_mask=mask).logits, around, atol=1e-5, rtol=1e-5)
    assert ((around - expected).abs() > 0.05).flatten().tolist() == [True, True, False]
