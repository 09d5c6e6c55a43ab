"""`expand_turns`: a row for each turn, as the template renders it at that moment, equal to rows written by hand."""

import json
import random

import pytest
from datasets import Dataset, IterableDataset
from kit.methods import make_trainer
from kit.trainer_runs import assert_same, build_tokenizer, run, watch_inputs, words

import trl_padfix
from trl_padfix import expand_turns


THINKING = (  # as Qwen3: what was thought is shown of the messages behind the last question only
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}{{ 'w9 ' * tools|length }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ 'w5 ' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ 'w7 ' + m.reasoning_content + ' w8 ' }}{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ ' ' + call.function.name + ' ' }}{% endfor %}"
    "{{ ' <eos> ' }}{% else %}{{ 'w6 ' + m.content + ' w2 ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w5 ' }}{% endif %}"
)


def say(role, content, **more):
    return {"role": role, "content": content, "reasoning_content": None, "tool_calls": None} | more


def conversations(count=12):
    draw = random.Random(0)
    speak = lambda: words(draw, 2, 6).strip()  # noqa: E731
    call = {"type": "function", "function": {"name": "w4", "arguments": json.dumps({"x": 1})}}
    rows = []
    for _ in range(count):
        messages = [say("system", "w10 w11 w12"), say("user", speak())]
        messages += [say("assistant", None, reasoning_content=speak(), tool_calls=[call]), say("tool", speak())]
        for _ in range(draw.randint(1, 2)):
            messages += [say("assistant", speak(), reasoning_content=speak()), say("user", speak())]
        rows.append(
            {"messages": [*messages, say("assistant", speak(), reasoning_content=speak())], "tools": "[{}, {}]"}
        )
    return Dataset.from_list(rows)


def by_hand(rows):
    made = []
    for row in rows:
        for i, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                made.append({"prompt": row["messages"][:i], "completion": [message], "tools": row["tools"]})
    return Dataset.from_list(made)


def trained(path, rows, **given):
    given = {
        "processing_class": build_tokenizer(chat_template=THINKING),
        "max_steps": 3,
        "learning_rate": 1e-2,
    } | given
    return run(make_trainer(trl_padfix, "SFT", path, train_dataset=rows, **given), watch_inputs(""))


def test_turns_train_as_rows_written_by_hand(tmp_path):
    rows = conversations()
    expected = trained(tmp_path, by_hand(rows))
    for mode in ({}, {"padding_free": True, "prefix_sharing": True}):
        found = trained(tmp_path, rows, expand_turns=True, **mode)
        assert_same(found.trajectory(), expected.trajectory())
    columns = ("input_ids", "labels")
    assert all(found.trainer.train_dataset[c][:] == expected.trainer.train_dataset[c][:] for c in columns)
    assert found.entered < found.counts()["padding-free"]


def test_conversations_that_cannot_be_expanded_give_no_row():
    user, answer = say("user", "w3"), say("assistant", "w4")
    rows = [[user], [answer, user, answer], [user, answer, answer], [user, answer], [answer]]
    found = expand_turns(Dataset.from_list([{"messages": messages} for messages in rows]))
    assert [(len(r["prompt"]), len(r["completion"])) for r in found] == [(2, 1), (1, 2), (1, 1)]
    for rows in ([[user], [answer]], [[{"content": "w3"}]] * 2):  # the last ones have no roles
        with pytest.raises(ValueError, match="None of the 2 conversations"):
            expand_turns(Dataset.from_list([{"messages": messages} for messages in rows]))


def test_turns_of_a_stream_are_those_of_its_rows(tmp_path):
    rows = conversations()
    expected = list(expand_turns(rows))
    for stream in (rows.to_iterable_dataset(), IterableDataset.from_generator(lambda: iter(rows))):
        assert list(expand_turns(stream)) == expected
    config = {"expand_turns": True, "train_sampling_strategy": "sequential"}
    found, theirs = (trained(tmp_path, data, **config) for data in (rows.to_iterable_dataset(), rows))
    assert_same(found.trajectory(), theirs.trajectory())


def test_conversations_of_another_format_are_turned_into_messages():
    row = {"conversations": [{"from": "user", "value": "w3"}, {"from": "assistant", "value": "w4"}]}
    (found,) = expand_turns(Dataset.from_list([row]))
    assert [m["content"] for m in found["prompt"] + found["completion"]] == ["w3", "w4"]


NO_CONVERSATIONS = [
    (Dataset.from_dict({"text": ["w3"]}), ValueError, r"columns \['text'\]. Give a column `messages`"),
    (Dataset.from_dict({"messages": [[]], "images": [[]]}), ValueError, "do not say which turn"),
    ([{"messages": []}], TypeError, "is a `list`"),
    (IterableDataset.from_generator(lambda: iter(())), ValueError, r"columns \[\]"),
]


def test_what_is_no_set_of_conversations_is_refused():
    for rows, error, message in NO_CONVERSATIONS:
        with pytest.raises(error, match=message):
            expand_turns(rows)
