"""The chat template of the tiny tokenizers: what it renders, and what of it `assistant_only_loss` trains on."""

from datasets import Dataset

from trl_padfix import SFTConfig, SFTTrainer
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


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
