"""`trl-padfix stats`: lengths are those that TRL trains on, and the figures follow from them."""

import copy
import json
import os
import random
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import trl
from datasets import Dataset
from kit.commands import trl_padfix_command
from kit.trainer_runs import SETTINGS, build_model

from trl_padfix.tools.data import load_rows, rename_columns, texts_of
from trl_padfix.tools.formats import rows_for_trainer, to_trl_format
from trl_padfix.tools.stats import (
    Lengths,
    batch_tokens,
    measure,
    memory_of,
    simulate_waiting,
    truncation_counts,
    with_completions,
)
from trl_padfix.tools.tiny import train_tokenizer
from trl_padfix.tools.token_rows import token_rows
from trl_padfix.tools.verdict import advise
from trl_padfix.trainers.batching.token_costs import text_costs


HH_RLHF = os.environ.get("TRL_PADFIX_HH_RLHF")
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
                "conversations": lambda a=asked: {
                    "chosen": [*a, say("assistant", 1, 9)], "rejected": [*a, say("assistant", 1, 9)]
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


PAIRS = ["pairs", "pairs with prompts", "conversations", "conversations with prompts"]
TEXTS = ["texts", "messages", "completions"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS), "Question: \nAnswer: user assistant"], 300)


@pytest.mark.parametrize("kind", [*PAIRS, *TEXTS])
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


def test_answers_are_those_that_kto_trains_on(tokenizer, tmp_path):
    pairs = build_rows("conversations with prompts", 8)
    rows = rows_for_trainer(pairs, "kto")
    assert len(rows) == 16
    trainer = trl.KTOTrainer(
        args=trl.KTOConfig(str(tmp_path), **SETTINGS, max_length=None, loss_type="apo_zero_unpaired"),
        processing_class=tokenizer, train_dataset=pairs, model=build_model(vocab_size=300),
        ref_model=build_model(vocab_size=300),
    )  # fmt: skip
    trained = {part: [len(ids) for ids in trainer.train_dataset[f"{part}_ids"]] for part in ("prompt", "completion")}
    found = measure(rows, tokenizer, trainer="kto")
    assert {name: sorted(part.tolist()) for name, part in found.columns.items()} == {
        name: sorted(lengths) for name, lengths in trained.items()
    }
    assert found.sequences.shape == (16, 1)


def test_the_completions_of_a_prompt_share_it(tokenizer):
    prompts = rows_for_trainer(build_rows("completions", 8), "grpo")
    assert prompts.column_names == ["prompt"]
    lengths = with_completions(measure(prompts, tokenizer, trainer="grpo"), 4, 20)
    found = batch_tokens(lengths, 8)
    completions, prompt = lengths.columns["completion"], lengths.columns["prompt"]
    assert completions.shape == (8, 4)
    assert 15 <= completions.min() <= completions.max() <= 25
    assert found.real == completions.sum() + 4 * prompt.sum()
    assert found.padded == 8 * 4 * (completions + prompt[:, None]).max()
    assert found.distinct <= completions.sum() + prompt.sum()
    verdict = advise(lengths, batch_size=8, trainer="grpo")
    assert (verdict.groups, verdict.generations) == (False, 4)
    assert verdict.real / verdict.auto > 1.2


@pytest.mark.parametrize(("columns", "trainer"), [(["text"], "kto"), (["text"], "grpo"), (["prompt"], "dpo")])
def test_a_trainer_that_does_not_take_the_columns_is_an_error(columns, trainer):
    rows = Dataset.from_dict({column: ["a"] for column in columns})
    with pytest.raises(ValueError, match=f"and {trainer} needs `"):
        rows_for_trainer(rows, trainer)


ASKED, SAID = "alpha beta?", "gamma."
SHAREGPT = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]
CHAT = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]
FORMATS = {
    "ShareGPT": ({"conversations": SHAREGPT}, {"messages": CHAT}),
    "ShareGPT with a system prompt": (
        {"conversations": SHAREGPT, "system": "Be kind."},
        {"messages": [{"role": "system", "content": "Be kind."}, *CHAT]},
    ),
    "ShareGPT with tools": (
        {"conversations": [*SHAREGPT, {"from": "observation", "value": "7"}], "tools": "[]"},
        {"messages": [*CHAT, {"role": "tool", "content": "7"}], "tools": "[]"},
    ),
    "ShareGPT pairs": (
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "No."}},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "No."}]},
    ),
    "ShareGPT for KTO": (
        {"conversations": SHAREGPT, "kto_tag": True}, {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True}
    ),
    "Alpaca": ({"instruction": "alpha", "input": "beta?", "output": SAID, "text": "-"},
               {"prompt": [{"role": "user", "content": "alpha\nbeta?"}], "completion": CHAT[1:]}),
    "Alpaca without input": ({"instruction": ASKED, "input": "", "output": SAID},
                             {"prompt": CHAT[:1], "completion": CHAT[1:]}),
    "Alpaca with a history": ({"instruction": ASKED, "output": SAID, "history": [[ASKED, SAID]]},
                              {"prompt": [*CHAT, *CHAT[:1]], "completion": CHAT[1:]}),
    "Alpaca pairs": ({"instruction": ASKED, "chosen": SAID, "rejected": "No."},
                     {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "No."}]}),
    "GSM8K": ({"question": ASKED, "answer": SAID}, {"prompt": ASKED, "completion": SAID}),
    "TRL": ({"messages": CHAT, "id": 1}, {"messages": CHAT, "id": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_other_programs_are_those_that_trl_takes(name):
    theirs, trls = FORMATS[name]
    assert to_trl_format(Dataset.from_list([theirs])).to_list() == [trls]


def test_keys_of_messages_are_renamed():
    rows = Dataset.from_list([{"talk": [{"who": "human", "said": ASKED}, {"who": "gpt", "said": SAID}]}])
    renamed = rename_columns(rows, "talk=conversations,who=from,said=value")
    assert to_trl_format(renamed).to_list() == [{"messages": CHAT}]
    with pytest.raises(
        ValueError, match=r"no column \['when'\]; it has \['talk'\], and messages have \['said', 'who'\]"
    ):
        rename_columns(rows, "when=from")


def test_the_chosen_side_of_pairs_keeps_its_tools():
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:], "tools": "[]", "id": 1}
    rows = rows_for_trainer(Dataset.from_list([pair]), "sft").to_list()
    assert rows == [{"prompt": CHAT[:1], "completion": CHAT[1:], "tools": "[]"}]


def test_rows_without_their_own_template_settings_and_tokenizers_without_an_end_are_counted(tokenizer):
    rows = [{"messages": CHAT, "chat_template_kwargs": how} for how in ({"style": "short"}, None)]
    assert len(measure(Dataset.from_list(rows), tokenizer)) == 2
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    text = Dataset.from_list([{"text": "alpha"}])
    assert measure(text, endless).sequences == measure(text, tokenizer).sequences - 1


SYSTEM = "Question: alpha beta gamma delta "


@pytest.mark.parametrize("kind", ["texts", "pairs with prompts"])
@pytest.mark.parametrize("max_length", [None, 30])
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
    single = batch_tokens(lengths, 1)
    assert (single.real == single.distinct) == (kind == "texts")


def test_grouped_batches_hold_rows_that_begin_alike(tokenizer):
    rows = build_rows("texts", 4)
    rows = Dataset.from_list([{"text": f"{row['text'] * 5}{i} alpha"} for i in range(4) for row in rows])
    lengths = measure(rows, tokenizer)
    random, grouped = (batch_tokens(lengths, 4, order=order) for order in ("random", "prefix"))
    assert grouped.real == random.real
    assert grouped.distinct < 0.7 * random.distinct
    how = {"batch_size": 2, "accumulation": 2, "grouped": True}
    assert simulate_waiting(lengths.costs(), 1, **how).fixed == 1
    assert 0 < simulate_waiting(lengths.costs(), 2, **how).budget <= 1


def test_rows_that_are_truncated_at_their_beginning_have_nothing_in_common(tokenizer):
    lengths = measure(build_rows("texts", 8).map(lambda row: {"text": SYSTEM + row["text"]}), tokenizer)
    shortest = int(lengths.columns["text"].min())
    found = batch_tokens(lengths.truncated(shortest - 1, "keep_end"), 8)
    assert found.real == found.distinct == 8 * (shortest - 1)


def test_what_max_length_does_is_what_trl_does():
    tokens = {"prompt_ids": [5, 9, 12], "chosen_ids": [5, 1, 1], "rejected_ids": [2, 3, 1]}
    lengths = Lengths.of([{name: [0] * column[i] for name, column in tokens.items()} for i in range(3)])
    counts = lambda *limit: truncation_counts(lengths, lengths.truncated(*limit))  # noqa: E731
    assert counts(10) == {"rows": 3, "truncated": 1, "dropped": 1}
    assert counts(10, "keep_end") == {"rows": 3, "truncated": 2, "dropped": 0}
    assert counts(None) == {"rows": 3, "truncated": 0, "dropped": 0}
    assert len(lengths.truncated(10)) == 2


def test_processes_wait_less_when_rows_are_dealt_out_evenly():
    costs = text_costs(np.random.default_rng(0).lognormal(5, 0.8, 500).astype(int).clip(1, 1024))
    found = [simulate_waiting(costs, processes) for processes in (1, 2, 8)]
    assert found[0].fixed == found[0].budget == 1
    for wait in found[1:]:
        assert 1 - wait.budget < 0.5 * (1 - wait.fixed)
    assert found[2].fixed < found[1].fixed
    assert memory_of(costs, 8) > 8 * costs.tokens.mean()


def test_the_share_of_time_is_that_of_the_slowest_process():
    # Two processes, one row each: 100 and 300 tokens in every forward.
    wait = simulate_waiting(text_costs([100, 300]), 2, batch_size=1, accumulation=1)
    assert wait.fixed == pytest.approx(400 / (2 * 300))


def test_no_rows_and_no_known_columns_are_errors(tokenizer):
    with pytest.raises(ValueError, match="The dataset is empty"):
        measure(Dataset.from_dict({"text": []}), tokenizer)
    with pytest.raises(ValueError, match=r"columns \['words'\]. Pairs need `chosen` and `rejected`"):
        measure(Dataset.from_dict({"words": ["a"]}), tokenizer)


# Where rows come from


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = build_rows("pairs")
    rows.to_json(folder / "pairs.jsonl")
    rows.to_json(folder / "pairs.json.gz", compression="gzip")
    rows.to_parquet(folder / "pairs.parquet")
    (folder / "folder").mkdir()
    rows.to_json(folder / "folder" / "train.jsonl")
    recipe = f"dataset_name: {folder / 'folder'}\ntiny_model: tiny\nmax_length: 512\nmodel_name_or_path: null\n"
    (folder / "named.yaml").write_text(recipe)
    mixture = f"datasets:\n  - path: json\n    data_files: {folder / 'pairs.jsonl'}\n    split: train\n"
    (folder / "mixture.yaml").write_text(mixture)
    return folder


SOURCES = ["pairs.jsonl", "pairs.json.gz", "pairs.parquet", "folder", "named.yaml", "mixture.yaml"]


@pytest.mark.parametrize("name", SOURCES)
def test_rows_come_from_files_folders_and_recipes(name, files):
    rows = load_rows(str(files / name))
    assert rows.to_list() == build_rows("pairs").to_list()
    assert list(texts_of(rows))[:2] == [rows[0]["chosen"], rows[0]["rejected"]]


# The command


def test_the_command_prints_tables_and_writes_json_and_a_picture(files, tmp_path):
    picture, figures = tmp_path / "data.png", tmp_path / "data.json"
    result = trl_padfix_command(
        "stats", str(files / "pairs.jsonl"), "--train-tokenizer", "300", "--world-size", "2,8",
        "--max-length", "60", "--plot", str(picture), "--json", str(figures), "--verbose",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "24 pairs of pairs.jsonl, tokenized with a BPE of 300" in result.output
    assert "max_length=60 (keep_start) truncates" in result.output
    for heading in (
        "prompt",
        "chosen",
        "rejected",
        "sequence",
        "padded/real",
        "fixed batches",
        "max_tokens_per_batch=",
    ):
        assert heading in result.output
    found = json.loads(figures.read_text())
    assert [b["batch_size"] for b in found["batches"]] == [1, 2, 4, 8, 16]
    assert [w["processes"] for w in found["waiting"]] == [2, 8]
    lines = found["verdict"]["lines"]
    assert len(lines) <= 8
    assert all(line in result.output.replace("\n", " ") or line in result.output for line in lines)
    assert found["batches"][3]["distinct"] < found["batches"][3]["real"] < found["batches"][3]["padded"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_recipe_brings_its_own_settings(files):
    result = trl_padfix_command("stats", str(files / "named.yaml"), "--world-size", "2")
    assert result.exit_code == 0, result.output
    assert "padded/real" not in result.output  # without `--verbose`
    assert "tokenized with a BPE of 2048" in result.output
    assert "max_length=512" in result.output


def test_columns_of_other_names_are_mapped(tokenizer, tmp_path):
    Dataset.from_dict({"q": ["alpha beta"] * 9, "a": ["gamma"] * 9, "text": ["x"] * 9}).to_json(tmp_path / "qa.jsonl")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["stats", str(tmp_path / "qa.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--world-size", "2"]
    figures = tmp_path / "qa.json"
    result = trl_padfix_command(*command, "--columns", "q=prompt,a=completion", "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert json.loads(figures.read_text())["lengths"]["text"]["mean"] > 2
    for columns, message in (("q", "is no mapping of columns"), ("z=prompt", "has no column")):
        result = trl_padfix_command(*command, "--columns", columns)
        assert result.exit_code == 2
        assert message in result.output


def test_texts_have_no_prompt_to_share(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **how: Path(path).touch())
    build_rows("texts").to_json(tmp_path / "texts.jsonl")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    result = trl_padfix_command(
        "stats", str(tmp_path / "texts.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--world-size", "2",
        "--plot", str(tmp_path / "texts.png"), "--max-length", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "24 rows of texts.jsonl" in result.output
    assert "truncates" not in result.output
    assert (tmp_path / "texts.png").exists()


def test_the_command_takes_each_trainers_data(tmp_path):
    build_rows("pairs with prompts", 40).to_json(tmp_path / "pairs.jsonl")
    row = {"conversations": SHAREGPT * 2, "tools": None}
    Dataset.from_list([row] * 9).remove_columns("tools").to_json(tmp_path / "talk.jsonl")
    command = ["--train-tokenizer", "300", "--world-size", "2", "--json", str(tmp_path / "found.json")]
    found, printed = {}, {}
    for name, data, more in (
        ("dpo", "pairs", []), ("kto", "pairs", ["--trainer", "kto"]), ("sft", "talk", ["--expand-turns"]),
        ("grpo", "pairs", ["--trainer", "grpo", "--generations", "4", "--completion-length", "9"]),
        ("grouped", "pairs", ["--group-by-prefix", "--verbose"]), ("reward", "pairs", ["--trainer", "reward"]),
    ):  # fmt: skip
        result = trl_padfix_command("stats", str(tmp_path / f"{data}.jsonl"), *command, *more)
        assert result.exit_code == 0, result.output
        found[name] = json.loads((tmp_path / "found.json").read_text())
        printed[name] = " ".join(result.output.split())
    assert [len(found[name]["lengths"]) for name in ("dpo", "kto", "sft", "grpo")] == [4, 3, 1, 3]
    rows = {name: figures["truncation"]["rows"] for name, figures in found.items()}
    assert rows == {"dpo": 40, "kto": 80, "sft": 18, "grpo": 40, "grouped": 40, "reward": 40}
    assert "80 rows of pairs.jsonl, tokenized with a BPE of 300 for kto" in printed["kto"]
    assert "bench.py --trainer dpo" in printed["dpo"]
    assert "--max-length" not in printed["dpo"]
    given = ["--tokenizer", str(tmp_path / "a tokenizer"), "--max-length", "64"]
    train_tokenizer(WORDS, 300).save_pretrained(tmp_path / "a tokenizer")
    result = trl_padfix_command("stats", str(tmp_path / "pairs.jsonl"), "--world-size", "2", *given)
    line = next(line for line in result.output.splitlines() if line.startswith("Measure it in a clone: "))
    assert set(given[2:]) < set(shlex.split(line))
    assert not any("bench" in printed[name].split("Verdict")[1] for name in ("kto", "grpo", "reward"))
    assert "batches of rows that begin alike" in printed["grouped"]
    for flags in (["--trainer", "grpo", "--group-by-prefix"], ["--trainer", "abacus"], ["--expand-turns"]):
        assert trl_padfix_command("stats", str(tmp_path / "pairs.jsonl"), *command, *flags).exit_code == 2


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.skipif(
    HH_RLHF is None, reason="set TRL_PADFIX_HH_RLHF to the pairs of Anthropic/hh-rlhf, harmless-base/test"
)
def test_hh_rlhf_has_the_known_figures_within_a_minute(tmp_path):
    begin = time.process_time()
    command = ["stats", HH_RLHF, "--train-tokenizer", "8192", "--world-size", "2,8,64,512"]
    result = trl_padfix_command(*command, "--json", str(tmp_path / "hh.json"))
    assert result.exit_code == 0, result.output
    assert time.process_time() - begin < 60
    found = json.loads((tmp_path / "hh.json").read_text())
    lengths = {name: part["mean"] for name, part in found["lengths"].items()}
    known = {"prompt": 126, "chosen": 41, "rejected": 52}
    assert {name: lengths[name] for name in known} == pytest.approx(known, rel=0.05)
    assert found["lengths"]["prompt"]["max"] == pytest.approx(851, rel=0.05)
    batches = {b["batch_size"]: b for b in found["batches"]}
    for size, ratios in {4: (2.01, 1.57, 3.17), 8: (2.52, 1.57, 3.97), 16: (3.02, 1.57, 4.75)}.items():
        b = batches[size]
        ours = (b["padded"] / b["real"], b["real"] / b["distinct"], b["padded"] / b["distinct"])
        assert ours == pytest.approx(ratios, rel=0.05)
    two, *more = found["waiting"]
    assert 1 - two["budget"] < 0.5 * (1 - two["fixed"])
    page = (Path(__file__).parents[2] / "docs" / "many_gpus.md").read_text()
    rows = re.findall(r"\| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|", page)
    assert [int(row[0]) for row in rows] == [w["processes"] for w in more]
    for row, w in zip(rows, more, strict=True):
        assert [float(share) for share in row[1:]] == pytest.approx([100 * w["fixed"], 100 * w["budget"]], abs=1)
