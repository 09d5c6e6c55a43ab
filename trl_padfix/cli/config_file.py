"""
Flags and keys of a YAML, checked before torch is imported: names, numbers, paths, and what is missing.

The fields are read from the source of the configurations, because importing these takes ten seconds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..field_names import hint
from ..files import DATA_FILES, refuse_missing
from ..trainers.resume import checkpoint_to_resume
from ..versions import newer_trl, require
from . import METHODS


__all__ = ["Given", "check_given", "check_names", "declared_fields", "name_of", "of_command", "read_given"]

TINY = ("dpo", "sft")
"""Methods that can train a tiny model that is built on the spot."""

TINY_MODELS = ("tiny", "small")
"""Shapes of that model."""

OF_COMMAND = {"config", "accelerate_config", "env", "dry_run", "attn_implementation"}
"""Names that no dataclass field declares."""

BOOLEANS = ["yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"]
"""Strings that the parser of transformers treats as flags."""

NUMBERS = {"int": lambda word: int(word.removesuffix(".0")), "float": float, "bool": BOOLEANS.index}
"""Readers of the values that are checked, by the types of fields. They raise a `ValueError`."""


class Given(NamedTuple):
    """Values by name of field, flags before the YAML, and the place of each. A flag without a value has `True`."""

    values: dict[str, Any]
    places: dict[str, str]


def of_command(method: str) -> set[str]:
    """Names of a method's flags that no dataclass field declares."""
    return OF_COMMAND | ({"tiny_model"} if method in TINY else set())


def name_of(flag: str) -> str:
    """The name of the field that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")


def read_given(args: Sequence[str]) -> Given:
    """
    Read flags and YAML without a parser.

    Raises:
        ValueError: If the file is not a YAML mapping, or a key appears twice, for flags with one dash, and
            for a value before the first flag.
    """
    if flags := [word for word in args if re.match("-[a-z]", word)]:
        raise ValueError(f"{flags[0]}: a flag begins with two dashes: `-{flags[0]}`.")
    if not args[0].startswith("-"):
        raise ValueError(f"{args[0]}: a value without a flag. A YAML file is `--config {args[0]}`.")
    if args[-1] == "--config" or args.count("--config") > 1:
        raise ValueError("`--config` needs the path of one YAML file.")
    given = _read_yaml(args[args.index("--config") + 1]) if "--config" in args else Given({}, {})
    for i, word in enumerate(args):
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            following = [value] if has_value else [*takewhile(lambda x: not x.startswith("--"), args[i + 1 :])]
            name, words = name_of(flag), following or [True]
            given.values[name] = words if name == "reward_funcs" else words[0]
            given.places[name] = flag
    return given


def _read_yaml(path: str) -> Given:
    try:
        text = Path(path).read_text("utf-8")
        root, values = yaml.compose(text), yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} does not map fields to values.")
    lines: dict[str, int] = {}
    for node, _ in root.value:
        line = node.start_mark.line + 1
        if node.value in lines:
            raise ValueError(f"{path}: the key `{node.value}` appears in lines {lines[node.value]} and {line}.")
        lines[node.value] = line
    return Given(values, {key: f"{path}, line {line}: {key}" for key, line in lines.items()})


def check_given(method: str, given: Given) -> str | bool | None:
    """
    Check flags and YAML, and return the checkpoint to resume from.

    Raises:
        ValueError, FileNotFoundError: For unknown names, words in place of numbers, missing paths, and a missing model
            or dataset.
    """
    for package in ("transformers", "trl"):
        require(package, f"{METHODS[method]}Trainer")
    fields = declared_fields(method)
    if not newer_trl():  # a later TRL may declare fields in other files; the parser of its script checks the names
        check_names(method, given, fields)
    values = {_whole(name, fields): value for name, value in given.values.items()}
    places = {_whole(name, fields): place for name, place in given.places.items()}
    for name, value in values.items():
        if value is False and name.endswith("_strategy"):
            raise ValueError(f'{places[name]}: YAML takes `no` for false. Write "no" in quotes.')
        _check_value(value, places[name], fields.get(name, []))
        _check_choice(name, value, places[name])
    resume_from = _check_model(values, places)
    _check_data(values, places)
    if values.get("model_name_or_path") and values.get("tiny_model"):
        raise ValueError("`tiny_model` builds a model and `model_name_or_path` loads one: give only one of them.")
    if not (values.get("model_name_or_path") or values.get("tiny_model")):
        tiny = " (or `--tiny_model tiny`, which is built on the spot)" if method in TINY else ""
        raise ValueError(f"no model is given: set `--model_name_or_path` to a folder or a Hub id{tiny}.")
    if "reward_funcs" in fields and not (values.get("reward_funcs") or values.get("reward_model_name_or_path")):
        raise ValueError("no reward is given: set `--reward_funcs`, or `--reward_model_name_or_path`.")
    if isinstance(names := values.get("reward_funcs"), str):
        raise ValueError(f"{places['reward_funcs']}: write a list: `reward_funcs: [{names}]`.")
    if str(values.get("eval_on_start")).lower() == "true" and str(values.get("eval_strategy") or "no") == "no":
        raise ValueError("`eval_on_start` evaluates, but `eval_strategy` is 'no'. Leave one of them out.")
    if not (values.get("dataset_name") or values.get("datasets")):
        raise ValueError(
            "no data is given: set `--dataset_name` to a folder or a Hub id, or `datasets` in a YAML (`--config`)."
        )
    return resume_from


def declared_fields(method: str) -> dict[str, list[ast.AnnAssign]]:
    """
    The fields of a method and the flags of `accelerate launch`, with their declarations.

    A few belong to other classes in the same files: the parser of the method's script finds these later.
    """
    fields: dict[str, list[ast.AnnAssign]] = {name: [] for name in of_command(method)}
    files = [file for file in _config_files(method) if file.is_file()]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))):
        if isinstance(node, ast.AnnAssign):
            fields.setdefault(ast.unparse(node.target), []).append(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            for flag in (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)):
                fields.setdefault(name_of(flag), [])
    return fields


def _config_files(method: str) -> list[Path]:
    """The files that declare the fields of a method and the flags of `accelerate launch`."""
    others = {*METHODS} - {method}
    folder, transformers, accelerate = map(_folder, ("trl", "transformers", "accelerate"))
    ours = Path(__file__).parents[1]
    files = [*folder.glob("trainer/*_config.py"), folder / "scripts/utils.py", folder / f"scripts/{method}.py"]
    files = [file for file in files if file.stem.removesuffix("_config") not in others]
    files += folder.glob(f"experimental/{method}/*_config.py")
    files += [transformers / "training_args.py", accelerate / "commands/launch.py", ours / "trainers/settings.py"]
    return [*files, ours / "trainers/config.py", ours / "trainers/methods/distillation_config.py"]


def check_names(method: str, given: Given, known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: For flags and keys that neither the method's script nor `accelerate launch` takes; it names all.
    """
    known = {*known}
    unknown = [name for name, place in given.places.items() if not _is_known(name, place, known)]
    if unknown:
        first = f"not a field of `trl-padfix {method}` (`--help` lists them) or of `accelerate launch`:"
        unknown.sort(key=lambda name: not given.places[name].startswith("--"))
        raise ValueError("\n".join([first, *(f"  {given.places[name]}{hint(name, known)}" for name in unknown)]))


def _is_known(name: str, place: str, known: set[str]) -> bool:
    if place.startswith("--"):  # argparse takes the beginning of a flag, and `--no_x` for each flag `x`
        return any(other.startswith(name.removeprefix("no_")) or other.startswith(name) for other in known)
    return name in known


def _whole(name: str, known: Iterable[str]) -> str:
    """The field that the beginning of a flag stands for, as argparse takes it."""
    longer = [other for other in known if other.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _check_value(value: Any, place: str, declared: list[ast.AnnAssign]) -> None:
    """Raise a `ValueError` for a flag without its value, and for a word where the source declares a number."""
    types = {kind for node in declared for kind in ast.unparse(node.annotation).split(" | ")} - {"None"}
    if value is True and place.startswith("--") and types == {"str"}:
        raise ValueError(f"{place} needs a value after it.")
    for kind in NUMBERS.keys() & types if len(types) == 1 and value not in (None, True, False) else ():
        try:
            NUMBERS[kind](str(value).lower())
        except ValueError:
            null = " Write `null` for no value." if value in ("None", "none") else ""
            raise ValueError(f"{place}: invalid {kind} value: {value!r}.{null}") from None


def _check_choice(name: str, value: Any, place: str) -> None:
    """Raise a `ValueError` for a tiny model or an attention that there is not."""
    choices: Sequence[str] = TINY_MODELS if name == "tiny_model" else ()
    # A name with other characters is a kernel on the Hub, or JSON with a name for each part of the model.
    if name.endswith("attn_implementation") and re.fullmatch(r"[\w-]+", str(value)):
        source = (_folder("transformers") / "modeling_utils.py").read_text("utf-8")
        known = re.findall(r'"(\w+)": \w+_attention\w*_forward', source)
        choices = ["auto", "eager", *known] if known else ()  # none: a later transformers registers them elsewhere
    if choices and value is not None and value not in choices:
        raise ValueError(f"{place}: invalid choice: {value!r} (choose from {', '.join(choices)}).")


def _folder(package: str) -> Path:
    """The folder of an installed package."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else Path("nowhere")


def _check_model(values: dict[str, Any], places: dict[str, str]) -> str | bool | None:
    """Raise an error for a model or a checkpoint that is not there, and return the checkpoint to resume from."""
    in_cache = not {"env", "model_init_kwargs"} & values.keys()  # they may set another cache
    for field in ("model_name_or_path", "teacher_model_name_or_path", "reward_model_name_or_path"):
        if name := values.get(field):
            refuse_missing(name, places[field], in_cache)
    model = Path(values.get("model_name_or_path") or "nowhere")
    if model.is_dir() and not any((model / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"`model_name_or_path`: the folder {str(model)!r} has no config.json, so it is no model.")
    output_dir = values.get("output_dir") or "trainer_output"
    resume_from = checkpoint_to_resume(values.get("resume_from_checkpoint"), output_dir)
    if isinstance(resume_from, str) and not (Path(resume_from) / "trainer_state.json").is_file():
        states = sorted(Path(output_dir).glob("checkpoint-*/trainer_state.json"))
        there = ", ".join(str(state.parent) for state in states) or f"none in {str(output_dir)!r}"
        raise ValueError(f"`resume_from_checkpoint`: {resume_from!r} is no checkpoint. Checkpoints: {there}.")
    return resume_from


def _check_data(values: dict[str, Any], places: dict[str, str]) -> None:
    """Raise an error for a file as a dataset, and for local data that are not there."""
    if name := values.get("dataset_name"):
        refuse_missing(name, places["dataset_name"])
        # TRL passes the name to `load_dataset`, which takes the name of a file for a Hub id.
        if builder := DATA_FILES.get(Path(name).suffix):
            raise ValueError(
                f"`dataset_name`: {name!r} is a file. Give a folder or a Hub id; in a YAML (`--config`) a file is "
                f"`datasets: [{{path: {builder}, data_files: {name}}}]`."
            )
    datasets = values.get("datasets")
    for entry in [entry for entry in datasets if isinstance(entry, dict)] if isinstance(datasets, list) else ():
        # The files of a builder are looked up here, and others in the folder or the repository `path`.
        is_here = entry.get("path") in DATA_FILES.values() and "data_dir" not in entry
        files = entry.get("data_files") if is_here else None
        for name in [entry.get("path"), *([files] if isinstance(files, str) else files or ())]:
            if isinstance(name, str) and not re.search(r"[*?[{]|://", name):
                refuse_missing(name, places["datasets"])
