"""
Flags and keys of a YAML, checked before torch is imported: names, numbers, paths, and what is missing.

The fields are read from the source of the configurations, because importing these takes ten seconds.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import yaml

from ..core.switch import is_off
from ..field_names import NEEDS, hint
from ..files import DATA_FILES, refuse_missing
from ..trainers.resume import checkpoint_to_resume
from ..versions import installed_version, newer_trl, require
from . import METHODS


__all__ = ["Given", "check_given", "check_names", "declared_fields", "name_of", "read_given"]

BOOLEANS = ["yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"]
"""Strings that the parser of transformers treats as flags."""

READERS = {"int": int, "float": float, "bool": BOOLEANS.index, "dict": lambda word: {**json.loads(word)}}
"""Readers of the values that are checked, by the types of fields. They raise an error; other types read all."""

OPEN = {"accelerate_config", "attn_implementation", "ref_attn_implementation", "teacher_attn_implementation"}
"""Fields with choices that also take paths or other values."""

BOUNDS = {
    "at least 1": (lambda x: x >= 1, "lora_r|packed.*|max_.*(batch|length)|per_device.*|.*num_proc.*|.*accum.*steps"),
    "at least 0": (lambda x: x >= 0, "learning_rate|weight_decay|adam_epsilon|warmup_steps|dataloader_num_workers"),
    "above 0": (lambda x: x > 0, "num_train_epochs|temperature|repetition_penalty"),
    "at least 0 and below 1": (lambda x: 0 <= x < 1, "adam_beta[12]|lora_dropout"),
    f"at least 0 and below {2**32}": (lambda x: 0 <= x < 2**32, "seed"),
}
"""Patterns of fields, by the values that they take."""

COMPARED = ("f_divergence_type", "importance_sampling_level", "loss_type", "multi_objective_aggregation")
"""Fields with choices that only TRL's trainers list, in comparisons."""

DEVICES = ("torch_npu", "torch_xla", "torch_mlu", "torch_musa", "torch_supa", "torch_neuronx", "habana_frameworks")
"""Packages that train on other devices than CPUs with a CPU build of torch."""

IN_YAML = ("bfd-requeue", "float64")
"""Values that TRL takes in a YAML, although the choices of their fields lack them."""

PACKAGES = dict.fromkeys(("load_in_4bit", "load_in_8bit", "adamw_8bit", "paged_adamw_8bit"), "bitsandbytes") | {
    "deepspeed": "deepspeed", "use_liger_kernel": "liger_kernel", "use_vllm": "vllm", "wandb": "wandb",
    "comet_ml": "comet_ml", "mlflow": "mlflow", "swanlab": "swanlab", "trackio": "trackio",
}  # fmt: skip
"""Packages that a field needs, or a value of `optim` or `report_to`."""


class Given(NamedTuple):
    """Values by name of field, flags before the YAML, and the place of each. A flag without a value has `True`."""

    values: dict[str, Any]
    places: dict[str, str]


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
    if args and not args[0].startswith("-"):
        raise ValueError(f"Unexpected argument `{args[0]}`. To read a YAML file, write `--config {args[0]}`.")
    if args[-1:] == ["--config"] or args.count("--config") > 1:
        raise ValueError("`--config` needs the path of one YAML file.")
    given = _read_yaml(args[args.index("--config") + 1]) if "--config" in args else Given({}, {})
    for i, word in enumerate(args):
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            following = [value] if has_value else [*takewhile(lambda x: not x.startswith("--"), args[i + 1 :])]
            name, words = name_of(flag), following or [True]
            given.values[name] = words if name == "reward_funcs" or len(words) > 1 else words[0]
            given.places[name] = flag
    return given


def _read_yaml(path: str) -> Given:
    if not Path(path).is_file():
        close = hint(str(Path(path)), map(str, Path(path).parent.glob("*.y*ml")))
        raise FileNotFoundError(f"there is no file {path!r}{close} here ({Path.cwd()}).")
    try:
        text = Path(path).read_text("utf-8")
        root, values = yaml.compose(text), yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = re.sub(r'in "<.*>", (line \d+), column \d+(:\n.*\n *\^)?', r"(\1)", str(error))
        remedy = "Indent with spaces, not tabs; quote special characters; save it as UTF-8."
        raise ValueError(f"{path} is not valid YAML: {' '.join(text.split())}. {remedy}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} is not a mapping of fields to values. Write lines such as `max_steps: 100`.")
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
    values, places = given
    if not newer_trl():  # a later TRL may declare fields in other files; the parser of its script checks the names
        check_names(method, places, fields)
    on = {name for name, value in values.items() if str(value).lower() in (*BOOLEANS[:5], "auto")}
    has_device = "+cpu" not in str(torch := installed_version("torch")) or any(map(find_spec, DEVICES))
    is_on_cpu = "use_cpu" in on or not has_device
    if "--env" in places.values():
        raise ValueError("`env` works only in a YAML (`env: {NAME: VALUE}`). Here write `NAME=VALUE trl-padfix ...`.")
    for name, value in values.items():
        # A name with other characters is a path, a kernel on the Hub, or JSON with a name for each part of a model.
        is_open = name in OPEN and not re.fullmatch(r"[\w-]+", str(value))
        _check_value(name, value, places[name], set() if is_open else fields.get(name, set()))
        if name == "config_file" or (name == "accelerate_config" and is_open):
            _check_accelerate(method, str(value))
        package = PACKAGES.get(str(value) if name in ("optim", "report_to") else name)
        if package and str(value).lower() not in (*BOOLEANS[5:], "none") and not find_spec(package):
            raise ValueError(f"{places[name]}: run `pip install {package}`, which it needs.")
        if name in OPEN and str(value).startswith(("flash", "flex")) and is_on_cpu:
            raise ValueError(f"{places[name]}: {value!r} needs a GPU, and this run has none. Write 'sdpa'.")
    for name, other in {"fp16": "bf16", "group_by_prefix": None if is_off() else "packing"}.items():
        if {name, other} <= on:
            raise ValueError(f"{places[name]}: `{other}` is true too. Set one of them to false.")
    for name, (other, _) in () if is_off() else NEEDS.items():
        if other not in on and str(values.get(name)).lower() not in ("none", *BOOLEANS[5:]):
            raise ValueError(f"{places[name]}: it needs `{other}: true`. Set both, or neither.")
    saves, evaluates = values.get("save_strategy", "steps"), values.get("eval_strategy", "no")
    if "load_best_model_at_end" in on and saves not in ("best", evaluates):
        problem = f"`save_strategy` ({saves}) and `eval_strategy` ({evaluates}) must be the same"
        raise ValueError(f"{places['load_best_model_at_end']}: {problem}, or `save_strategy: best`.")
    if "eval_on_start" in on and evaluates == "no":
        raise ValueError(f"{places['eval_on_start']}: it needs `eval_strategy: steps` or `epoch`.")
    budget, longest = (int(values.get(name) or 0) for name in ("max_tokens_per_batch", "max_completion_length"))
    if 0 < budget < longest and not is_off():
        raise ValueError(f"{places['max_tokens_per_batch']}: it must be at least `max_completion_length` ({longest}).")
    lora = [name for name in values if name.startswith("lora_")]
    if lora and "use_peft" not in values:
        raise ValueError(f"{places[lora[0]]}: it has no effect without `use_peft: true`. Set both, or neither.")
    resume_from = _check_model(method, values, places)
    if bool(values.get("model_name_or_path")) == bool(values.get("tiny_model")):
        raise ValueError("Set `--model_name_or_path` to a folder or a Hub id, or `--tiny_model tiny` (not both).")
    if method == "distillation" and not values.get("teacher_model_name_or_path"):
        raise ValueError("No teacher: set `--teacher_model_name_or_path` to a folder or a Hub id.")
    if "reward_funcs" in fields and not (values.get("reward_funcs") or values.get("reward_model_name_or_path")):
        raise ValueError("No reward: set `--reward_funcs`, or `--reward_model_name_or_path`.")
    if isinstance(names := values.get("reward_funcs"), str):
        raise ValueError(f"{places['reward_funcs']}: write a list: `reward_funcs: [{names}]`.")
    _check_rewards(names or (), places.get("reward_funcs", ""))
    if not (values.get("dataset_name") or values.get("datasets")):
        raise ValueError("No dataset: set `--dataset_name` to a folder or Hub id, or `datasets` in a YAML.")
    is_bf16 = {"bf16", "bf16_full_eval"} & on or (values.get("bf16") is None and "fp16" not in on)
    if is_bf16 and not (has_device or {"use_cpu", "no_cuda"} & on):
        raise ValueError(f"torch {torch} has no GPU: for bf16 (the default) set `--use_cpu true`, or reinstall it.")
    _check_data(method, values, places)
    return resume_from


def _check_rewards(names: Iterable[str], place: str) -> None:
    """Raise a `ValueError` for functions and packages that are not there; an import would run the user's code."""
    for module, _, function in (str(name).rpartition(".") for name in names):
        file = Path(module.replace(".", "/") + ".py") if module else _folder("trl") / "rewards/__init__.py"
        package = module.partition(".")[0]
        is_here = Path(package).is_dir() or Path(f"{package}.py").is_file()
        if module and not (re.fullmatch(r"[\w.]+", module) and (is_here or find_spec(package))):
            raise ValueError(f"{place}: there is no module {module!r} here ({Path.cwd()}).")
        source = file.read_text("utf-8") if file.is_file() else function  # of a package, which TRL imports later
        if not re.search(rf"\b{re.escape(function)}\b|import \*|def __get", source):
            rewards = ", ".join(sorted({*re.findall(r'"(\w+_reward)"', source)}))
            there = file.name if module else f"TRL, which has {rewards}"
            raise ValueError(f"{place}: there is no {function!r} in {there}. Your own function is `module.function`.")


def declared_fields(method: str) -> dict[str, set[str]]:
    """
    The fields of a method and the flags of `accelerate launch`, with the names of their types and quoted choices.

    A few belong to other classes in the same files: the parser of the method's script finds these later.
    """
    fields = _declared_in(_config_files(method))
    # These are no fields of a configuration.
    fields |= {"config": set(), "dry_run": {"bool"}, "env": {"dict"}, "tiny_model": {"None", "'tiny'", "'small'"}}
    fields |= {name: {"dict", "None"} for name in fields if name.endswith("_kwargs")}
    source = (_folder("transformers") / "modeling_utils.py").read_text("utf-8")
    attentions = {*map(repr, re.findall(r'"(\w+)": \w+_attention\w*_forward', source))}
    # None: a later transformers registers them elsewhere.
    fields |= dict.fromkeys(OPEN & fields.keys(), attentions | {"'auto'", "'eager'", "None"} if attentions else set())
    fields |= {name: fields[name] & {"None", "list"} | choices for name, choices in _compared(method).items()}
    source = (_folder("transformers") / "integrations/integration_utils.py").read_text("utf-8")
    if loggers := {repr(name) for name in re.findall(r'^    "(\w+)": \w+Callback,', source, re.MULTILINE)}:
        fields["report_to"] = {"None", "list", "'all'", "'none'"} | loggers
    fields["run_name"] = {"None", "text"}  # YAML reads 7 and 2026-11-30 as other types than text
    fields["accelerate_config"] = {repr(file.stem) for file in (_folder("trl") / "accelerate_configs").glob("*.yaml")}
    return fields


def _compared(method: str) -> dict[str, set[str]]:
    """The quoted values with which a trainer of TRL compares the fields of [`COMPARED`]; none of a later TRL."""
    source = (_folder("trl") / f"trainer/{method}_trainer.py").read_text("utf-8") if not newer_trl() else ""
    found: dict[str, set[str]] = {}
    for name, values in re.findall(rf'\b({"|".join(COMPARED)}) (?:==|(?:not )?in) ("\w+"|[\[({{][^\])}}]*)', source):
        found.setdefault(name, set()).update(map(repr, re.findall(r'"(\w+)"', values)))
    return found


def _declared_in(files: Iterable[Path]) -> dict[str, set[str]]:
    """The fields of classes and the flags of parsers in source files."""
    fields: dict[str, set[str]] = {}
    enums = _enums()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))):
        if isinstance(node, ast.AnnAssign):
            fields.setdefault(ast.unparse(node.target), set()).update(_types(node, enums))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            types = {ast.unparse(k.value) for k in node.keywords if k.arg == "type"} & {"int", "float"}
            for flag in (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)):
                fields.setdefault(name_of(flag), set()).update(types)
    return fields


def _check_accelerate(method: str, path: str) -> None:
    """Raise a `ValueError` for keys and values that accelerate does not take in its configuration."""
    given, fields = _read_yaml(path), _declared_in([_folder("accelerate") / "commands/config/config_args.py"])
    check_names(method, given.places, {*fields, "dynamo_backend", "fp16"})  # it renames these two
    for name in {*given.values} & {*fields}:
        if given.values[name] is not None and "str" not in fields[name]:
            _check_value(name, given.values[name], given.places[name], fields[name])


def _enums() -> dict[str, set[str]]:
    """Quoted choices by the name of a type: `prefix_sharing`, and enumerations of transformers and accelerate."""
    files = [_folder("transformers") / name for name in ("trainer_utils.py", "training_args.py")]
    files += [_folder("accelerate") / "utils/dataclasses.py"]
    source = "".join(file.read_text("utf-8") for file in files)
    found = re.findall(r"(?ms)^class (\w+)\((?:ExplicitEnum|str, enum\.Enum)\):\n(.*?)(?=^\S)", source)
    enums = {name: {*map(repr, re.findall(r'^    \w+ = "(\w+)"', body, re.MULTILINE))} for name, body in found}
    return enums | {"Sharing": {"bool", "'true'", "'false'", "'auto'"}}


def _types(node: ast.AnnAssign, enums: dict[str, set[str]]) -> set[str]:
    """The names of the types of a field; its quoted choices in their place if it has choices."""
    types = {*re.findall(r"\w+", ast.unparse(node.annotation).replace("Optional", "None"))}
    listed = re.search(r"'choices': (\[[^]]*\])", ast.unparse(node))
    choices = {*re.findall("'[^']+'", listed[1])} if listed else set().union(*(enums.get(name, ()) for name in types))
    return types & {"None"} | choices if choices else types - {"Union"}


def _config_files(method: str) -> list[Path]:
    """The files that declare the fields of a method and the flags of `accelerate launch`."""
    others = {*METHODS} - {method}
    folder, transformers, accelerate = map(_folder, ("trl", "transformers", "accelerate"))
    ours = Path(__file__).parents[1]
    files = [*folder.glob("trainer/*_config.py"), folder / "scripts/utils.py", folder / f"scripts/{method}.py"]
    files += folder.glob(f"experimental/{method}/*_config.py")
    files += [transformers / "training_args.py", accelerate / "commands/launch.py", ours / "trainers/settings.py"]
    files += [ours / "trainers/config.py", ours / "trainers/methods/distillation_config.py"]
    return [file for file in files if file.is_file() and file.stem.removesuffix("_config") not in others]


def check_names(method: str, places: dict[str, str], known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: For flags and keys that neither the method's script nor `accelerate launch` takes; it names all.
    """
    if unknown := [name for name in places if name not in {*known}]:
        first = f"not a field of `trl-padfix {method}` (`--help` lists them) or of `accelerate launch`:"
        raise ValueError("\n".join([first, *(f"  {places[name]}{hint(name, known)}" for name in unknown)]))


def _check_value(name: str, value: Any, place: str, types: set[str]) -> None:
    """Raise a `ValueError` for a value that is of none of the types of its field, and for a flag without its value."""
    is_one = name == "report_to" and place.startswith("--")  # TRL's parser takes one value of this flag
    items = value if isinstance(value, list) and "list" in types and not is_one else [value]
    types = types - {"list"}
    if value is True and place.startswith("--") and types and "bool" not in types:
        raise ValueError(f"{place} needs a value after it.")
    for wrong in (x for x in items if types and x not in IN_YAML and not any(_is(x, name) for name in types)):
        listed = ", ".join(sorted(types - {"None"})).replace("', bool", "'")
        listed += ", or a file" * (name == "accelerate_config")
        problem = f"choice: {wrong!r} (choose from {listed})" if "'" in listed else f"{listed} value: {wrong!r}"
        remedy = ' YAML takes `no` for false. Write "no" in quotes.' if wrong is False and "'no'" in types else ""
        remedy = f' Write "{wrong}" in quotes.' if not isinstance(wrong, list | dict) and "str" in types else remedy
        remedy = ' Write {"NAME": VALUE}; in a shell, put it in single quotes.' if "dict" in types else remedy
        if isinstance(wrong, list) and place.startswith("--"):
            remedy = " Write one value. A flag begins with `--`, and a value with spaces needs quotes."
        if wrong in (None, "None", "none"):
            remedy = " Write `null` for no value." if "None" in types else " Write a value, or leave the field out."
        raise ValueError(f"{place}: invalid {problem}.{remedy}")
    for bound, (is_in, names) in BOUNDS.items():
        if re.fullmatch(names, name) and _is(value, "float") and not is_in(float(value)):
            raise ValueError(f"{place}: it must be {bound}, got {value}.")
    is_count = isinstance(value, int) and value > 0  # of rows; a flag is a string, and TRL reads it as a share
    if name == "test_split_size" and not (value is None or is_count or 0 < float(value) < 1):
        raise ValueError(f"{place}: it must be between 0 and 1, or in a YAML a number of rows, got {value}.")
    one = str(items[0]) if name == "lora_target_modules" and len(items) == 1 else ""
    if re.fullmatch(r"(?!(None|lm_head|score)$)\w+([, ]+\w+)*", one):
        pattern = re.sub("[, ]+", "|", one)
        raise ValueError(f"{place}: one text is a pattern of whole names: got {one!r}, write '.*({pattern})'.")


def _is(value: Any, name: str) -> bool:
    """Whether a value of a flag or a YAML is of a type, or is a quoted choice."""
    if value is None or name == "None" or "'" in name:
        return name in ("None", repr(str(value))) and (value is None) == (name == "None")
    with suppress(TypeError, ValueError):
        READERS.get(name, str)((json.dumps(value, default=str) if isinstance(value, dict) else str(value)).lower())
        return isinstance(value, str | bool) if name == "str" else name != "text" or not isinstance(value, list)
    return False


def _folder(package: str) -> Path:
    """The folder of an installed package."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else Path("nowhere")


def _check_model(method: str, values: dict[str, Any], places: dict[str, str]) -> str | bool | None:
    """Raise an error for a model or a checkpoint that is not there, and return the checkpoint to resume from."""
    in_cache = not {"env", "model_init_kwargs"} & values.keys()  # they may set another cache
    for field in (name for name in values if name.endswith(("model_name_or_path", "chat_template_path"))):
        if (name := values.get(field)) and not (field == "chat_template_path" and Path(name).is_file()):
            # TRL first reads the configuration of a model, except for a reward: only there an adapter can be loaded.
            # The template may be that of a tokenizer without a model.
            holds = ("config.json",) if in_cache and not {"reward", "chat_t"} & {method, field[:6]} else ()
            refuse_missing(name, places[field], in_cache, holds)
    output_dir = str(values.get("output_dir") or "trainer_output")
    there = str(next(path for path in (Path(output_dir), *Path(output_dir).absolute().parents) if path.exists()))
    try:
        TemporaryFile(dir=there).close()  # root may write to any folder, but not to /proc
    except OSError as error:
        problem = f"`output_dir`: {output_dir!r} cannot be written: {there!r} is a file or read-only. Name another."
        raise ValueError(problem) from error
    resume_from = checkpoint_to_resume(values.get("resume_from_checkpoint"), output_dir)
    if isinstance(resume_from, str) and not (Path(resume_from) / "trainer_state.json").is_file():
        raise ValueError(f"`resume_from_checkpoint`: {resume_from!r} is no checkpoint. Name one, or write `latest`.")
    return resume_from


def _check_data(method: str, values: dict[str, Any], places: dict[str, str]) -> None:
    """Raise an error for data that are not there, and for data on this machine that a method does not read."""
    place = places.get("datasets") or places["dataset_name"]
    alone = {"path": values.get("dataset_name"), "name": values.get("dataset_config")}
    parts, entries = {place: alone | {"split": values.get("dataset_train_split")}}, values.get("datasets") or []
    listed = isinstance(entries, list) and all(isinstance(x, dict) and isinstance(x.get("path"), str) for x in entries)
    if place.startswith("--datasets") or not listed:
        raise ValueError(f"{place}: in a YAML write `datasets: [{{path: json, data_files: FILE}}]`.")
    if values.get("eval_strategy") not in (None, "no"):
        test = values.get("dataset_test_split") or "test"
        parts[f"{place}, `dataset_test_split` (or `test_split_size` with `datasets`)"] = alone | {"split": test}
        if entries and test != "train" and not values.get("test_split_size"):
            raise ValueError(f"{place}: it has no split {test!r} to evaluate on. Set `test_split_size`.")
    rows: list[tuple[str, dict[str, Any]]] = []
    known = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
    for place, entry in ({f"{place}, entry {i}": x for i, x in enumerate(entries, 1)} or parts).items():
        unknown = [f"`{key}`{hint(key, known)}" for key in entry if key not in known]
        if unknown and not newer_trl():
            raise ValueError(f"{place} has no field {', '.join(unknown)}. It has {', '.join(known)}.")
        if not isinstance(entry.get("columns") or [], list):
            raise ValueError(f"{place}: `columns` is a list of names: write `columns: [prompt, chosen, rejected]`.")
        _check_value("fraction", entry.get("fraction"), f"{place}: fraction", {"None", "float"})
        # A stream has no slices, such as `train[:80%]`.
        path, (split, has_slice, _) = str(entry.get("path")), str(entry.get("split") or "train").partition("[")
        is_here = Path(path).is_dir() or (path in DATA_FILES.values() and entry.keys() & {"data_files", "data_dir"})
        is_saved = (Path(path) / "state.json").is_file()  # by `save_to_disk`
        file = f"{path}/*.arrow" if is_saved else path if Path(path).is_file() else "FILE"
        builder = DATA_FILES.get(Path(file).suffix) or DATA_FILES.get(f".{path}")
        if is_saved or (builder and not is_here):
            remedy = f"In a YAML (`--config`) write `datasets: [{{path: {builder}, data_files: {file}}}]`"
            raise ValueError(f"{place}: `load_dataset` cannot load {path!r} by this name. {remedy}.")
        refuse_missing(path, place)
        # `env` may set another cache, and `datasets` reads the environment at import.
        if is_here and "://" not in str(entry) and "env" not in values:
            from datasets import load_dataset  # it takes a second

            from ..trainers.data.columns import column_names, needed_columns, require_columns, require_values

            given = {key: entry[key] for key in ("path", "name", "data_dir", "data_files") if entry.get(key)}
            data = str(entry.get("data_files") or path)
            try:
                with patch("datasets.config.TORCH_AVAILABLE", "torch" in sys.modules):  # else a stream imports torch
                    columns = column_names(stream := load_dataset(**given, split=split, streaming=True))
                    read = {*map(str, entry.get("columns") or columns)}
                    require_columns(columns, data, [read], "Correct `columns`, or the data")
                    needed = needed_columns(method, values.get("dataset_text_field") or "text")
                    if re.search("'(reasoning_)?accuracy_reward'", str(values.get("reward_funcs"))):
                        require_columns(read, data, [{"solution"}], "The accuracy reward compares with `solution`")
                    read = require_columns(read, data, *needed)
                    # `expand_turns` leaves rows out, and a slice may do.
                    if read and not has_slice and str(values.get("expand_turns")).lower() not in BOOLEANS[:5]:
                        first = (f"The first row of {data}", next(iter(stream.select_columns(read))))
                        rows = [*rows, first] if entries else [first]
                        require_values(rows)
            except (FileNotFoundError, StopIteration, ValueError) as error:
                raise ValueError(f"{place}: {str(error) or f'{data} or a file in it has no row.'}") from error
