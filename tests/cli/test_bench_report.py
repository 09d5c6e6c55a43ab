"""`trl-padfix bench --report gpu` and `--table`, as a user types them."""

import json

import pytest
import torch
import torch._dynamo
from typer.testing import CliRunner

from trl_padfix.cli.app import app
from trl_padfix.tools.bench import gpu_plan, gpu_report
from trl_padfix.tools.bench.gpu_checks import Check


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("given", [[], ["--device", "auto"]])
def test_without_a_gpu_there_is_no_report(given, tmp_path):
    path = tmp_path / "report.json"
    result = invoke("--report", "gpu", "--json", str(path), *given)
    assert result.exit_code == 2
    assert "There is no CUDA GPU here" in result.output
    assert not path.exists()


@pytest.fixture
def small(monkeypatch):
    """One cell of the plan, and a check that has the result that the test gives it."""
    plan_of, figures = gpu_plan.plan_of, {"check": 0.0}
    monkeypatch.setattr(gpu_plan, "plan_of", lambda **options: plan_of(**options | {"backend": None})[:1])
    measure = gpu_report.measure_gpu
    checks = lambda device, **options: [Check("a comparison", figures["check"], 1.0, 2.0)]  # noqa: E731
    monkeypatch.setattr(gpu_report, "measure_gpu", lambda *a, **k: measure(*a, **k, checks=checks))
    return figures


def test_on_a_cpu_the_file_says_cpu_and_becomes_no_table(small, tmp_path):
    path = tmp_path / "report.json"
    result = invoke("--report", "gpu", "--device", "cpu", "--json", str(path), "--data", "lengths:9/5")
    assert result.exit_code == 0, result.output
    assert "This was a CPU." in result.output
    assert "|" not in result.output
    saved = json.loads(path.read_text())
    assert saved["device"] == "cpu"
    assert saved["cells"][0]["data"] == "lengths:9/5, spread 0.75"
    result = invoke("--table", str(path))
    assert result.exit_code == 2
    assert "made on a CPU" in result.output


def test_wrong_numbers_stop_it_with_an_error(small, tmp_path):
    small["check"] = 1.5
    result = invoke("--report", "gpu", "--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert "STOPPED. a comparison: 1.5 where 1 is allowed" in result.output


def test_a_cell_that_fails_is_an_error_at_the_end(small, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "prepare", lambda *args: 1 / 0)
    result = invoke("--report", "gpu", "--device", "cpu", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert "failed: ZeroDivisionError: division by zero" in result.output


def test_data_that_is_not_there_is_said_before_anything_is_measured(tmp_path):
    path = tmp_path / "report.json"
    result = invoke("--report", "gpu", "--device", "cpu", "--json", str(path), "--data", "nowhere.jsonl")
    assert result.exit_code == 2
    assert "nowhere.jsonl" in result.output
    assert not path.exists()


OPTIONS = ["--data", "lengths:9/5", "--pairs", "1", "--steps", "3", "--warmup", "0", "--shape", "tiny", "--no-memory"]
OPTIONS += ["--device", "cpu"]


@pytest.mark.slow
def test_compiled_variants_are_measured_and_compiled_once(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    path = tmp_path / "figures.json"
    result = invoke(*OPTIONS, "--compile", "--compile-backend", "aot_eager", "--json", str(path))
    assert result.exit_code == 0, result.output
    names = [variant["name"] for variant in json.loads(path.read_text())["variants"]]
    packed = ["padding_free", "prefix_sharing"]
    assert names == ["trl", *packed, *(f"{name}_compiled" for name in packed)]
    # Policy and reference, with keys of their own and with shared ones: no step compiles anew.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch._dynamo.reset()


def test_liger_is_for_gpus():
    result = invoke(*OPTIONS, "--liger")
    assert result.exit_code == 2
    assert "GPUs only" in result.output
