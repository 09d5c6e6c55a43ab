"""`python benchmarks/gpu_report.py`: right first, every cell written at once, no CPU shown as a GPU."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import gpu_report
import pytest
import torch
from bench import VARIANTS, WrongNumbersError
from gpu_checks import Check, check_device
from gpu_expected import (
    OperationCounter,
)
from gpu_plan import plan_of
from gpu_report import main, measure_gpu
from gpu_table import gpu_table, load_report
from kit.trainer_runs import leaking_layout
from packaging.requirements import Requirement

from trl_padfix.versions import TESTED


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


SCRIPT = Path(gpu_report.__file__)
RIGHT = Check("a comparison", 1e-7, 1e-4, 1.0)


def cells(*trainers: str) -> list:
    """The first cell of each trainer, at toy size."""
    plan = plan_of(toy=True, backend=None)
    return [next(cell for cell in plan if cell.settings.trainer == trainer) for trainer in trainers]


def no_checks(device, **options):
    yield RIGHT


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


def test_a_report_is_measured_and_written(tmp_path):
    path, said = tmp_path / "report.json", []
    found = measure_gpu(path, cells("dpo", "grpo"), device="cpu", backend=None, checks=no_checks, say=said.append)
    saved = load_report(path)
    assert saved == json.loads(json.dumps(found))
    assert saved["complete"]
    assert [cell["status"] for cell in saved["cells"]] == ["measured"] * 2
    for cell in saved["cells"]:
        padded, packed, shared = cell["variants"]
        assert shared["tokens"] < packed["tokens"] < padded["tokens"]
        assert padded["loss"] == pytest.approx(shared["loss"], rel=5e-2)
        assert "launches" not in padded  # they are counted on CUDA
    assert saved["checks"] == [dataclasses.asdict(RIGHT) | {"ok": True}]
    assert {"torch", "transformers", "trl", "python"} <= saved["versions"].keys()
    assert saved["command"].startswith("python benchmarks/gpu_report.py")
    assert saved["machine"]["name"].startswith("CPU, toy size")
    assert len(said) == 3


def test_a_wrong_computation_stops_before_anything_is_timed(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    wrong = Check("a comparison", 0.1, 1e-4, 1.0)
    blind = Check("a comparison", 1e-7, 1e-4, 1e-6)  # what is wrong on purpose passes
    for check in (wrong, blind):
        with pytest.raises(WrongNumbersError, match="Nothing was timed"):
            measure_gpu(path, cells("dpo"), device="cpu", checks=lambda *a, check=check, **k: [RIGHT, check])
        saved = load_report(path)
        assert (saved["cells"], saved["complete"]) == ([], False)
        assert [c["ok"] for c in saved["checks"]] == [True, False]


def test_a_cell_that_fails_takes_no_other_with_it(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    errors = [torch.OutOfMemoryError("CUDA"), KeyError("x"), WrongNumbersError("not the same"), KeyboardInterrupt()]
    seen = []

    def fail(*args):
        seen.append(len(load_report(path)["cells"]))
        raise errors.pop(0)

    monkeypatch.setattr(gpu_report, "prepare", fail)
    plan = [dataclasses.replace(cells("dpo")[0], name=str(i)) for i in range(4)]
    with pytest.raises(KeyboardInterrupt):
        measure_gpu(path, plan, device="cpu", checks=no_checks)
    saved = load_report(path)
    assert [c["status"].partition(":")[0] for c in saved["cells"]] == ["not measured", "failed", "wrong"]
    assert seen == [0, 1, 2, 3]  # each was written before the next began
    assert not saved["complete"]


# -- the table


def gpu_like(report: dict) -> dict:
    """A report as a GPU would give it, to see what is made of one; none of its figures were measured on a GPU."""
    machine = {"name": "GPU of a test", "memory_gib": 1.0, "cuda": "0"}
    counted = {"launches": 1234, "synchronisations": 5, "own_synchronisations": 0, "expected": 98765.4}
    cells = [
        {**c, "variants": [{**v, **counted, "peak_gib": 0.5} for v in c["variants"]]} if "variants" in c else c
        for c in report["cells"]
    ]
    return {**report, "device": "cuda", "machine": machine, "cells": cells}


def test_a_report_becomes_a_table_and_that_of_a_cpu_never_does(tmp_path):
    path = tmp_path / "report.json"
    missing = dataclasses.replace(cells("dpo")[0], name="another", needs=("no_such_package",))
    report = measure_gpu(path, [*cells("dpo"), missing], device="cpu", checks=no_checks)
    with pytest.raises(ValueError, match="made on a CPU, at toy size"):
        gpu_table(load_report(path))
    lines = gpu_table(gpu_like(report)).splitlines()
    assert lines[0].startswith("| step | variant | tokens/s |")
    assert lines[2].startswith("| DPO 0.5B 8 pairs, autocast | TRL, padded |")
    assert "| 98,765 | 1.00x | 1.00x | 1.00 |" in lines[2]
    assert lines[2].endswith("| 0.5 | 1,234 | 5 (0) |")
    assert [line.count("|") for line in lines[:5]] == [11] * 5
    assert "GPU of a test" in lines[6]
    assert "1 of 1 checks of correctness passed" in lines[6]
    assert lines[-1] == "Without figures: another (not measured: no_such_package is not installed)."


# -- what counts allow


def test_arithmetic_bytes_and_launches_are_counted():
    left, right = torch.ones(3, 5), torch.ones(5, 7, requires_grad=True)
    with OperationCounter() as counted:
        (left @ right).t().sum().backward()
    products = [(o.flops, o.bytes) for o in counted.operations if o.name == "mm"]
    assert products == [(2 * 3 * 5 * 7, 4 * (15 + 35 + 21))] * 2  # a view is no launch, nor is a gradient nobody needs
    assert not {"t", "detach", "expand"} & {o.name for o in counted.operations}


# -- correctness


def test_the_checks_pass_where_all_is_right_and_fail_where_it_is_not(monkeypatch):
    found = list(check_device("cpu", toy=True, backend=None))
    assert len(found) == 8
    assert all(check.ok for check in found), [str(check) for check in found]
    assert all(check.control > 100 * check.limit for check in found[:2])
    monkeypatch.setattr("trl_padfix.core.call.layout_of.padding_free_layout", leaking_layout)
    first = next(check_device("cpu", toy=True, backend=None))
    assert not first.ok
    assert str(first).startswith("WRONG: padding-free, float32")


@pytest.mark.slow
@pytest.mark.matrix
def test_the_whole_plan_runs_at_toy_size(tmp_path):
    plan = plan_of(toy=True, backend="aot_eager")
    found = measure_gpu(tmp_path / "report.json", plan, device="cpu", backend="aot_eager")
    assert found["complete"]
    assert all(check["ok"] for check in found["checks"])
    status = {cell["name"]: cell["status"] for cell in found["cells"]}
    liger = {name: s for name, s in status.items() if "Liger" in name}
    assert all(s == "measured" for name, s in status.items() if name not in liger), status
    for cell in found["cells"]:
        if any(VARIANTS[name].compiled for name in cell["settings"]["variants"]) and cell["status"] == "measured":
            assert cell["variants"][-1]["name"].endswith("_compiled")
            assert cell["variants"][-1]["tokens"] == cell["variants"][-2]["tokens"]


# -- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(path)])
    assert "There is no CUDA GPU here" in capsys.readouterr().err
    assert not path.exists()
