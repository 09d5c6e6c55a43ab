"""Rows that cannot be trained on: an error before the first step, and left out of a stream with a warning."""

import logging

import pytest
import trl
from datasets import Dataset, Features, IterableDataset, List, Value
from hypothesis import given
from hypothesis import strategies as st
from kit.methods import make_trainer
from kit.trainer_runs import build_tokenizer, trajectory

import trl_padfix
from trl_padfix.trainers.data.columns import ids_outside
from trl_padfix.trainers.data.row_checks import DoubtfulRowError, check_row, validate_rows


TEXT = {"text": "w3 w4"}
PAIR = {"prompt": "w3", "chosen": "w4 w5", "rejected": "w6"}
KTO = {"prompt": "w3", "completion": "w4 w5", "label": True}
CHAT = {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]}
SAID, ANSWER = CHAT["messages"]
CHATS = {"prompt": [SAID], "chosen": [ANSWER], "rejected": [SAID]}
CHAT_KTO = {"prompt": [SAID], "completion": [ANSWER], "label": True}
COMPLETION = {"prompt": "w3", "completion": "w4 w5"}
IDS = {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}

BAD = {
    "SFT, no text": ("SFT", TEXT, {"text": None}, r"Row 5 .*of the train dataset has None in column `text`"),
    "SFT, no role": ("SFT", CHAT, {"messages": [{"content": "w3"}]}, r"Row 5 .* without a text `role`"),
    "SFT, no content": ("SFT", CHAT, {"messages": [{"role": "user"}]}, r"Row 5 .* whose `content` is no text"),
    "SFT, no message": ("SFT", CHAT, {"messages": []}, r"Row 5 .* has \[\] in column `messages`"),
    "DPO, no message": ("DPO", CHATS, {"prompt": []}, r"Row 5 .* has \[\] in column `prompt`"),
    "KTO, no message": ("KTO", CHAT_KTO, {"prompt": []}, r"Row 5 .* has \[\] in column `prompt`"),
    "GRPO, no message": ("GRPO", {"prompt": [SAID]}, {"prompt": []}, r"Row 5 .* has \[\] in column `prompt`"),
    "SFT, negative id": ("SFT", IDS, {"input_ids": [3, -5]}, r"Row 5 .* holds -5 in `input_ids`.* 0 to 39"),
    "SFT, id too large": ("SFT", IDS, {"input_ids": [3, 40]}, r"Row 5 .* holds 40 in `input_ids`"),
    "SFT, label too large": ("SFT", IDS, {"labels": [40, 4, 5]}, r"Row 5 .* holds 40 in `labels`"),
    "DPO": ("DPO", PAIR, {"rejected": None}, r"Row 5 .*None in column `rejected`"),
    "Reward": ("Reward", PAIR, {"prompt": None}, r"Row 5 .*None in column `prompt`"),
    "KTO": ("KTO", KTO, {"completion": None}, r"Row 5 .*None in column `completion`"),
    "SFT, an empty text": ("SFT", TEXT, {"text": ""}, r"Row 5 .*train dataset has an empty text in column `text`"),
    "SFT, an empty completion": ("SFT", COMPLETION, {"completion": ""}, r"Row 5 .* an empty text in .*`completion`"),
    "DPO, an empty completion": ("DPO", PAIR, {"rejected": ""}, r"Row 5 .* an empty text in column `rejected`"),
    "Reward, an empty completion": ("Reward", PAIR, {"chosen": ""}, r"Row 5 .* an empty text in column `chosen`"),
    "KTO, an empty completion": ("KTO", KTO, {"completion": ""}, r"Row 5 .* an empty text in column `completion`"),
    "GRPO": ("GRPO", {"prompt": "w3 w4"}, {"prompt": None}, r"Row 5 .*None in column `prompt`"),
}


def make(kind, folder, data, library=trl_padfix, **given):
    tokenizer = build_tokenizer(chat_template="{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    rows = {} if kind == "GRPO" else {"per_device_train_batch_size": 4}
    given = {"max_steps": 3, "train_dataset": data, "processing_class": tokenizer} | rows | given
    return make_trainer(library, kind, folder, **given)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_found_before_the_first_step(case, tmp_path):
    kind, good, change, message = BAD[case]
    data = Dataset.from_list([good] * 5 + [good | change] + [good] * 2)
    with pytest.raises(ValueError, match=message):
        # A chat template may render odd messages, and TRL ends an empty text with an EOS token.
        make(kind, tmp_path, data, strict=bool(change.get("messages")) or "" in change.values())


def test_a_stream_leaves_a_row_without_messages_out(tmp_path, caplog):
    rows = [{"messages": [SAID, ANSWER | {"content": f"w{7 + i}"}]} for i in range(12)]
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        make("SFT", tmp_path, stream([*rows[:3], {"messages": []}, *rows[3:]])).train()
    assert any("were left out. A row of the train dataset has []" in text for text in caplog.messages)


OTHER_KEYS = [{"from": "human", "value": "w3"}, {"from": "gpt", "value": "w4"}]
COLUMNS = {
    "from and value": (
        "SFT",
        {"messages": OTHER_KEYS},
        "the keys `from` and `value`, which TRL reads in a column `conv",
    ),
    "pairs": ("DPO", CHATS | {"prompt": OTHER_KEYS[:1]}, "Row 0 .* in column `prompt`, with the keys `from`"),
    "role and content": ("SFT", {"conversations": [SAID, ANSWER]}, "`conversations` .* have `role`.*, 'messages'\\)"),
    "a prompt beside": (
        "SFT",
        {"prompt": "w3"} | CHAT,
        "has `prompt` and no `completion`.*train on \\['messages'\\], drop it",
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_that_trl_reads_otherwise_are_named(case, tmp_path):
    kind, row, message = COLUMNS[case]
    with pytest.raises(ValueError, match=message):
        make(kind, tmp_path, Dataset.from_list([row] * 8))


def test_conversations_of_other_keys_are_trained_on(tmp_path):
    data = Dataset.from_list([{"conversations": OTHER_KEYS}] * 8)
    theirs, ours = (make("SFT", tmp_path, data, library) for library in (trl, trl_padfix))
    for trainer in (theirs, ours):
        trainer.train()
    assert trajectory(ours).equal(trajectory(theirs))


@pytest.mark.parametrize(("kind", "row"), [("KTO", KTO), ("Reward", PAIR)])
def test_plain_texts_need_an_eos_token(kind, row, tmp_path):
    with pytest.raises(ValueError, match="no EOS token, and TRL ends"):
        make(kind, tmp_path, Dataset.from_list([row] * 8), processing_class=build_tokenizer(eos_token=None))


def test_an_empty_prompt_is_none(tmp_path, caplog):
    make("SFT", tmp_path, Dataset.from_list([COMPLETION] * 5 + [COMPLETION | {"prompt": ""}]), strict=True)
    assert "empty text" not in caplog.text


def test_a_number_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="has 3 in column `text`"):
        make("SFT", tmp_path, Dataset.from_list([{"text": 3}] * 4))


def stream(rows):
    def generate():
        yield from rows

    return IterableDataset.from_generator(generate)


@pytest.mark.parametrize("case", ["SFT, no text", "DPO"])
def test_a_stream_goes_on_without_it_as_if_it_were_not_there(case, tmp_path, caplog):
    kind, good, change, _ = BAD[case]
    rows = [{k: f"{v} w{7 + i}" for k, v in good.items()} for i in range(12)]
    broken = [*rows[:3], rows[3] | change, *rows[3:]]
    curves = []
    for library, given_rows in ((trl, rows), (trl_padfix, broken)):
        with caplog.at_level(logging.WARNING, logger="trl_padfix"):
            trainer = make(kind, tmp_path, stream(given_rows), library)
            trainer.train()
        curves.append(trajectory(trainer).tolist())
    assert curves[0] == curves[1]
    assert any(
        "So far 1 rows of the train stream were left out. A row of the train dataset has None" in text
        for text in caplog.messages
    )


@pytest.mark.parametrize("bad", [-5, 40])
def test_an_unknown_id_in_a_stream_makes_an_empty_row(bad, tmp_path, caplog):
    rows = [{"input_ids": [3 + i, 4, 5], "labels": [3 + i, 4, 5]} for i in range(12)]
    unknown = [*rows[:3], {"input_ids": [3, bad, 5], "labels": [3, 4, 5]}, *rows[4:]]
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        trainer = make("SFT", tmp_path, stream(unknown), padding_free=True)
        trainer.train()
    assert trainer.state.global_step == 3
    assert any(f"Row 3 of the batch holds the token id {bad}" in text for text in caplog.messages)
    collate = trainer.data_collator
    batch, empty = collate(unknown[:4]), collate([*rows[:3], {"input_ids": [], "labels": []}])
    assert all(batch[name].equal(empty[name]) for name in ("input_ids", "attention_mask", "labels"))
    assert sum(collate.odd_rows.values()) > 2


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "Reward", "GRPO"])
def test_an_empty_stream_is_said_to_be_empty(kind, tmp_path):
    with pytest.raises(ValueError, match="The train dataset is a stream without a row"):
        make(kind, tmp_path, stream([]))


texts = st.one_of(st.none(), st.text("ab", max_size=2))
messages = st.lists(
    st.fixed_dictionaries({"role": st.one_of(st.none(), st.sampled_from(["user", "assistant"])), "content": texts}),
    max_size=2,
)


@given(st.one_of(st.lists(texts, min_size=1, max_size=5), st.lists(messages, min_size=1, max_size=5)))
def test_a_bad_row_is_found_where_a_loop_finds_it(values):
    dataset = Dataset.from_list([{"prompt": value} for value in values])

    def bad(row):
        try:
            check_row(row, 0, ("prompt",))
        except DoubtfulRowError:
            return 1
        except ValueError:
            return 2
        return 0

    looped = [bad(row) for row in dataset]
    if any(looped):
        worst = max(looped)
        with pytest.raises(ValueError, match=f"Row {looped.index(worst)} "):
            validate_rows(dataset, "train", ("prompt",))
    else:
        assert validate_rows(dataset, "train", ("prompt",)) is dataset


@given(st.lists(st.lists(st.sampled_from([-100, -1, 0, 39, 40]), max_size=3), min_size=1, max_size=6))
def test_ids_are_looked_at_as_in_a_loop(rows):
    dataset = Dataset.from_list([{"a": row} for row in rows], features=Features({"a": List(Value("int64"))}))
    for ignored in ((), (-100,)):
        found = [(i, x) for i, row in enumerate(rows) for x in row if not 0 <= x < 40 and x not in ignored]
        assert ids_outside(dataset, "a", 40, ignored) == (found[0] if found else None)
