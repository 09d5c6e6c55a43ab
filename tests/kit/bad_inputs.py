"""Files and model folders as they must not be, for the commands that are given them."""

from __future__ import annotations

from pathlib import Path

from trl_padfix.tools.tiny import build_qwen2, train_tokenizer


__all__ = ["build_bad_data", "build_bad_models"]

TEXT = '{"text": "alpha beta"}\n'
CHAT = '[{"role": "user", "content": "a"}]'
PAIR = '{"chosen": "Question: a b\\nAnswer: c", "rejected": "Question: a b\\nAnswer: d e"}\n'


def build_bad_data(folder: Path) -> None:
    """Data and YAML files in `folder`."""
    lines = {
        "good.jsonl": TEXT * 12,
        "pairs.jsonl": PAIR * 12,
        "chats.jsonl": f'{{"chosen": {CHAT}, "rejected": {CHAT}}}',
        "corrupt.jsonl": TEXT + '{"text": "b"\n',
        "empty.jsonl": "",
        "null.jsonl": TEXT * 3 + '{"text": null}\n',
        "columns.jsonl": '{"words": "a"}\n',
        "broken.yaml": "a:\n\t- 1\n",
        "list.yaml": "- a\n- b\n",
    }  # fmt: skip
    for name, text in lines.items():
        (folder / name).write_text(text)
    for name, text in (("good_folder", TEXT), ("pairs_folder", PAIR), ("prompts_folder", '{"prompt": "a"}\n')):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text(text * 12)


def build_bad_models(folder: Path) -> None:
    """The model folder `good` in `folder`."""
    tokenizer = train_tokenizer(["alpha beta gamma Question Answer"] * 3, 300)
    model = build_qwen2(tokenizer, layers=1, hidden_size=16, heads=2, kv_heads=1, intermediate_size=16)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "good")
