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

from kit.experimental_runs import EXPERIMENTS, classes


STABLE = [name.removesuffix("Trainer") for name in trl_padfix.__all__ if name.endswith("Trainer")]
USE = """
from {module} import {name}Config, {name}Trainer
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
    of = dict.fromkeys(STABLE, "trl_padfix") | {
        name: classes(name, "trl_padfix")[0].__module__ for name in EXPERIMENTS
    }
    for name, module in of.items():
        (tmp_path / f"{name}.py").write_text(USE.format(module=module, name=name))
    settings = {"extraPaths": [str(Path(trl_padfix.__file__).parents[1])], "reportArgumentType": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    said = {name: [d["message"] for d in found if Path(d["file"]).stem == name] for name in of}
    for name, messages in said.items():
        expected = SAID[:-1] if name == "GMPO" else SAID  # TRL's takes any keyword
        assert [m for m in messages if not m.startswith("Argument missing")] == expected, name  # some have other ones
