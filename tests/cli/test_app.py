"""The `trl-padfix` command, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from kit.commands import trl_padfix_command

import trl_padfix
from trl_padfix.cli import INTERRUPTED, METHODS, main
from trl_padfix.tools import doctor


def test_the_installed_command_prints_help_and_version():
    command = str(Path(sys.executable).with_name("trl-padfix"))
    printed = {
        option: subprocess.run([command, option], capture_output=True, text=True, check=True).stdout
        for option in ("--help", "--version")
    }
    assert printed["--version"].strip() == trl_padfix.__version__
    assert {*METHODS, "doctor", "stats", "--install-completion"} <= set(printed["--help"].split())


def modules_after(code: str) -> set[str]:
    """The modules that a process has imported when it ends, `SystemExit` or not."""
    tell = (
        "import atexit, sys; atexit.register(lambda: print('', *[n for n in sys.modules if sys.modules[n]], sep='@'))"
    )
    done = subprocess.run([sys.executable, "-c", f"{tell}\n{code}"], capture_output=True, text=True)
    return set(done.stdout.split("@")[1:])


def run(*words: str) -> str:
    return f"sys.argv = {['trl-padfix', *words]}; from trl_padfix.cli import main; main()"


def test_help_of_a_training_imports_less_than_the_parser_of_trls_script():
    """It shows the fields of two configurations more, and imports neither trainers and data nor any model."""
    theirs = modules_after("from trl.scripts.dpo import make_parser; make_parser()")
    ours = modules_after(run("dpo", "--help"))
    assert "trl_padfix.trainers.config" in ours
    assert not {"peft", "datasets", "transformers.trainer", "trl_padfix.trainers.base"} & ours
    assert len(ours) < len(theirs)


@pytest.mark.parametrize(
    "words",
    [
        ["stats", "nowhere.jsonl"],
        ["dpo"],
        ["dpo", "--config", "nowhere.yaml"],
        ["dpo", "--max_steps", "many"],
        ["dpo", "--model_name_or_path", "some/model"],
        ["dpo", "--tiny_model", "tiny", "--dataset_name", "./nowhere"],
    ],
)
def test_a_mistake_is_said_before_torch_is_imported(words):
    imported = modules_after(run(*words))
    assert {"trl_padfix.cli.stats", "trl_padfix.cli.config_file"} & imported
    assert not {"torch", "numpy", "datasets", "transformers", "trl", "accelerate"} & imported


def test_ctrl_c_before_a_command_has_begun_is_an_exit_code(monkeypatch):
    monkeypatch.setattr("trl_padfix.cli.app.app", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match=str(INTERRUPTED)):
        main()


def test_h_is_help_and_no_command_prints_it_and_fails():
    for words in (["-h"], ["stats", "-h"], ["doctor", "-h"], []):
        result = trl_padfix_command(*words)
        assert result.exit_code == (0 if words else 2)
        assert result.output == trl_padfix_command(*words[:-1], "--help").output


def test_json_has_standard_output_to_itself(monkeypatch):
    describe_system = doctor.describe_system
    monkeypatch.setattr(doctor, "describe_system", lambda: print("as another package prints") or describe_system())
    result = trl_padfix_command("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["system"]
    assert "as another package prints" in result.stderr


def test_of_the_extra_only_what_is_missing_is_named(monkeypatch):
    assert "typer" not in modules_after("import trl_padfix.cli")
    monkeypatch.setattr("trl_padfix.cli.find_spec", lambda name: None if name == "rich" else name)
    with pytest.raises(SystemExit, match=r"the command line needs rich\. In a clone, run"):
        main()
