"""`python benchmarks/gpu_report.py`: right first, every cell written at once, a fault spoils its own cell only."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import gpu_report
import pytest
import torch
from gpu_cells import Cell, Check, FlopCounter, check_kernel, check_model, on_device, plan_of
from gpu_report import main, measure_gpu
from gpu_table import gpu_table, load_report
from kit.trainer_runs import leaking_layout
from packaging.requirements import Requirement
from simulated_gpu import faults, varlen_reference

from trl_padfix.core.attention.attention import torch_varlen
from trl_padfix.versions import TESTED


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


SCRIPT = Path(gpu_report.__file__)
PLAN = plan_of(toy=True)


def cells(*words: str) -> list[Cell]:
    """The first toy cell whose name begins with each word."""
    return [next(cell for cell in PLAN if cell.name.startswith(word)) for word in words]


# -- the file


def test_its_metadata_installs_the_newest_tested_pair_and_what_the_package_needs():
    """`uv run` and `pipx run` install what the comment at its beginning asks for (PEP 723)."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", SCRIPT.read_text())[1]
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    assert metadata["requires-python"] == project["requires-python"]
    asked = {r.name: r for r in map(Requirement, metadata["dependencies"])}
    for name, version in TESTED[-1]._asdict().items():
        assert str(asked[name].specifier) == f"=={version}"
    extras = project["optional-dependencies"]
    declared = {r.name: r for r in map(Requirement, project["dependencies"] + extras["peft"] + extras["liger"])}
    for name in asked.keys() - {*TESTED[-1]._fields, "requests"}:
        assert asked[name].specifier == declared[name].specifier
    assert {"torch", "datasets", "accelerate"} < asked.keys()


# -- the report


def statuses(report: dict) -> list[str]:
    return [cell["status"] for cell in report["cells"]]


@pytest.mark.slow
def test_all_cells_run_on_the_simulated_gpu_and_faults_spoil_their_own_cells_only(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    broken = [
        Cell("illegal access", faults.illegal_access, 60, "simulated"),
        Cell("crash", faults.crash, 60, "simulated"),
        Cell("stall", faults.stall, 0.5, "simulated"),
    ]
    plan = [*PLAN[:1], *broken, *PLAN[1:]]
    path, said = tmp_path / "report.json", []
    report = measure_gpu(path, plan, device="simulated", say=said.append)
    assert json.loads(json.dumps(report)) == load_report(path)
    assert report["complete"]
    assert report["seconds"] < report["budget_seconds"] == 600
    assert statuses(report)[1:4] == [
        "failed: RuntimeError: CUDA error: an illegal memory access was encountered",
        "failed: its process ended by SIGKILL",
        "failed: not done after 0.5 s",
    ]
    others = {c["name"]: c["status"] for c in report["cells"] if c["name"] not in {b.name for b in broken}}
    assert set(others.values()) == {"right", "measured"}, others
    assert list(others) == [cell.name for cell in PLAN]
    checks = [check for cell in report["cells"] for check in cell.get("checks", ())]
    assert all(check["ok"] for check in checks)
    assert all(c["control"] > 10 * c["limit"] for c in checks if c["control"] is not None)
    for cell in report["cells"]:
        if "variants" in cell:
            padded, packed, shared = cell["variants"][:3]
            assert shared["tokens"] <= packed["tokens"] <= padded["tokens"]
            assert padded["loss"] == pytest.approx(shared["loss"], rel=5e-2)
        if "variants" in cell and "compiled" not in cell["name"]:
            assert shared["tflop"] <= packed["tflop"] <= padded["tflop"]
            assert packed["launches"] > 0
            assert packed["own_waits"] <= 1  # for the layout
    padded, packed, shared = next(c["variants"] for c in report["cells"] if c["name"].startswith("DPO"))
    assert shared["tokens"] < packed["tokens"] < padded["tokens"]
    assert shared["tflop"] < packed["tflop"] < padded["tflop"]
    compiled = report["cells"][-1]["variants"]
    assert compiled[-1]["name"] == "prefix_sharing_compiled"
    assert compiled[-1]["tokens"] == compiled[-2]["tokens"]
    bits = next(cell["bits"] for cell in report["cells"] if "bits" in cell)
    assert bits["padded"].keys() == {"of_model_alone", "of_same_way_alone", "rows"}  # not their values: they round
    assert {"packed, packed_multiple_of=64", "shared"} < bits.keys()
    assert report["machine"]["name"].startswith("simulated GPU, toy size")
    assert report["command"].startswith("python benchmarks/gpu_report.py")
    assert len(said) == len(plan)


@pytest.mark.slow
def test_a_second_run_keeps_results_and_runs_the_rest(tmp_path):
    path = tmp_path / "report.json"
    (cell,) = cells("bits of a row, float32")
    late = replace(cell, name="late", seconds=1e6)
    plan = [cell, Cell("crash", faults.crash, 60, "simulated"), late]
    first = measure_gpu(path, plan, device="simulated")
    assert statuses(first) == ["measured", "failed: its process ended by SIGKILL", "not measured: out of time"]
    plan = [replace(cell, run=faults.crash), replace(plan[1], run=cell.run), replace(late, seconds=60)]
    second = measure_gpu(path, plan, device="simulated")
    assert statuses(second) == ["measured"] * 3
    assert second["cells"][0] == first["cells"][0]
    with pytest.raises(ValueError, match="has another data: None, and now it is other"):
        measure_gpu(path, plan, device="simulated", data="other")


# -- the table


def gpu_like(report: dict) -> dict:
    """A report as a GPU would give it, to see what is made of one; none of its figures were measured on a GPU."""
    machine = {"name": "GPU of a test", "memory_gib": 1.0, "cuda": "0"}
    cells = [
        {**c, "variants": [{**v, "peak_gib": 0.5, "mfu": 0.25} for v in c["variants"]]} if "variants" in c else c
        for c in report["cells"]
    ]
    return {**report, "device": "cuda", "machine": machine, "cells": cells}


def test_a_report_becomes_a_table_and_that_of_a_rehearsal_never_does(tmp_path):
    path = tmp_path / "report.json"
    report = gpu_report._describe("simulated", None, 600)
    plan = cells("torch", "bits of a row, float32", "DPO")
    report["cells"] = [{"name": cell.name, **gpu_report._outcome(cell)} for cell in plan]
    report["cells"].append({"name": "another", "status": "failed: its process ended by SIGKILL"})
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match="a rehearsal on a simulated GPU"):
        gpu_table(load_report(path))
    lines = gpu_table(gpu_like(report)).splitlines()
    assert lines[0].startswith("| step | variant | tokens/s | MFU |")
    assert lines[2].startswith("| DPO 0.5B 8 pairs, autocast | TRL, padded |")
    assert "| 0.25 | 1.00x | 1.00x | 0.5 |" in lines[2]
    assert {line.count("|") for line in lines[:5]} == {10}
    (bits,) = (cell["bits"]["padded"] for cell in report["cells"] if "bits" in cell)
    assert f"| float32, padded | {bits['of_model_alone']} of 8 | {bits['of_same_way_alone']} of 8 |" in lines
    notes = lines[-3]
    assert notes.startswith("8 of 8 checks of correctness passed.")
    assert "GPU of a test" in notes
    assert lines[-1] == "Wrong, or without a result: another (failed: its process ended by SIGKILL)."


# -- what is counted and checked


def test_products_and_varlen_launches_are_counted_as_flops():
    left, right = torch.ones(3, 5), torch.ones(5, 7, requires_grad=True)
    with FlopCounter() as counted:
        (left @ right).t().sum().backward()
    assert counted.total == 2 * 2 * 3 * 5 * 7  # no gradient of what needs none
    query, keys = torch.ones(3, 2, 8), torch.ones(5, 2, 8)
    ends = torch.tensor([0, 3]), torch.tensor([0, 5])
    varlen_reference.on_cpu()
    with FlopCounter() as counted:
        torch_varlen(query, keys, keys, (*ends, 3, 5), None, None)
    assert counted.total == 4 * 8 * 2 * (3 + 4 + 5)


def test_a_wrong_kernel_is_found(monkeypatch):
    """Aligned at the top left, as before flash-attn 2.1: right where there are as many keys as queries."""
    attend = varlen_reference.attend

    def aligned_at_the_top(query, key, value, cu_q, cu_k, scale, window, softcap=0.0):
        rows = [range(k, k + n) for k, n in zip(cu_k.tolist(), cu_q.diff().tolist(), strict=False)]
        kept = torch.tensor([i for row in rows for i in row])
        return attend(query, key[kept], value[kept], cu_q, cu_q, scale, window, softcap)

    with on_device("simulated"):
        assert check_kernel("FlashAttention 2", 64, toy=True, lengths=(1, 63))["status"] == "right"
        monkeypatch.setattr(varlen_reference, "attend", aligned_at_the_top)
        assert check_kernel("FlashAttention 2", 64, toy=True, lengths=(1, 63))["status"].startswith("wrong: WRONG")


def test_a_wrong_layout_is_found(monkeypatch):
    monkeypatch.setattr("trl_padfix.core.call.layout_of.padding_free_layout", leaking_layout)
    with on_device("simulated"):
        found = check_model("float32", toy=True)
    assert found["status"].startswith("wrong: WRONG: padding-free, float32")
    blind = Check("a comparison", 1e-7, 1e-4, 1e-6)  # what is wrong on purpose passes
    assert not blind.ok


# -- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(path)])
    assert "There is no CUDA GPU here" in capsys.readouterr().err
    assert not path.exists()
