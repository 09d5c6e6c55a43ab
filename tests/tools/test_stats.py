"""`trl-padfix stats`: lengths are those that TRL trains on, and the figures follow from them."""

import copy
import random

import pytest
import trl
from datasets import Dataset
from kit.commands import trl_padfix_command
from kit.methods import make_trainer
from kit.trainer_runs import SETTINGS, build_model

from trl_padfix.tools.data import load_rows, token_rows, trainer_of
from trl_padfix.tools.stats import Lengths, advise, batch_tokens, measure
from trl_padfix.tools.tiny import texts_of, train_tokenizer


WORDS = ["alpha", "beta", "gamma", "delta", "omega"]


def words(draw, low, high):
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


def build_rows(kind, count=24):
    draw = random.Random(0)
    say = lambda role, *sizes: {"role": role, "content": words(draw, *sizes)}  # noqa: E731
    rows = []
    for _ in range(count):
        prompt = f"Question: {words(draw, 2, 12)}\nAnswer: "
        asked = [say("user", 2, 12), say("assistant", 1, 5), say("user", 1, 5)]
        rows.append(
            {
                "pairs": lambda p=prompt: {"chosen": p + words(draw, 1, 9), "rejected": p + words(draw, 1, 9)},
                "pairs with prompts": lambda p=prompt: {
                    "prompt": p, "chosen": words(draw, 1, 9), "rejected": words(draw, 1, 9)
                },
                "conversations with prompts": lambda a=asked: {
                    "prompt": a, "chosen": [say("assistant", 1, 9)], "rejected": [say("assistant", 1, 9)]
                },
                "texts": lambda p=prompt: {"text": p},
                "messages": lambda a=asked: {"messages": a},
                "completions": lambda p=prompt: {"prompt": p, "completion": words(draw, 1, 9)},
            }[kind]()
        )  # fmt: skip
    return Dataset.from_list(rows)


PAIRS = ["pairs", "pairs with prompts", "conversations with prompts"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS), "Question: \nAnswer: user assistant"], 300)


@pytest.mark.parametrize("kind", ["pairs", "conversations with prompts", "messages", "completions"])
def test_lengths_are_those_that_trl_trains_on(kind, tokenizer, tmp_path):
    rows = build_rows(kind)
    settings = SETTINGS | {"output_dir": str(tmp_path), "max_length": None}
    given = {"processing_class": tokenizer, "train_dataset": rows, "model": build_model(vocab_size=300)}
    if kind in PAIRS:
        trainer = trl.DPOTrainer(args=trl.DPOConfig(**settings), ref_model=build_model(vocab_size=300), **given)
        parts = ("prompt", "chosen", "rejected")
        trained = {part: [len(ids) for ids in trainer.train_dataset[f"{part}_ids"]] for part in parts}
    else:
        trainer = trl.SFTTrainer(args=trl.SFTConfig(**settings), **given)
        trained = {"text": [len(ids) for ids in trainer.train_dataset["input_ids"]]}
    found = {name: part.tolist() for name, part in measure(rows, tokenizer).columns.items()}
    assert found == trained
    assert len({*map(tuple, found.values())}) == len(found)
    assert all(len(set(part)) > 3 for part in found.values())


CHAT = [{"role": "user", "content": "alpha beta?"}, {"role": "assistant", "content": "gamma."}]


def test_rows_without_their_own_template_settings_and_tokenizers_without_an_end_are_counted(tokenizer):
    rows = [{"messages": CHAT, "chat_template_kwargs": how} for how in ({"style": "short"}, None)]
    assert len(measure(Dataset.from_list(rows), tokenizer)) == 2
    mixed = [{"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": "alpha", "completion": "beta"}]
    assert len(measure(mixed, tokenizer)) == 2  # TRL trains on both
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    text = Dataset.from_list([{"text": "alpha"}])
    assert measure(text, endless).sequences == measure(text, tokenizer).sequences - 1


def test_rows_without_a_token_to_train_on_are_dropped_as_in_trl(tmp_path):
    rows = Dataset.from_list([{"prompt": "w1" + " w2" * n, "completion": " w3 w4"} for n in range(12)])
    trainer = make_trainer(trl, "SFT", tmp_path, train_dataset=rows, max_length=6)
    lengths = measure(rows, trainer.processing_class)
    assert len(lengths.truncated(6)) == len(trainer.train_dataset) == 5
    assert len(lengths.truncated(None)) == 12


SYSTEM = "Question: alpha beta gamma delta "


@pytest.mark.parametrize(
    ("kind", "max_length"), [("texts", 30), ("pairs with prompts", None), ("pairs with prompts", 30)]
)
def test_what_the_rows_of_a_batch_have_in_common_is_counted(kind, max_length, tokenizer):
    name = "text" if kind == "texts" else "prompt"
    rows = build_rows(kind, 8).map(lambda row: {name: SYSTEM + row[name]})
    lengths = measure(rows, tokenizer).truncated(max_length)
    found = batch_tokens(lengths, len(lengths))
    sequences = []
    for row in token_rows(list(rows), tokenizer):
        if "input_ids" in row:
            sequences.append(row["input_ids"][:max_length])
        elif max_length is None or len(row["prompt_ids"]) < max_length:
            sequences += [(row["prompt_ids"] + row[f"{side}_ids"])[:max_length] for side in ("chosen", "rejected")]
    own = len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})
    assert found.padded == len(sequences) * max(map(len, sequences))
    assert found.real == sum(map(len, sequences))
    assert own <= found.distinct <= 1.05 * own  # completions that begin alike are not looked for
    if kind == "texts":
        assert found.distinct == own
        pairs = [2 * max(map(len, pair)) for pair in zip(sequences[::2], sequences[1::2], strict=False)]
        assert batch_tokens(lengths, 2, order="file").padded == pytest.approx(sum(pairs) / len(pairs))
    single = batch_tokens(lengths, 1)
    assert (single.real == single.distinct) == (kind == "texts")


def test_the_trainer_is_the_one_that_takes_the_columns():
    assert trainer_of(["prompt", "chosen", "rejected"]) == "dpo"
    assert trainer_of(["prompt", "completion", "label"]) == "kto"
    assert trainer_of(["prompt", "completion"]) == trainer_of(["messages", "id"]) == "sft"


def test_rows_come_from_files_and_folders(tmp_path):
    rows = build_rows("pairs")
    rows.to_json(tmp_path / "pairs.jsonl")
    rows.to_json(tmp_path / "pairs.json.gz", compression="gzip")
    rows.to_parquet(tmp_path / "pairs.parquet")
    rows.to_csv(tmp_path / "pairs.csv")
    (tmp_path / "folder").mkdir()
    rows.to_json(tmp_path / "folder" / "train.jsonl")
    rows.save_to_disk(tmp_path / "disk", num_shards=2)
    for name in ("pairs.jsonl", "pairs.json.gz", "pairs.parquet", "pairs.csv", "folder", "disk"):
        loaded = load_rows(str(tmp_path / name))
        assert loaded.to_list() == rows.to_list()
        assert list(texts_of(loaded))[:2] == [rows[0]["chosen"], rows[0]["rejected"]]
    sharegpt = [{"from": "user", "value": "alpha beta?"}, {"from": "assistant", "value": "gamma."}]
    Dataset.from_list([{"conversations": sharegpt}]).to_json(tmp_path / "talks.jsonl")
    assert load_rows(str(tmp_path / "talks.jsonl")).to_list() == [{"messages": CHAT}]


@pytest.mark.parametrize(
    ("kind", "more", "first"),
    [
        ("pairs", ["--max-length", "60"], "24 pairs of"),
        ("texts", ["--max-length", "0", "--batch-size", "1"], "24 rows of"),
        ("messages", ["--expand-turns"], "48 rows of"),  # two turns of the assistant in each
    ],
)
def test_the_command_prints_counts_and_a_verdict(kind, more, first, tmp_path):
    rows = build_rows(kind)
    if kind == "messages":
        rows = rows.map(lambda row: {"messages": [*row["messages"], {"role": "assistant", "content": "omega"}]})
    rows.to_json(tmp_path / "rows.jsonl")
    given = ["--train-tokenizer", "300", *more]
    result = trl_padfix_command("stats", str(tmp_path / "rows.jsonl"), *given)
    assert result.exit_code == 0, result.output
    assert first in result.output
    assert ("truncates" in result.output) == ("0" not in more)
    assert "Verdict:\nUse padding_free=True" in result.output
    assert ("One row has no padding" in result.output) == ("--batch-size" in more)


# -- the verdict of `trl-padfix stats`: counts are those of layouts, and the advice follows the data


def pairs(count, low, high, prompt=100):
    """Pairs with a prompt of their own, of about `prompt` tokens."""
    draw = random.Random(0)
    ids = lambda length: [draw.randrange(10**6) for _ in range(length)]  # noqa: E731
    return [
        {
            "prompt_ids": ids(prompt and draw.randint(prompt // 2, 2 * prompt)),
            "chosen_ids": ids(draw.randint(low, high)),
            "rejected_ids": ids(draw.randint(low, high)),
        }
        for _ in range(count)
    ]


def tree(trees, turns=4, system=200, turn=20):
    """Rows of rollouts: each row goes on where the row before it ends, and all of a tree share a system prompt."""
    draw = random.Random(0)
    rows = []
    for _ in range(trees):
        begin = [draw.randrange(10**6) for _ in range(system)]
        for _ in range(4):
            row = list(begin)
            for _ in range(turns):
                row = row + [draw.randrange(10**6) for _ in range(turn)]
                rows.append({"input_ids": row})
    return rows


KINDS = {  # whether to share, and whether to group
    "pairs": (lambda: pairs(64, 5, 60), True, False),
    "a tree of rows": (lambda: tree(16), True, True),
    "equal lengths, nothing in common": (lambda: pairs(64, 30, 30, prompt=0), False, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_advice_follows_the_data(kind):
    build, shares, groups = KINDS[kind]
    found = advise(Lengths.of(build()), trainer="dpo", batch_size=8)
    assert (found.shares, found.groups) == (shares, groups)
    assert found.grouped.auto <= 1.01 * found.random.auto <= 1.01 * found.random.real
    assert found.random.real <= found.by_length.padded <= found.random.padded
    text = "\n".join(found.lines())
    assert ('prefix_sharing="auto"' in text) is shares
    assert ("group_by_prefix=True" in text) is groups
    padded = found.random.padded
    assert f"{padded / found.tokens:.1f}x ({padded:,.0f} / {found.tokens:,.0f} tokens)" in text
    if kind.startswith("equal"):
        assert found.random.padded == pytest.approx(found.tokens, rel=0.02)
