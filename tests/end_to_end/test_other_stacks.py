"""docs/other_stacks.md: the class of a stack without a plug-in, as its wheel has it, with `remove_padding` on it."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest
import torch
from kit.trainer_runs import leaking_layout
from zoo.model_numbers import assert_same_numbers, gradients, weighted_sum
from zoo.models import build

from trl_padfix import remove_padding
from trl_padfix.core.call import layout_of as batches


pytestmark = pytest.mark.slow  # importing it takes seconds

IDS = torch.tensor([[0, 5, 6, 7, 8, 11, 12, 13], [0, 5, 6, 7, 8, 21, 22, 0], [4, 9, 6, 17, 18, 0, 0, 0]])
"""Rows ragged on both sides, as generation leaves them; the first two begin with the same four tokens."""

ABSENT = ("deepspeed", "pylatexenc", "flash_attn", "flash_attn.bert_padding", "flash_attn.utils")
ABSENT += ("flash_attn.utils.distributed", "ring_flash_attn")


def absent(name: str) -> ModuleType:
    """A module that is not installed: importing from it works, and computing with it does not."""
    module = ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
    module.__getattr__ = lambda part: mock.MagicMock(name=part)
    return module


@pytest.mark.skipif(find_spec("openrlhf") is None, reason="`pip install --no-deps openrlhf==0.11.2`")
def test_the_actor_of_openrlhf(tmp_path):
    """The same values and gradients of fewer tokens; a layout whose rows see each other has others."""
    build("qwen2").save_pretrained(tmp_path)
    with mock.patch.dict(sys.modules, {name: absent(name) for name in ABSENT if name not in sys.modules}):
        from openrlhf.models.actor import Actor

        actor = Actor(str(tmp_path), attn_implementation="sdpa").float()  # it loads in half precision only
    mask = (IDS > 0).long()

    def numbers():
        actor.zero_grad()
        values = actor(IDS, mask[:, -3:], attention_mask=mask)
        weighted_sum(values.flatten()).backward()
        return values.detach(), gradients(actor)

    expected = numbers()
    for sharing in (False, True):
        with remove_padding(actor, prefix_sharing=sharing) as handle:
            found = numbers()
        assert handle.stats.packed_tokens == int(mask.sum()) - (4 if sharing else 0)
        assert_same_numbers(found, expected)
    with mock.patch.object(batches, "padding_free_layout", leaking_layout), remove_padding(actor):
        assert (numbers()[0] - expected[0]).abs().max() > 1e-2
