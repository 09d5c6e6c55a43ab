"""What the package imports is declared."""

import ast
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement


if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_CLI = {"rich", "typer"}
DISTRIBUTIONS = {
    "typing_extensions": "typing-extensions",
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "PIL": "pillow",
}


def names(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in found - set(sys.stdlib_module_names) - {"trl_padfix"}}


def test_everything_that_is_imported_is_declared():
    assert names(PROJECT["optional-dependencies"]["cli"]) == OF_CLI
    extras = {name for lines in PROJECT["optional-dependencies"].values() for name in names(lines)}
    declared = names(PROJECT["dependencies"]) | extras
    found = set().union(*(imported(path) for path in (ROOT / "trl_padfix").rglob("*.py")))
    assert {"torch", "typer", "numpy", "pyyaml"} <= found
    # Looked for, and used where they are: nothing asks for them.
    optional = {"flash_attn", "flash_attn_interface", "kernels", "deepspeed", "bitsandbytes", "liger_kernel", "fla"}
    optional |= {"comet_ml", "wandb", "triton", "torch_npu", "requests"}
    optional |= {"axolotl", "pydantic", "llamafactory", "swift", "verl"}  # of the stack that loads a plug-in
    assert found - declared - optional == set()
