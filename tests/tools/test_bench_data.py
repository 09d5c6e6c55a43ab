"""`trl-padfix bench` measures every format that the trainers take."""

import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from datasets import Dataset
from kit.cells import every_second
from kit.commands import build_pairs, trl_padfix_command

from trl_padfix.cli import progress
from trl_padfix.tools.bench import measure as bench
from trl_padfix.tools.bench.building import prepare
from trl_padfix.tools.bench.settings import BenchSettings
from trl_padfix.tools.data import give_template
from trl_padfix.tools.tiny import train_tokenizer


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


PLAIN = [{"prompt": f"{row['chosen'][:20]} ", **row} for row in build_pairs()]
CHATS = [{n: said("user" if n == "prompt" else "assistant", text) for n, text in row.items()} for row in PLAIN]
WHOLE = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in CHATS]
COMPLETED = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in CHATS]
SHAREGPT = [{"conversations": [{"from": m["role"], "value": m["content"]} for m in row["chosen"]]} for row in WHOLE]
FORMATS = {
    "dpo": {"prompts": PLAIN, "chats": CHATS, "whole chats": WHOLE},
    "sft": {
        "pairs": PLAIN,
        "chats": CHATS,
        "messages": [{"messages": row["chosen"]} for row in WHOLE],
        "text": [{"text": row["chosen"]} for row in PLAIN],
        "completions": COMPLETED,
        "plain completions": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PLAIN],
        "unpaired": [{**row, "label": True} for row in COMPLETED],
        "ShareGPT": SHAREGPT,
        "Alpaca": [{"instruction": row["prompt"], "input": "", "output": row["chosen"]} for row in PLAIN],
    },
    "grpo": {"prompts": PLAIN, "chats": CHATS, "answers": [{"prompt": r["prompt"], "solution": "4"} for r in CHATS]},
}
CASES = [(trainer, name) for trainer, formats in FORMATS.items() for name in formats]
SHORT = shlex.split("--shape tiny --pairs 2 --steps 2 --warmup 0 --device cpu --peak-tflops 1000 --no-memory")
SHORT += shlex.split("--generations 2 --completion-length 8")


def measured(path, rows, *options: str):
    data = path / "rows.jsonl"
    Dataset.from_list(rows).to_json(data)
    result = trl_padfix_command("bench", "--data", str(data), *SHORT, *options, "--json", str(path / "found.json"))
    found = json.loads((path / "found.json").read_text()) if (path / "found.json").exists() else {}
    return result, found


@pytest.mark.parametrize(("trainer", "name"), every_second(CASES))
def test_a_format_of_the_trainer_is_measured(trainer, name, tmp_path):
    rows = FORMATS[trainer][name]
    result, found = measured(tmp_path, rows, "--trainer", trainer)
    assert result.exit_code == 0, result.output
    tokens = {variant["name"]: variant["tokens"] for variant in found["variants"]}
    assert tokens["prefix_sharing"] <= tokens["padding_free"] < tokens["trl"]
    chats = name == "Alpaca" or not any(isinstance(value, str) for value in rows[0].values() if value != "4")
    assert ("Conversations were rendered with a plain chat template" in result.output) == chats
    assert (found["chat_template"] is not None) == chats


def test_sft_on_pairs_with_prompts_reads_the_prompts():
    settings = BenchSettings(trainer="sft", pairs=2, steps=2, warmup=0, shape="tiny")
    step = prepare(Dataset.from_list(PLAIN), settings)
    texts = [step.trainer.processing_class.decode(row["input_ids"]) for row in step.rows]
    assert {text.removesuffix("<|end|>") for text in texts} <= {row["prompt"] + row["chosen"] for row in PLAIN}


@pytest.mark.parametrize(
    ("trainer", "rows", "message"),
    [
        ("dpo", COMPLETED, "dpo needs `chosen` and `rejected`"),
        ("sft", [{"instruction": "a"}], "sft needs `completion` and `prompt`, or `messages`"),
        ("grpo", [{"text": "a"}], "grpo needs `prompt`"),
        ("dpo", [{**row, "images": ["a.png"]} for row in CHATS], "the models that are measured read text"),
        ("sft", [{"text": None}, {"text": "a"}], "Row 0 (counted from 0) has None in column `text`"),
        ("grpo", PLAIN[:3], "The data gives 3 rows, and 4 are needed"),
    ],
)
def test_what_a_trainer_does_not_take_is_an_error(trainer, rows, message, tmp_path):
    result, _ = measured(tmp_path, rows, "--trainer", trainer)
    assert result.exit_code == 2, result.exception
    assert message in result.output


def test_columns_of_other_names_are_renamed(tmp_path):
    rows = [{"question": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in PLAIN]
    result, _ = measured(tmp_path, rows, "--columns", "question=prompt,good=chosen,bad=rejected")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("template", ["{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}", None])
def test_a_tokenizer_that_is_named_renders_conversations(template, tmp_path):
    tokenizer = train_tokenizer(["alpha beta gamma"], vocab_size=300)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    _, trained = measured(tmp_path, CHATS)
    result, found = measured(tmp_path, CHATS, "--tokenizer", str(tmp_path / "tokenizer"))
    assert result.exit_code == 0, result.output
    assert ("as" in found["chat_template"] and "has none" in found["chat_template"]) == (template is None)
    assert f"rendered with {found['chat_template']}." in result.output
    assert found["variants"][0]["tokens"] > trained["variants"][0]["tokens"]  # it knows fewer words


def test_a_plain_template_is_given_to_those_that_have_none():
    tokenizer = train_tokenizer(["a"], vocab_size=300)
    own = tokenizer.chat_template
    assert not give_template(tokenizer)
    assert tokenizer.chat_template == own
    tokenizer.chat_template, tokenizer.eos_token = None, "</s>"
    assert give_template(tokenizer)
    assert tokenizer.apply_chat_template(said("user", "Who?"), tokenize=False) == "user\nWho?</s>\n"


def test_made_up_data_is_not_for_grpo():
    result = trl_padfix_command("bench", "--trainer", "grpo", "--data", "lengths:9/5", *SHORT)
    assert result.exit_code == 2
    assert "--prompt-length" in result.output


# Progress, and Ctrl-C


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_after(steps: int, monkeypatch) -> None:
    """Let the process be interrupted while it computes the step after so many."""
    run, calls = bench.BenchStep.run, []

    def counting(self, *args):
        calls.append(args)
        if len(calls) == steps + 1:
            signal.raise_signal(signal.SIGINT)
        return run(self, *args)

    monkeypatch.setattr(bench.BenchStep, "run", counting)


OPTIONS = shlex.split("bench --data lengths:9/5 --pairs 2 --steps 4 --shape tiny --device cpu --peak-tflops 1000")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize(("steps", "counted"), [(7, 2), (13, 4)])
def test_ctrl_c_leaves_the_figures_of_the_steps_until_then(steps, counted, monkeypatch, tmp_path):
    interrupted_after(steps, monkeypatch)  # in a step, and while memory is measured
    path = tmp_path / "found.json"
    variants = ["--variants", "trl,padding_free,trl_grouped"]
    result = trl_padfix_command(*OPTIONS, "--warmup", "0", *variants, "--json", str(path))
    assert result.exit_code == 130, result.output
    found = json.loads(path.read_text())
    assert found["partial"]
    assert {variant["name"]: variant["steps"] for variant in found["variants"]}["trl"] == counted
    assert f"PARTIAL: stopped after {counted} of 4 counted steps" in result.output
    assert ("without trl_grouped" in result.output) == (counted < 4)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_before_a_counted_step_leaves_nothing(monkeypatch, tmp_path):
    interrupted_after(1, monkeypatch)
    result = trl_padfix_command(*OPTIONS, "--json", str(tmp_path / "found.json"))
    assert result.exit_code not in (0, 2)
    assert not (tmp_path / "found.json").exists()


def test_without_a_terminal_a_line_now_and_then_says_how_much_is_left(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    result = trl_padfix_command(*OPTIONS, "--steps", "2", "--warmup", "0")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if "s left" in line]
    assert [line.split(" steps")[0] for line in lines] == [f"{done} of 9" for done in range(1, 9)]
    assert lines[-1].endswith("now memory of prefix_sharing")
    assert "s left" not in result.stdout


@pytest.mark.matrix
@pytest.mark.slow
def test_no_log_of_the_profiler_reaches_the_terminal():
    command = [sys.executable, "-m", "trl_padfix", *OPTIONS, "--steps", "1", "--warmup", "0", "--profile"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Self CPU time total" in done.stdout
    for line in ("Profiler", "profiler_st", "Warning"):
        assert line not in done.stderr, done.stderr


def test_on_a_terminal_a_bar_says_it(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    with progress.progress() as watch:
        watch("padding_free", 3, 9)
    shown = capsys.readouterr()
    assert "padding_free" in shown.err
    assert "3/9" in shown.err
    assert not shown.out


def test_quick_takes_the_data_that_ships_where_there_is_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    path = tmp_path / "found.json"
    command = ["bench", "--device", "cpu", "--peak-tflops", "1000"]
    result = trl_padfix_command(
        *command, "--quick", "--pairs", "1", "--steps", "1", "--warmup", "0", "--variants", "trl", "--json", str(path)
    )
    assert result.exit_code == 0, result.output
    assert "Anthropic/hh-rlhf cannot be read here; these are the preferences that ship" in result.stderr
    assert json.loads(path.read_text())["data"] == "preferences"
    said = trl_padfix_command(*command, "--shape", "tiny").output  # without `--quick`
    assert "Invalid value for --data: the data 'Anthropic/hh-rlhf' cannot be read" in said


def test_quick_is_short_and_says_that_it_is_rough(tmp_path):
    path = tmp_path / "found.json"
    command = ["bench", "--data", "lengths:9/5", "--quick", "--peak-tflops", "1000", "--device", "cpu"]
    result = trl_padfix_command(*command, "--json", str(path))
    assert "Rough: 3 steps of shape 'tiny'" in result.stdout
    found = json.loads(path.read_text())
    assert found["rough"]
    assert not found["partial"]
    given = {name: found["settings"][name] for name in ("shape", "steps", "warmup", "memory")}
    assert given == {"shape": "tiny", "steps": 3, "warmup": 1, "memory": False}
