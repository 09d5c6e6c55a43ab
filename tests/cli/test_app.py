"""The `trl-padfix` command, as a user runs it."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from kit.commands import build_pairs, trl_padfix_command

import trl_padfix
from trl_padfix.cli import recipe, require_extra
from trl_padfix.cli.bench import bench
from trl_padfix.cli.doctor import doctor
from trl_padfix.cli.parity import parity
from trl_padfix.cli.stats import stats
from trl_padfix.tools.bench.settings import TOLERANCE, VariantResult


TINY = ["bench", "--shape", "tiny", "--pairs", "2", "--steps", "1", "--warmup", "0", "--max-length", "64"]
TINY += ["--device", "cpu"]
ONE_VARIANT = [*TINY, "--data", "equal", "--variants", "trl", "--no-memory"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    build_pairs().to_json(path)
    return str(path)


def test_the_installed_command_prints_help_and_version():
    command = str(Path(sys.executable).with_name("trl-padfix"))
    printed = {
        option: subprocess.run([command, option], capture_output=True, text=True, check=True).stdout
        for option in ("--help", "--version")
    }
    assert printed["--version"].strip() == trl_padfix.__version__
    assert {"bench", "--install-completion"} <= set(printed["--help"].split())


def test_help_costs_no_import_of_torch():
    code = "import sys; from trl_padfix import cli; print('torch' in sys.modules or 'trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_no_command_prints_the_help_and_fails():
    result = trl_padfix_command()
    assert result.exit_code == 2
    assert "Usage" in result.output


@pytest.mark.parametrize("command", [[], ["bench"], ["stats"], ["plan"], ["parity"], ["doctor"], ["recipe", "show"]])
def test_h_is_help(command):
    result = trl_padfix_command(*command, "-h")
    assert result.exit_code == 0
    assert result.output == trl_padfix_command(*command, "--help").output


@pytest.mark.parametrize("command", ["bench", "stats", "parity", "doctor", "recipe"])
def test_help_fits_a_terminal_and_cuts_no_name(command):
    output = trl_padfix_command(command, "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80
    if command != "recipe":
        assert "--json" in output


def test_bench_prints_a_table_and_writes_json(pairs, tmp_path):
    result = trl_padfix_command(*TINY, "--data", pairs, "--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0, result.output
    for variant in ("trl", "padding_free", "prefix_sharing"):
        assert variant in result.output
    assert "equal in all variants" in result.output
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert [variant["name"] for variant in saved["variants"]] == ["trl", "padding_free", "prefix_sharing"]
    assert saved["settings"]["shape"] == "tiny"
    assert (saved["data"], saved["threads"]) == ("pairs.jsonl", torch.get_num_threads())
    assert saved["device"]
    assert saved["versions"].keys() == {"trl_padfix", "torch", "transformers", "trl", "python"}
    assert saved["variants"][0].keys() == {field.name for field in fields(VariantResult)}


def test_bench_draws_its_figures_and_shows_where_time_goes(pairs, tmp_path):
    picture = tmp_path / "bench.png"
    result = trl_padfix_command(*TINY, "--data", "lengths:20/6", "--plot", str(picture), "--profile", "--no-memory")
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.output.count("aten::mm") >= 3
    assert result.output.count("Self CPU time total") == 3


@pytest.mark.parametrize("given", [[], ["--device", "auto"]])
@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_bench_measures_the_gpu_where_there_is_one(has_gpu, device, given, monkeypatch):
    seen = []

    def prepare(dataset, settings):
        seen.append(settings.device)
        raise ValueError("far enough")

    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("trl_padfix.tools.bench.building.prepare", prepare)
    result = trl_padfix_command(*TINY[:-2], "--data", "equal", *given)
    assert "far enough" in result.output
    assert seen == [device]


def test_bench_fails_where_the_variants_differ(pairs, monkeypatch):
    monkeypatch.setattr("trl_padfix.tools.bench.measure.TOLERANCE", dict.fromkeys(TOLERANCE, -1.0))
    result = trl_padfix_command(*TINY, "--data", pairs)
    assert result.exit_code != 0
    assert "is not the same computation" in str(result.exception) + result.output
    assert "equal in all variants" not in result.output


@pytest.mark.parametrize(
    "command",
    [["doctor"], ["doctor", "--explain", "CUDA out of memory"], ["stats", "equal"], ONE_VARIANT],
)
def test_json_has_standard_output_to_itself(command):
    result = trl_padfix_command(*command, "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)
    assert result.stderr.strip()  # what is printed without `--json`


def test_summaries_are_listed_whole():
    output = " ".join(trl_padfix_command("--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output.split())
    for command in (bench, doctor, parity, stats):
        assert command.__doc__.partition(". ")[0] in output
    recipes = " ".join(trl_padfix_command("recipe", "--help").output.split())
    assert recipe.copy.__doc__ in recipes


def test_of_the_extra_only_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("trl_padfix.cli.find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(SystemExit, match="the command line needs matplotlib, which the extra `cli` brings"):
        require_extra()
