"""`trl-padfix bench --trainer grpo`: the step after generation, padded and packed, side by side."""

import json

import pytest
from kit.trainer_runs import BROKEN
from typer.testing import CliRunner

from trl_padfix.cli.app import app
from trl_padfix.tools import bench


SETTINGS = bench.BenchSettings(
    trainer="grpo", pairs=2, generations=4, prompt_length=40, completion_length=8, steps=2, warmup=0, shape="tiny",
    peak_tflops=1000.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return {result.name: result for result in bench.run(None, SETTINGS)}


def test_the_variants_take_one_step_on_fewer_tokens(results):
    padded, packed, shared = (results[name] for name in SETTINGS.variants)
    assert shared.tokens < packed.tokens < padded.tokens
    assert shared.token_limit == padded.tokens / shared.tokens > 2
    for other in (packed, shared):
        assert padded.loss == pytest.approx(other.loss, rel=1e-4)
        assert padded.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert padded.grad_norm > 0


@pytest.mark.parametrize("mode", BROKEN)
def test_a_leaking_layout_gives_an_error_and_no_figures(mode, monkeypatch):
    name, broken = BROKEN[mode]
    monkeypatch.setattr(f"trl_padfix.core.call.layout_of.{name}", broken)
    with pytest.raises(RuntimeError, match="is not the same computation"):
        bench.run(None, SETTINGS)


def test_the_command_needs_no_data(tmp_path):
    options = {"trainer": "grpo", "pairs": 1, "generations": 2, "prompt-length": 20, "completion-length": 8}
    options |= {"shape": "tiny", "steps": 1, "warmup": 0, "peak-tflops": 1000, "json": tmp_path / "figures.json"}
    command = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    result = CliRunner().invoke(app, ["bench", *command], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "GRPO step without generation, 1 x 2 completions" in result.output
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert saved["data"] == "random"
    assert saved["settings"]["prompt_length"] == 20


def test_another_trainer_is_refused():
    result = CliRunner().invoke(app, ["bench", "--trainer", "ppo"])
    assert result.exit_code == 2
