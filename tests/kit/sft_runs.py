"""Rows that SFT trains on, of every kind, and the metrics that TRL logs of them."""

from __future__ import annotations

import random

from datasets import Dataset
from kit.trainer_runs import words


METRICS = ("entropy", "mean_token_accuracy", "num_tokens")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' <eos> ' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' w2 ' }}{% endif %}{% endfor %}"
)


def build_rows(count: int = 40, seed: int = 0, kind: str = "completions") -> Dataset:
    """Ragged rows, some of which begin alike: texts, prompts with completions, or chats."""
    draw = random.Random(seed)
    systems = [words(draw, 3, 12) for _ in range(max(1, count // 4))]
    rows = []
    for _ in range(count):
        prompt, completion = draw.choice(systems) + words(draw, 1, 6), words(draw, 1, 10)
        turns = [("user", prompt), ("assistant", completion), ("user", "w3 w4"), ("assistant", words(draw, 1, 4))]
        rows.append(
            {
                "texts": {"text": prompt + completion},
                "completions": {"prompt": prompt, "completion": completion},
                "chats": {"messages": [{"role": role, "content": content} for role, content in turns]},
            }[kind]
        )
    return Dataset.from_list(rows)
