"""Random bad inputs and flags: a message and an exit code (or a result), nothing written, within 20 seconds."""

from __future__ import annotations

import json
import os
import random
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from campaign import HELD, REFUSED
from kit.bad_inputs import build_bad_models
from kit.commands import trl_padfix_command


FORMS = {
    "text": {"text": "alpha beta gamma"},
    "pairs": {"chosen": "Question: alpha\nAnswer: beta", "rejected": "Question: alpha\nAnswer: gamma"},
    "prompts": {"prompt": "alpha", "completion": "beta gamma"},
    "chat": {"messages": [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]},
}
VALUES = [None, 3, -1.5, "", [], {}, True, "\u0000", "\ud83d\ude00", "x" * 5000, [None], {"role": "user"}, [[]]]
FLAGS = ["--max-length", "--batch-size", "--split", "--trainer", "--json", "--plot", "--nonsense", "--dtype", "--attn"]
WORDS = ["0", "-1", "1e9", "999999999999", "nan", "", "abacus", "/nowhere/x.json", ".", "2,0", "float8", "💥"]


def draw(chance: random.Random) -> dict[str, Any]:
    form = chance.choice(list(FORMS))
    command = chance.choice(["stats", "stats", "stats", "doctor", "dpo", "sft"])
    flags = []
    for _ in range(chance.choice([0, 0, 1, 2])):
        flags += [chance.choice(FLAGS)] + ([chance.choice(WORDS)] if chance.random() < 0.9 else [])
    return {
        "form": form,
        "command": command,
        "damage": chance.choice(["value", "value", "key", "cut", "bytes", "empty", "none", "yaml", "gz", "encoding"]),
        "value": chance.choice(VALUES),
        "row": chance.randrange(12),
        "at": chance.random(),
        "flags": flags,
    }


@cache
def models() -> Path:
    folder = Path(mkdtemp())
    build_bad_models(folder)
    return folder


def damaged(case: dict[str, Any], folder: Path) -> Path:
    rows = [json.loads(json.dumps(FORMS[case["form"]])) for _ in range(12)]
    row = rows[case["row"]]
    key = sorted(row)[int(case["at"] * len(row))]
    if case["damage"] == "value":
        row[key] = case["value"]
    if case["damage"] == "key":
        row[f"{key}_"] = row.pop(key)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    at = int(case["at"] * len(data))
    path = folder / "data.jsonl"
    if case["damage"] == "cut":
        data = data[:at]
    if case["damage"] == "bytes":
        data = data[:at] + bytes([random.Random(at).randrange(256) for _ in range(8)]) + data[at + 8 :]
    if case["damage"] == "empty":
        data = b""
    if case["damage"] == "encoding":
        data = data.decode().encode("utf-16")
    if case["damage"] == "gz":
        path = folder / "data.json.gz"
    if case["damage"] == "yaml":
        path = folder / "data.yaml"
    path.write_bytes(data)
    return path


def attempt(case: dict[str, Any], folder: Path) -> str:
    path, model = damaged(case, folder), str(models() / "good")
    command = {
        "stats": ["stats", str(path), "--tokenizer", model],
        "doctor": ["doctor", "--model", model if case["damage"] == "none" else str(path)],
        # To the end of the parser: what comes after is a training.
        "dpo": ["dpo", "--config", str(path), "--num_processes", "none"],
        "sft": ["sft", "--nothing", "--dataset_name", str(path)],
    }[case["command"]] + case["flags"]  # fmt: skip
    before, here = listing(folder), os.getcwd()

    def late(*_: Any) -> None:
        raise TimeoutError("20 seconds")

    was = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(20 * float(os.environ.get("CAMPAIGN_PATIENCE", "1"))))
    os.chdir(folder)
    try:
        result = trl_padfix_command(*command)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, was)
        os.chdir(here)
    said = (command[:1], result.exit_code, result.output[-600:], repr(result.exception))
    assert result.exception is None or isinstance(result.exception, SystemExit), said
    assert "Traceback" not in result.output, said
    assert result.exit_code in (0, 1, 2), said
    if result.exit_code and command[0] != "doctor":
        assert len(result.output.strip()) > 20, said
        assert listing(folder) == before, "something was written"
        return REFUSED
    return HELD


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
