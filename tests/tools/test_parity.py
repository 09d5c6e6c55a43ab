"""`trl-padfix parity`: every mode and backend on the user's model and data, against eager float32."""

import json
import shutil

import pytest
import torch
import yaml
from datasets import Dataset
from kit.commands import trl_padfix_command
from kit.trainer_runs import BROKEN

from trl_padfix.tools.parity import compare, tokenize_rows
from trl_padfix.tools.tiny import build_qwen2, train_tokenizer


PAIRS = [
    {"prompt": "Who is there?", "chosen": " A friend of yours.", "rejected": " Nobody."},
    {"prompt": "Who is there, and why?", "chosen": " Me.", "rejected": " The wind, as on every night."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair.values()], vocab_size=320)


@pytest.fixture(scope="module")
def material(tmp_path_factory, tokenizer) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("material")
    tokenizer.save_pretrained(directory / "model")
    shape = dict(layers=2, hidden_size=32, heads=4, kv_heads=2, intermediate_size=48, initializer_range=0.2)
    build_qwen2(tokenizer, **shape).save_pretrained(directory / "model")
    Dataset.from_list(PAIRS).to_json(directory / "pairs.jsonl")
    return {"model": str(directory / "model"), "data": str(directory / "pairs.jsonl")}


def parity(material: dict[str, str], *more: str):
    return trl_padfix_command("parity", "--model", material["model"], "--data", material["data"], *more)


def table(output: str) -> list[list[str]]:
    """The rows of the Markdown table, without its rule."""
    lines = [line.strip() for line in output.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_the_command_prints_a_table_for_an_issue(material):
    result = parity(material)
    assert result.exit_code == 0, result.output
    header, *rows = table(result.output)
    assert header[:3] == ["attention", "mode", "tokens"]
    assert max(len(line) for line in result.output.splitlines() if "split:" not in line) <= 80
    assert [row[:2] for row in rows] == [
        [backend, mode] for backend in ("eager", "sdpa") for mode in ("padded", "padding-free", "prefix sharing")
    ]
    for _, mode, _, logps, gradient, packed, verdict in rows:
        assert max(float(logps), float(gradient)) < 1e-5
        assert (packed == "-") == (mode == "padded")
        assert verdict == "ok"
    padded, packed, shared = (int(row[2]) for row in rows[:3])
    assert shared < packed < padded
    assert "in float32 on cpu, 4 rows of" in result.output
    assert "transformers" in result.output


@pytest.mark.parametrize("mode", BROKEN)
def test_a_mode_that_computes_something_else_fails(mode, material, monkeypatch):
    name, broken = BROKEN[mode]
    monkeypatch.setattr(f"trl_padfix.core.call.layout_of.{name}", broken)
    result = parity(material, "--attn", "sdpa")
    assert result.exit_code == 1
    verdicts = {row[1]: row[-1] for row in table(result.output)[1:]}
    assert verdicts == dict.fromkeys(("padded", "padding-free", "prefix sharing"), "ok") | {mode: "FAILED"}
    assert f"sdpa, {mode}: parity FAILED" in result.output


def test_half_precision_may_be_as_far_off_as_it_is_padded(material):
    result = parity(material, "--dtype", "bfloat16", "--attn", "sdpa")
    assert result.exit_code == 0, result.output
    rows = table(result.output)[1:]
    assert all(float(row[3]) > 1e-3 for row in rows)
    assert "in bfloat16 on cpu" in result.output


def test_a_backend_that_cannot_run_fails_with_its_reason(material):
    result = parity(material, "--attn", "flash_attention_2", "--attn", "sdpa")
    assert result.exit_code == 1
    verdicts = [(row[0], row[-1]) for row in table(result.output)[1:]]
    assert verdicts == [("flash_attention_2", "FAILED"), *[("sdpa", "ok")] * 3]
    assert "FlashAttention2" in result.output


def test_a_yaml_of_a_training_names_model_and_data(material, tmp_path):
    path = tmp_path / "recipe.yaml"
    datasets = [{"path": "json", "data_files": material["data"]}]
    path.write_text(yaml.safe_dump({"model_name_or_path": material["model"], "datasets": datasets, "max_length": 8}))
    result = trl_padfix_command("parity", "--config", str(path), "--attn", "sdpa", "--no-gradients")
    assert result.exit_code == 0, result.output
    (_, padded, *_) = table(result.output)
    assert padded[2] == str(4 * 8)
    assert padded[4] == "-"


def test_a_recipe_with_a_tiny_model_needs_nothing_else(material, tmp_path):
    path = tmp_path / "recipe.yaml"
    datasets = [{"path": "json", "data_files": material["data"]}]
    path.write_text(yaml.safe_dump({"tiny_model": "tiny", "datasets": datasets}))
    result = trl_padfix_command("parity", "--config", str(path), "--attn", "sdpa", "--json", f"{path}.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "recipe.yaml.json").read_text())
    assert found["model"] == "tiny_model tiny"
    assert [(r["attention"], r["mode"], r["ok"]) for r in found["results"]] == [
        ("sdpa", mode, True) for mode in ("padded", "padding-free", "prefix sharing")
    ]
    assert found["compared"]
    assert found["ok"]
    assert found["results"][2]["tokens"] < found["results"][1]["tokens"] == sum(found["lengths"])
    path.write_text(yaml.safe_dump({"tiny_model": "tinny", "datasets": datasets}))
    result = trl_padfix_command("parity", "--config", str(path))
    assert result.exit_code == 2
    assert "'tinny' is not one of tiny, small" in result.output


def test_conversations_get_a_plain_template_where_the_model_has_none(material, tokenizer, tmp_path):
    chats = [{"messages": [{"role": "user", "content": p["prompt"]}] * (i + 1)} for i, p in enumerate(PAIRS)]
    Dataset.from_list(chats).to_json(tmp_path / "chats.jsonl")
    model = tmp_path / "model"
    shutil.copytree(material["model"], model)
    (model / "chat_template.jinja").unlink()
    command = ["parity", "--model", str(model), "--attn", "sdpa", "--no-gradients", "--data"]
    result = trl_padfix_command(*command, str(tmp_path / "chats.jsonl"))
    assert result.exit_code == 0, result.output
    assert "conversations in a plain chat template" in result.output
    assert "plain chat template" not in trl_padfix_command(*command, material["data"]).output


def test_rows_of_one_length_are_exchanged_for_others_or_it_is_said_that_there_was_no_padding(material, tmp_path):
    texts = ["Who is there?", "Who is here?", "A friend of yours, and the wind."]
    model, data = material["model"], tmp_path / "texts.jsonl"
    Dataset.from_list([{"text": text} for text in (*texts[:2], texts[2])]).to_json(data)
    command = ["parity", "--model", model, "--data", str(data), "--attn", "sdpa", "--no-gradients", "--rows", "2"]
    result = trl_padfix_command(*command)
    assert result.exit_code == 0, result.output
    Dataset.from_list([{"text": text} for text in texts]).to_json(data)
    result = trl_padfix_command(*command, "--max-length", "2", "--json", "-")
    assert result.exit_code == 1
    assert "There was no padding to compare: all 2 rows have 2 tokens" in result.output


MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        (PAIRS[0], ["Who is there? A friend of yours.<|end|>", "Who is there? Nobody.<|end|>"]),
        ({"chosen": "Who? Me.", "rejected": "Who? You."}, ["Who? Me.<|end|>", "Who? You.<|end|>"]),
        ({"prompt": "Who?", "completion": " Me."}, ["Who? Me.<|end|>"]),
        ({"text": "Who? Me."}, ["Who? Me.<|end|>"]),
        ({"prompt": "Who?"}, ["Who?"]),
        ({"conversations": [{"from": "user", "value": "Who?"}]}, ["<|start|>user\nWho?<|end|>\n"]),
        ({"messages": MESSAGES}, ["<|start|>user\nWho?<|end|>\n<|start|>assistant\nMe.<|end|>\n"]),
    ],
)
def test_every_type_of_data_becomes_rows(row, texts, tokenizer):
    batch = tokenize_rows(Dataset.from_list([row]), tokenizer, count=4, max_length=64)
    rows = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert [tokenizer.decode(ids) for ids in rows] == texts


def test_one_model_is_held_at_a_time(tokenizer):
    alive: list = []

    def load(backend, dtype):
        import weakref

        assert not any(reference() is not None for reference in alive)
        shape = dict(layers=1, hidden_size=16, heads=2, kv_heads=1, intermediate_size=16)
        model = build_qwen2(tokenizer, **shape, attn_implementation=backend).to(dtype)
        alive.append(weakref.ref(model))
        return model

    batch = tokenize_rows(Dataset.from_list(PAIRS), tokenizer, count=2, max_length=64)
    assert len(list(compare(load, batch, ["eager", "sdpa"], torch.float32))) == 6
    assert len(alive) == 3
