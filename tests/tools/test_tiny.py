"""The chat template of the tiny tokenizers: what it renders, and what of it `assistant_only_loss` trains on."""

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

from trl_padfix import SFTConfig, SFTTrainer
from trl_padfix.tools.tiny import RECORD, SHAPES, build_qwen2, build_tiny, built_once, train_tokenizer


CALL = {"type": "function", "function": {"name": "look", "arguments": {"room": "hall"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the key?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a key"},
    {"role": "assistant", "content": "In the hall."},
]
SAID = ['{"name": "look", "arguments": {"room": "hall"}}<|end|>', "In the hall.<|end|>"]


def test_a_conversation_is_rendered_message_by_message():
    rendered = train_tokenizer(["a"], 300).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nWhere is the key?<|end|>\n"
        f"<|start|>assistant\n{SAID[0]}\n<|start|>tool\na key<|end|>\n<|start|>assistant\n{SAID[1]}\n"
        "<|start|>assistant\n"
    )


def test_assistant_only_loss_trains_on_what_the_assistant_says_and_its_end(tmp_path):
    tokenizer = train_tokenizer(["Be brief. Where is the key? In the hall."], 300)
    texts = [f"{'It is there. ' * n}Look." for n in range(1, 5)]
    talks = [[MESSAGES[1], {"role": "assistant", "content": text}, *MESSAGES[1:2], MESSAGES[4]] for text in texts]
    config = SFTConfig(
        str(tmp_path), assistant_only_loss=True, padding_free=True, max_steps=2, per_device_train_batch_size=4,
        use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    model = build_qwen2(tokenizer, **SHAPES["tiny"] | {"vocab_size": len(tokenizer)})
    data = Dataset.from_list([{"messages": talk} for talk in talks])
    trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    trained_on = sorted(tokenizer.decode(row[row != -100]) for row in batch["labels"])
    assert trained_on == sorted(f"{text}<|end|>{SAID[1]}" for text in texts)
    assert (batch["labels"] == batch["input_ids"])[batch["labels"] != -100].all()
    trainer.train()
    assert 0 < trainer.state.log_history[-1]["train_loss"] < 10


# -- what a recipe builds for itself: whole or not at all, and never taken for another model


def build(folder):
    (folder / "model.safetensors").write_text("weights")


def test_it_is_built_once_and_taken_again(tmp_path):
    (tmp_path / "model").mkdir()  # by `tempfile.mkdtemp`
    built = built_once(tmp_path / "model", {"layers": 1, "sizes": (1, 2)}, build)
    assert built == str(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert built_once(tmp_path / "model", {"layers": 1, "sizes": (1, 2)}, pytest.fail) == built
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_one_is_not_taken_for_it(tmp_path):
    built_once(tmp_path / "model", {"tiny_model": "tiny", "layers": 2}, build)
    with pytest.raises(ValueError, match=r"was built from other data or settings.*Delete"):
        built_once(tmp_path / "model", {"tiny_model": "small", "layers": 6}, build)
    (tmp_path / "model" / RECORD).unlink()
    with pytest.raises(ValueError, match="or by another program"):
        built_once(tmp_path / "model", {"tiny_model": "tiny", "layers": 2}, build)


def test_a_tiny_model_has_an_embedding_for_each_token_of_its_loaded_tokenizer(tmp_path):
    folder = build_tiny("tiny", [{"text": f"w{i} w{i * i % 97}"} for i in range(200)], tmp_path / "model")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size
    assert max(tokenizer("<|endoftext|> w1")["input_ids"]) < config.vocab_size
