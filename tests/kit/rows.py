"""Ragged rows of every method, made of random words."""

from __future__ import annotations

import random
from functools import partial

from datasets import Dataset
from kit import trainer_runs
from kit.trainer_runs import words


METRICS = ("entropy", "mean_token_accuracy", "num_tokens")
"""Metrics that TRL logs in SFT."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' <eos> ' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' w2 ' }}{% endif %}{% endfor %}"
)

build_pairs = partial(trainer_runs.build_pairs, common=None)


def build_rows(count: int = 40, seed: int = 0, kind: str = "completions") -> Dataset:
    """Rows for SFT, some of which begin alike: texts, prompts with completions, or chats."""
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


def build_long_rows(count: int, seed: int = 0) -> Dataset:
    """Texts for SFT of about ten tokens, every fifth one of about seventy."""
    draw = random.Random(seed)
    return Dataset.from_list([{"text": words(draw, *((9, 10) if i % 5 else (60, 70)))} for i in range(count)])


def build_examples(count: int, seed: int = 0) -> Dataset:
    """Answers, good and bad, to prompts that follow one another two by two."""
    draw = random.Random(seed)
    prompts = [words(draw, 2, 18) for _ in range(count // 2)]
    return Dataset.from_list(
        [
            {"prompt": prompts[i // 2], "completion": words(draw, 1, 12), "label": draw.random() < 0.5}
            for i in range(count)
        ]
    )


def build_prompts(count: int, seed: int = 0, begin: str = "") -> Dataset:
    draw = random.Random(seed)
    return Dataset.from_list([{"prompt": begin + words(draw, 2, 18)} for _ in range(count)])
