"""Doubtful data: with none of our fields set it trains as in TRL, to the bit, with a warning; `strict` refuses it."""

import pytest
import trl
from datasets import Dataset
from kit.methods import make_trainer
from kit.trainer_runs import build_tokenizer, our_warnings, trajectory

import trl_padfix
from trl_padfix.trainers.data.data_warnings import name_rows


TEMPLATE = "{% for m in messages %}{{ (m['content'] or '') + ' ' }}{% endfor %}"
"""Renders nothing of tool calls."""


def say(role, content, **more):
    return {"role": role, "content": content, "tool_calls": None} | more


def conversations(change):
    """Eight prompts of one message with two answers; `change` gets the rows."""
    rows = [
        {
            "prompt": [say("user", f"w{3 + i} w4 w5")],
            "chosen": [say("assistant", f"w{4 + i} " * (i + 1))],
            "rejected": [say("assistant", f"w{9 + i} w6")],
        }
        for i in range(8)
    ]
    for i, row in enumerate(rows):
        change(i, row)
    return rows


def empty(i, row):
    row["rejected"] = [say("assistant", "")] if i in (2, 5) else row["rejected"]


def equal(i, row):
    row["rejected"] = row["chosen"] if i in (2, 5) else row["rejected"]


def without_a_role(i, row):
    row["prompt"] = [say(None, f"w{3 + i} w4 w5")] if i in (2, 5) else row["prompt"]


def nothing(i, row):
    pass


def as_sft(rows):
    return [{"messages": row["prompt"] + row["chosen"]} for row in rows]


def as_kto(rows):
    pairs = enumerate(rows)
    return [{"prompt": row["prompt"], "completion": row["rejected"], "label": i % 2 == 0} for i, row in pairs]


CASES = {
    "KTO, empty": ("KTO", empty, as_kto, "completion of example 2 .* no token.* Examples 2, 5 "),
    "DPO, equal": ("DPO", equal, list, "2 of 8 pairs .* equal completions.* Rows 2, 5 "),
    "SFT, no role": ("SFT", without_a_role, as_sft, "Row 2 .*without a text `role`.* Rows 2, 5 "),
}


def make(library, case, folder, **config):
    kind, change, rows_of, _ = CASES[case]
    data = Dataset.from_list(rows_of(conversations(change)))
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    given = {"train_dataset": data, "processing_class": tokenizer, "max_steps": 3}
    given |= {"per_device_train_batch_size": 4, "loss_type": "apo_zero_unpaired"} if kind == "KTO" else {}
    return make_trainer(library, kind, folder, **given | {"per_device_train_batch_size": 4} | config)


@pytest.mark.parametrize("case", CASES)
def test_what_trl_trains_on_is_trained_on_to_the_bit(case, tmp_path, caplog):
    theirs, ours = make(trl, case, tmp_path), make(trl_padfix, case, tmp_path, padding_side="right")
    said = our_warnings(caplog)
    theirs.train()
    ours.train()
    a, b = trajectory(theirs), trajectory(ours)
    assert a.shape == b.shape == (3, 2)
    assert a.equal(b)
    assert a.abs().max() > 1e-3
    logs = [{k: v for k, v in log.items() if not k.startswith("perf/")} for log in ours.state.log_history[:-1]]
    assert logs == theirs.state.log_history[:-1]
    assert len([text for text in said if "`strict=True` makes" in text]) == 1
    with pytest.raises(ValueError, match=CASES[case][-1]):
        make(trl_padfix, case, tmp_path, strict=True)
    assert not [text for text in our_warnings(caplog)[len(said) :] if "`strict=True` makes" in text]


@pytest.mark.parametrize("strict", [False, True])
def test_a_doubtful_row_of_a_stream_is_kept(strict, tmp_path, caplog):
    def stream():
        return Dataset.from_list(conversations(without_a_role)).to_iterable_dataset()

    if strict:
        with pytest.raises(ValueError, match="without a text `role`"):
            make(trl_padfix, "DPO, equal", tmp_path, strict=True, train_dataset=stream()).train()
        return
    theirs = make(trl, "DPO, equal", tmp_path, train_dataset=stream())
    ours = make(trl_padfix, "DPO, equal", tmp_path, train_dataset=stream(), padding_side="right")
    theirs.train()
    ours.train()
    assert trajectory(ours).equal(trajectory(theirs))
    assert any("So far 1 rows of the train stream are doubtful" in text for text in our_warnings(caplog))


def test_rows_are_named_up_to_five():
    assert name_rows([4]) == "Row 4 (counted from 0)"
    assert name_rows([4, 7], "pair") == "Pairs 4, 7 (counted from 0)"
    assert name_rows([*range(9)]) == "Rows 0, 1, 2, 3, 4 (counted from 0, 9 in all)"
