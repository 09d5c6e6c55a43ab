"""Stacks outside the bounds are refused; the bounds, the tested pairs and `pyproject.toml` say the same."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import trl_padfix
from trl_padfix import versions
from trl_padfix.core.model import older


pytestmark = pytest.mark.stacks


@pytest.fixture
def installed(monkeypatch):
    """Pretend that versions are installed, or `None` for not installed."""

    def pretend(**versions):
        def version(name):
            found = versions[name] if name in versions else original(name)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)

    original = metadata.version
    return pretend


OUTSIDE = {
    "transformers": (["4.52.3", "6.0.0", None], ["remove_padding", "check_parity"], "transformers<6,>=4.52.4"),
    "trl": (["0.17.0", "2.0.0", None], ["DPOTrainer", "DPOConfig", "DataCollatorForPreference"], "trl<2,>=1.10"),
}


@pytest.mark.parametrize("package", OUTSIDE)
def test_a_version_outside_the_bounds_is_refused_with_versions_and_remedy(installed, package):
    found, names, remedy = OUTSIDE[package]
    for version in found:
        installed(**{package: version})
        for name in names:
            with pytest.raises(ImportError, match=re.escape(f"pip install '{remedy}'")) as error:
                getattr(trl_padfix, name)
            assert (version or "none is installed") in str(error.value)
            newest = versions.TESTED[-1]
            assert package == "trl" or f"transformers {newest.transformers} and trl {newest.trl}" in str(error.value)
        assert package == "transformers" or callable(trl_padfix.remove_padding)


def test_every_name_that_the_installed_trl_admits_can_be_imported():
    pytest.importorskip("trl", minversion="1.10")
    version = metadata.version("trl")
    for name in trl_padfix._HOME:
        if version in versions.NEWER.get(name, versions.BOUNDS["trl"]):
            getattr(trl_padfix, name)
    assert trl_padfix.__all__ == sorted(trl_padfix.__all__) == dir(trl_padfix)


STAR = """
import sys
from importlib.machinery import PathFinder
find, gone = PathFinder.find_spec, {"requests", "aiohttp"}
PathFinder.find_spec = staticmethod(lambda name, *args: None if name in gone else find(name, *args))
from trl_padfix import *
assert not gone & {*sys.modules}
print(SFTTrainer.__module__)
"""


@pytest.mark.slow
def test_the_star_import_needs_no_package_that_trl_does_not_ask_for():
    pytest.importorskip("trl", minversion="1.10")
    ran = subprocess.run([sys.executable, "-c", STAR], capture_output=True, text=True)
    assert ran.stdout.split() == ["trl_padfix.trainers.methods.sft"], ran.stderr


def test_the_star_import_has_the_names_that_the_installed_versions_admit(installed):
    names = {*trl_padfix._HOME, "__version__"}
    installed(trl="1.10.0")
    assert names - {*trl_padfix.__all__} == {"DistillationConfig", "DistillationTrainer"}
    installed(trl=None)
    assert {"remove_padding", "pack"} < {*trl_padfix.__all__}
    exec("from trl_padfix import *", imported := {})
    assert imported.keys() - {"__builtins__"} == {*trl_padfix.__all__} < names - {"DPOTrainer"}


def test_a_stack_of_another_version_than_its_plug_in_was_run_with_is_refused(installed):
    for package, version in versions.OTHER_STACKS.items():
        run_with = Version(version)
        installed(**{package: f"{run_with.major}.{run_with.minor}.{run_with.micro + 1}"})
        versions.require_stack(package)
        for other in ("0.1.0", f"{run_with.major}.{run_with.minor + 1}.0", f"{run_with.major + 1}.0.0", None):
            installed(**{package: other})
            said = f"tested with {package} {run_with}, but {other or 'none'} is installed"
            with pytest.raises(RuntimeError, match=said):
                versions.require_stack(package)


def test_tested_pairs_lie_within_the_bounds_oldest_first():
    assert list(versions.TESTED) == sorted(versions.TESTED, key=lambda s: (Version(s.transformers), Version(s.trl)))
    for stack in versions.TESTED:
        assert stack.transformers in versions.BOUNDS["transformers"]
    with_trainers = [s for s in versions.TESTED if s.trl in versions.BOUNDS["trl"]]
    assert with_trainers[0].trl == "1.10.0"


def test_pyproject_admits_every_tested_pair():
    path = Path(__file__).parents[1] / "pyproject.toml"
    lines = re.findall(r'"((?:transformers|trl)[>=<][^"]*)"', path.read_text())
    admitted = {r.name: r.specifier for r in map(Requirement, lines)}
    assert admitted == versions.BOUNDS


def test_the_locked_set_is_the_newest_pair_and_runs_without_a_gpu():
    root = Path(__file__).parents[1]
    lines = [line for line in (root / "requirements-tested.txt").read_text().splitlines() if not line.startswith("#")]
    locked = {r.name: r.specifier for r in map(Requirement, lines)}
    assert {name: str(locked[name]) for name in versions.BOUNDS} == {
        name: f"=={version}" for name, version in versions.TESTED[-1]._asdict().items()
    }
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no index, no local build
    assert not [name for name in locked if re.match("torch|nvidia|cuda|triton", name)]
    project = re.search(r"^dependencies = \[(.*?)^\]", (root / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    needed = {Requirement(text).name for text in re.findall(r'^  "(.+?)"', project[1], re.MULTILINE)}
    assert needed - locked.keys() == {"torch"}


REMOVABLE_WITH = {
    "decoder_of": "transformers>=5.0",  # then use `model.get_decoder()`
    "older_attributes": "transformers>=5.4",  # the last mask method was RecurrentGemma's, most went with 5.2
    "checkpoints_in_forward": "transformers>=5.23",
    "register_mask_function": "transformers>=4.53",  # then use `ALL_MASK_ATTENTION_FUNCTIONS.register`
    "spare_packed_search": "transformers>=5.0",  # its `or_rows`, and the test that the function exists; the rest stays
    "resume_packed_search": "transformers>=5.0",
    "segment_arguments": "transformers>=4.53",  # its positions; the rest stays
    "supports": "transformers>=4.54",  # the older flag
    "silence_packing_warning": "trl>=1.16",
    "masks_of_decoder": "transformers>=5.2",  # the other spelling
    "mask_of_rows": "transformers>=5.0",
    "rope_parameters": "transformers>=5.0",
    "has_cache": "transformers>=5.40",  # then all caches are called `cache`; the function stays
}
"""The first version that does not need each function of `older.py`: once `versions.BOUNDS` begins there, delete it."""


def test_what_an_older_version_needs_goes_with_it():
    assert REMOVABLE_WITH.keys() | {"CACHES"} == set(older.__all__)
    for name, needs in REMOVABLE_WITH.items():
        requirement = Requirement(needs)
        (oldest,) = (bound.version for bound in versions.BOUNDS[requirement.name] if bound.operator == ">=")
        assert not requirement.specifier.contains(oldest), f"delete `{name}`: {needs} is all that is supported"


def test_a_trl_that_is_newer_than_the_tested_one_is_named_with_the_way_back(installed):
    for version, is_newer in {"1.16.3": False, "1.10.0": False, "1.17.0": True}.items():
        installed(trl=version)
        said = versions.newer_trl()
        assert bool(said) == is_newer
        assert not is_newer or (f"TRL {version} is installed" in said and "pip install 'trl~=1.16.0'" in said)


def test_a_trainer_that_a_newer_trl_breaks_says_so_at_its_import(installed, monkeypatch):
    def broken(name, package):
        raise ImportError("cannot import name 'pad' from 'trl.trainer.utils'")

    monkeypatch.setattr(trl_padfix.importlib, "import_module", broken)
    installed(trl="1.18.0")
    with pytest.raises(
        ImportError, match=r"DPOTrainer.*cannot import name 'pad'.*TRL 1.18.0 is installed.*pip install"
    ):
        _ = trl_padfix.DPOTrainer
    installed(trl="1.16.0")
    with pytest.raises(ImportError, match=r"^cannot import name 'pad'"):
        _ = trl_padfix.DPOTrainer


def test_a_name_that_nobody_has_is_an_attribute_error():
    for name in ("no_such_name", "__path_of_nothing__", "_compat", "trainer"):  # the last is a module of TRL
        with pytest.raises(AttributeError, match=f"module 'trl_padfix' has no attribute '{name}'"):
            getattr(trl_padfix, name)


def test_a_trainer_that_nobody_has_says_what_to_do():
    pytest.importorskip("trl")
    with pytest.raises(ImportError, match=r"Neither .* has `NoTrainer`\. For .*padding_free_trainer.*remove_padding"):
        _ = trl_padfix.NoTrainer
    with pytest.raises(ImportError, match=r"has `SFTrainer`\. Did you mean `SFTTrainer`\?"):
        _ = trl_padfix.SFTrainer


def test_a_trainer_of_trl_without_a_counterpart_does_not_train_padded_in_silence(monkeypatch):
    trl = pytest.importorskip("trl")
    monkeypatch.setattr(trl, "__all__", [*trl.__all__, "NewTrainer"])
    monkeypatch.setattr(trl, "NewTrainer", object, raising=False)
    with pytest.raises(ImportError, match=r"`trl_padfix.padding_free_trainer\(NewTrainer\)`"):
        trl_padfix.NewTrainer  # noqa: B018


@pytest.mark.parametrize("package", versions.OTHER_STACKS)
def test_another_version_is_refused_before_anything_of_it_is_imported(package, monkeypatch):
    name = f"trl_padfix.integrations.{package.replace('-', '_')}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(versions.OTHER_STACKS, package, "0.1.0")
    monkeypatch.setitem(sys.modules, package.removeprefix("ms-"), None)
    with pytest.raises(RuntimeError, match=rf"tested with {package} 0\.1\.0, but (none|\d+\.\d+\.\d+) is installed"):
        importlib.import_module(name)
