"""What an editor knows of the trainers: a type checker sees TRL's signatures and fields, and ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from packaging.version import Version

import trl_padfix


if Version(trl.__version__) < Version("1.16"):
    pytest.skip("other trainers than those of TRL 1.16", allow_module_level=True)

STABLE = [name.removesuffix("Trainer") for name in trl_padfix.__all__ if name.endswith("Trainer")]
USE = """
from trl_padfix import {name}Config, {name}Trainer
def use(trainer: {name}Trainer, config: {name}Config) -> None:
    reveal_type(trainer.padding)
    reveal_type(config.prefix_sharing)
    reveal_type(config.learning_rate)
    {name}Config("runs", padding_free=True, learning_rate=1e-6, unknown=1)
    {name}Trainer(model="policy", args=config, train_dataset=None, processing_class=None, unknown=1)
"""
SAID = [
    'Type of "trainer.padding" is "Padding"',
    'Type of "config.prefix_sharing" is "bool | Literal[\'auto\']"',
    'Type of "config.learning_rate" is "float"',
    'No parameter named "unknown"',
    'No parameter named "unknown"',
]


@pytest.mark.matrix
@pytest.mark.slow
def test_a_type_checker_sees_trls_signatures_and_our_fields(tmp_path):
    for name in STABLE:  # the experimental trainers are made when they are imported, from a table
        (tmp_path / f"{name}.py").write_text(USE.format(name=name))
    settings = {"extraPaths": [str(Path(trl_padfix.__file__).parents[1])], "reportArgumentType": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    said = {name: [d["message"] for d in found if Path(d["file"]).stem == name] for name in STABLE}
    for name, messages in said.items():
        assert [m for m in messages if not m.startswith("Argument missing")] == SAID, name  # some have other ones
