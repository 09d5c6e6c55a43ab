"""What SECURITY.md says of this package: code and YAML execute nothing, and only names ask for the network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit.bad_inputs import build_bad_data, build_bad_models
from kit.commands import trl_padfix_command


ROOT = Path(__file__).parents[2]

GUARDED = """
import json, os, socket, sys

def refused(*args, **kwargs):
    print("NETWORK", args, file=sys.stderr)
    raise OSError("the network was asked for")

socket.getaddrinfo = socket.create_connection = refused
connect = socket.socket.connect
local = lambda self: self.family == socket.AF_UNIX
socket.socket.connect = lambda self, address: connect(self, address) if local(self) else refused(address)
"""
"""Before the code of a test: whoever asks for a connection leaves a line."""


def guarded(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run code with a network that only says who asked for it, online as far as the Hub's client knows."""
    ours = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_UPDATE_DOWNLOAD_COUNTS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"HF_HOME": str(folder / "hub"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", GUARDED + code]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    build_bad_data(folder)
    build_bad_models(folder / "models")
    return folder


@pytest.fixture
def trap(tmp_path) -> Path:
    """A file that appears if something is executed."""
    return tmp_path / "executed"


COMMANDS = ["doctor --model models/good", "stats good.jsonl --tokenizer models/good", "dpo --help"]

NAMES = ["trl_padfix", "trl_padfix.cli.app", "trl_padfix.tools.stats"]
TRAINING = "--model_name_or_path models/good --dataset_name good_folder --save_strategy steps --max_steps 1 "
TRAINING += "--max_length 16 --use_cpu true --bf16 false --report_to none --padding_free true "
TRAINING += "--gradient_checkpointing false"


@pytest.mark.slow
def test_commands_a_training_and_imports_on_local_files_ask_for_no_network(material, tmp_path):
    code = f"""
from trl_padfix.cli.app import app
for command in {COMMANDS}:
    print(command, file=sys.stderr)
    try:
        app(command.split(), prog_name="trl-padfix")
    except SystemExit as end:
        assert not end.code, command

from trl_padfix.cli.launch import run
run("sft", {[*TRAINING.split(), "--output_dir", str(tmp_path)]})

import importlib
for name in {NAMES}:
    module = importlib.import_module(name)
    print(name, *(getattr(module, part) for part in getattr(module, "__all__", ())), file=sys.stderr)
"""
    done = guarded(code, material)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NETWORK" not in done.stderr
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.matrix
def test_but_a_name_of_the_hub_does(material):
    command = ["stats", "nobody/at-all", "--tokenizer", "models/good"]
    code = f"sys.argv[1:] = {command!r}\nfrom trl_padfix.cli.app import app\napp(prog_name='trl-padfix')"
    done = guarded(code, material)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "NETWORK" in done.stderr


ONE_STEP = ["--max_steps", "1", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]


def model_with_code(material: Path, folder: Path, trap: Path) -> Path:
    """A model folder with code beside it that transformers would run if it were trusted."""
    shutil.copytree(material / "models" / "good", folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "own.py").write_text(f"open({str(trap)!r}, 'w').close()\nclass C: pass\nclass M: pass\nclass T: pass\n")
    return folder


@pytest.mark.parametrize("command", ["stats", "doctor", pytest.param("sft", marks=pytest.mark.slow)])
def test_code_beside_a_model_is_not_run(command, material, trap, tmp_path, monkeypatch):
    model = str(model_with_code(material, tmp_path / "model", trap))
    data = str(material / "good.jsonl")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # nor is the user asked
    flags = {
        "stats": [data, "--tokenizer", model],
        "doctor": ["--model", model],
        "sft": ["--model_name_or_path", model, "--dataset_name", str(material / "good_folder"), *ONE_STEP,
                "--output_dir", str(tmp_path / "out")],
    }[command]  # fmt: skip
    result = trl_padfix_command(command, *flags)
    assert not trap.exists()
    assert command == "stats" or result.exit_code != 0  # a tokenizer of a known kind is read without the code


YAMLS = [
    "dataset_name: !!python/object/apply:builtins.open [{trap}, w]\n",
    "!!python/module:antigravity\n",
    "a: !!python/name:os.system\n",
]


def test_a_yaml_executes_nothing(trap, tmp_path):
    path = tmp_path / "recipe.yaml"
    for text in YAMLS:
        path.write_text(text.format(trap=trap))
        result = trl_padfix_command("dpo", "--config", str(path))
        assert result.exit_code == 1
        said = f"{result.output} {result.exception}"
        assert any(t in said for t in ("could not determine a constructor", "is not a mapping", "not a field"))
        assert not trap.exists()
