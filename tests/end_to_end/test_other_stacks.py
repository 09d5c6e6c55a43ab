"""docs/other_stacks.md: the classes of other stacks, as their wheels have them, with `remove_padding` around them."""

import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
import trl
from kit.commands import build_pairs
from kit.models import CONFIGS
from kit.other_stacks import module_of
from transformers import AutoModelForCausalLM

from trl_padfix import padding_free_layout, remove_padding
from trl_padfix.core.call import layout_of as batches
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


pytestmark = pytest.mark.slow  # importing them takes seconds


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen2")
    AutoModelForCausalLM.from_config(CONFIGS["qwen2"]()).save_pretrained(folder)
    return str(folder)


def gradients(model: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    (values * torch.arange(1, values.numel() + 1).view_as(values)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def leaking(mask: torch.Tensor):
    return replace(padding_free_layout(mask.reshape(1, -1)), batch_shape=tuple(mask.shape))


def compare(model: torch.nn.Module, compute, ids: torch.Tensor, shared: int) -> None:
    """The same values and gradients of fewer tokens; a layout whose rows see each other does not."""
    expected = compute()
    slopes = gradients(model, expected)
    for sharing in (False, True):
        with remove_padding(model, prefix_sharing=sharing) as handle:
            found = compute()
            computed = gradients(model, found)
        assert handle.stats.packed_tokens == int((ids > 0).sum()) - (shared if sharing else 0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert (computed - slopes).norm() <= 1e-5 * slopes.norm()
    with mock.patch.object(batches, "padding_free_layout", leaking), remove_padding(model):
        assert (compute() - expected).abs().max() > 1e-2


IDS = torch.tensor([[0, 5, 6, 7, 8, 11, 12, 13], [0, 5, 6, 7, 8, 21, 22, 0], [4, 9, 6, 17, 18, 0, 0, 0]])
"""Rows ragged on both sides, as generation leaves them; the first two begin with the same four tokens."""


def test_the_actor_of_openrlhf(qwen2, tmp_path):
    absent = ("deepspeed", "pylatexenc", "flash_attn.bert_padding", "flash_attn.utils.distributed")
    with module_of("openrlhf", "openrlhf.models.actor", tmp_path, *absent) as module:
        actor = module.Actor(qwen2, attn_implementation="sdpa").float()  # it loads in half precision only
        mask = (IDS > 0).long()
        actions = mask[:, -3:]
        compare(actor, lambda: actor(IDS, actions, attention_mask=mask), IDS, shared=4)


PAIRS = torch.tensor(
    [[5, 6, 7, 8, 11, 12, 13], [4, 9, 6, 17, 18, 0, 0], [5, 6, 7, 8, 21, 0, 0], [4, 3, 6, 7, 8, 9, 0]]
)
"""`[chosen, rejected]` rows of two pairs; one pair shares four tokens, and one shares one."""


def pairs() -> dict[str, torch.Tensor]:
    mask = (PAIRS > 0).long()
    labels = PAIRS.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": PAIRS, "attention_mask": mask, "labels": labels}


def test_the_dpo_trainer_of_axolotl(qwen2, tmp_path):
    absent = ("addict", "numba", "posthog")
    with module_of("axolotl", "axolotl.core.trainers.dpo.trainer", tmp_path / "wheel", *absent) as module:
        tokenizer = train_tokenizer(["alpha beta gamma delta"], vocab_size=300)
        shape = SHAPES["tiny"] | {"vocab_size": len(tokenizer), "initializer_range": 0.2}
        models = [build_qwen2(tokenizer, **shape) for _ in range(2)]
        data = build_pairs(4)
        args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_length=128)
        trainer = module.AxolotlDPOTrainer(
            model=models[0], ref_model=models[1], args=args, train_dataset=data, processing_class=tokenizer
        )
        batch = next(iter(trainer.get_train_dataloader()))

        def compute():
            return trainer.compute_loss(trainer.model, dict(batch))

        expected = compute()
        slopes = gradients(trainer.model, expected)
        mask = batch["attention_mask"]
        with remove_padding(trainer.model, prefix_sharing=True) as handle, remove_padding(trainer.ref_model):
            found = compute()
            computed = gradients(trainer.model, found)
        assert handle.stats.packed_tokens < int(mask.sum()) < mask.numel()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert (computed - slopes).norm() <= 1e-5 * slopes.norm()


def test_the_dpo_forward_of_ms_swift(qwen2, tmp_path):
    absent = ("modelscope", "einops", "json_repair", "trl")
    with module_of("ms_swift", "swift.rlhf_trainers.dpo_trainer", tmp_path, *absent) as module:
        model = AutoModelForCausalLM.from_pretrained(qwen2).eval()
        trainer = object.__new__(module.DPOTrainer)
        vars(trainer).update(
            args=types.SimpleNamespace(ld_alpha=None, rpo_alpha=None),
            template=types.SimpleNamespace(sequence_parallel_size=1, padding_free=False),
            aux_loss_enabled=False, is_encoder_decoder=False, label_pad_token_id=-100, loss_type=["sigmoid"],
            get_use_logits_to_keep=lambda default: False,
        )  # fmt: skip

        def compute():
            found = trainer.concatenated_forward(model, pairs())
            return torch.cat([found["chosen_logps"], found["rejected_logps"]])

        compare(model, compute, PAIRS, shared=5)
