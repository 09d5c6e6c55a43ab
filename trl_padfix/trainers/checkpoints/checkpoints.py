"""Finds complete checkpoints of a training, and the one to resume from."""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from ...files import UnwritableError, why_unwritable


__all__ = ["checkpoint_to_resume", "checkpoints_of", "saying_what_is_safe", "what_is_missing"]

logger = logging.getLogger(__name__)

NEWEST = ("true", "latest", "last")
NONE = ("", "false", "none", "null")

_STATE = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
_ADAPTER = "adapter_model.safetensors"
_WEIGHTS = ("model.safetensors", _ADAPTER)
_INDEX = "model.safetensors.index.json"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads")
_OTHER_WEIGHTS = ("pytorch_model*", "adapter_model.bin", "global_step*")
"""Pickles, and files and folders of FSDP and DeepSpeed: not opened, but they count as weights."""


def checkpoint_to_resume(resume_from: str | bool | None, output_dir: str | Path) -> str | None:
    """
    The checkpoint selected by `resume_from_checkpoint`; `None` to begin from the start.

    `resume_from` is a folder; or `True`, `"true"` or `"latest"` for the newest complete checkpoint of `output_dir`,
    with a warning about newer half-written ones; or `None`, `False`, `"false"` for none.

    Raises:
        ValueError: If there is no complete checkpoint, or the named one is half-written.
    """
    word = str(resume_from).lower()
    if resume_from is None or word in NONE:
        return None
    if word in NEWEST and not Path(str(resume_from)).is_dir():
        return _newest_checkpoint(resume_from, output_dir)
    return _named_checkpoint(Path(str(resume_from)))


def _named_checkpoint(named: Path) -> str:
    """The folder that `resume_from_checkpoint` names; a `ValueError` if it is no complete checkpoint."""
    if (missing := what_is_missing(named)) is None:
        return str(named)
    if (named / "config.json").exists() and not any((named / name).exists() for name in _STATE):
        raise ValueError(
            f"`resume_from_checkpoint={named}` holds a saved model and no state of a training. Begin a training "
            f"with it: `model_name_or_path={named}`; or name a folder `checkpoint-N`."
        )
    whole = _newest_whole(named.parent)
    raise ValueError(
        f"`resume_from_checkpoint={named}` is {'half-written' if named.is_dir() else 'no folder'} ({missing}); "
        f"{f'the newest whole one beside it is {whole}' if whole else 'there is no whole one beside it'}."
    )


def _newest_checkpoint(resume_from: str | bool, output_dir: str | Path) -> str:
    """The newest complete checkpoint of a training; warns of newer half-written ones."""
    half = []
    for checkpoint in checkpoints_of(output_dir):
        if (missing := what_is_missing(checkpoint)) is None:
            for skipped in half:
                logger.warning(f"Skipping {skipped}. Resuming from {checkpoint}.")
            logger.info(f"Resuming from {checkpoint}.")
            return str(checkpoint)
        half.append(f"{checkpoint}, which is half-written ({missing})")
    raise ValueError(
        f"`resume_from_checkpoint={resume_from}`: there is no whole checkpoint in {str(output_dir)!r}"
        + (f", only {'; '.join(half)}" if half else "")
        + ". Give the `output_dir` of the training that is to go on or the folder of a checkpoint, or leave "
        "`resume_from_checkpoint` out to begin from the start."
    )


def require_same_model(checkpoint: str | Path, model: torch.nn.Module) -> None:
    """
    Raise a `ValueError` if a checkpoint was saved from another model than `model`, going by the files beside weights.

    Trainer loads the weights that have the right names, leaves the others as they are, and fails in the state of the
    optimizer, or not at all.
    """
    folder, beside = Path(checkpoint), "adapter_config.json"
    config, ours = _read_json(folder / "config.json"), getattr(model, "config", None)
    # PEFT saves adapters of other names in folders; beside a whole model they are something else.
    holds_adapters = (folder / beside).exists() or (not config and any(folder.glob(f"*/{beside}")))
    adapters = getattr(model, "peft_config", None)  # a dictionary by names, of a PEFT model
    named = f"`resume_from_checkpoint={folder}`"
    if holds_adapters and not adapters:
        raise ValueError(
            f"{named} holds adapters, and the model that is trained has none. Train with the same adapters "
            "(`peft_config`; `--use_peft` on the command line), or begin without `resume_from_checkpoint`."
        )
    if adapters and config and not holds_adapters:
        raise ValueError(
            f"{named} holds a whole model, and adapters are trained here. To train adapters on that model, give it as "
            f"`model_name_or_path={folder}` and leave `resume_from_checkpoint` out."
        )
    differences, of = [], "model"
    if holds_adapters:
        differences, of = _of_adapters(_read_json(folder / beside), adapters or {}), "adapters"
    elif config and isinstance(ours, PretrainedConfig):
        pretrained = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)  # if it is compiled
        differences = _of_models(config, ours, type(pretrained))
    if differences:
        raise ValueError(
            f"{named} was saved from another model than the one that is trained: {'; '.join(differences)}. Name the "
            f"{of} that it was trained from, another checkpoint, or begin without `resume_from_checkpoint`."
        )


def _of_models(saved: dict[str, Any], config: PretrainedConfig, model_class: type) -> list[str]:
    """What of a saved `config.json` is of another model than `config`: its class, or sizes."""
    text, saved_text = config.get_text_config(), saved.get("text_config") or saved
    saved_class, names = (saved.get("architectures") or [None])[0], [base.__name__ for base in model_class.__mro__]
    # A subclass goes on from a checkpoint of its base; FSDP2 makes one of each class, too.
    pairs = {"class": (saved_class, saved_class if saved_class in names else names[0])}
    for name in _SIZES:
        saved_name = text.attribute_map.get(name, name)
        pairs[name] = saved_text.get(saved_name), getattr(text, name, None)
    return _unequal(pairs)


def _of_adapters(saved: dict[str, Any], configs: dict[str, Any]) -> list[str]:
    """What of a saved `adapter_config.json`, which is that of the adapter `default`, is of other adapters."""
    config, pairs = configs.get("default"), {}
    for name in ("peft_type", "r", "target_modules"):
        theirs, ours = saved.get(name), getattr(config, name, None)
        if isinstance(theirs, list) and isinstance(ours, set):  # PEFT keeps the names in a set, and writes a list
            theirs, ours = sorted(theirs), sorted(ours)
        pairs[name] = theirs, ours
    return _unequal(pairs)


def _unequal(pairs: dict[str, tuple[Any, Any]]) -> list[str]:
    # A key may be missing: the configuration of another class has other names.
    unequal = {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
    return [f"its {name} is {theirs}, and {ours} here" for name, (theirs, ours) in unequal.items()]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """The `checkpoint-STEP` folders of a training, the newest first."""
    # By step and not by time: copying a folder changes its time.
    folders = [f for f in Path(output_dir).glob("checkpoint-*") if f.name[11:].isdecimal() and f.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name[11:]), reverse=True)


def _newest_whole(output_dir: str | Path) -> Path | None:
    return next((c for c in checkpoints_of(output_dir) if what_is_missing(c) is None), None)


@contextmanager
def saying_what_is_safe(output_dir: str | Path) -> Iterator[None]:
    """A block that trains: a failed write becomes an [`UnwritableError`] that names the newest complete checkpoint."""
    try:
        yield
    except Exception as error:
        if (why := why_unwritable(error)) is None:
            raise
        there = next(p for p in (Path(output_dir).absolute(), *Path(output_dir).absolute().parents) if p.exists())
        free = f"{shutil.disk_usage(there).free / 2**20:,.0f} MiB are free at {str(there)!r}"
        whole = _newest_whole(output_dir)
        safe = "There is no whole checkpoint yet: what was trained is lost."
        if whole:
            size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) / 2**20
            safe = (
                f"The newest whole checkpoint is {whole} (one takes {size:,.0f} MiB): what was trained since is "
                "lost, and `--resume_from_checkpoint latest` goes on from it."
            )
        raise UnwritableError(f"the training stopped: {why}. {free}. {safe}") from error


def what_is_missing(checkpoint: str | Path) -> str | None:
    """The first missing or truncated file of a checkpoint, as text; `None` if it is complete. Loads no tensor."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "there is no such folder"
    for name in _needed(folder):
        if not (folder / name).exists():
            return f"`{name}` is missing"
        if not _is_whole(folder / name):
            return f"`{name}` is cut short"
    return None


def _needed(folder: Path) -> Iterator[str]:
    """The files that a complete checkpoint of this kind has. An index is read only after the caller has checked it."""
    yield "trainer_state.json"
    weights = [str(path.relative_to(folder)) for path in folder.glob(f"*/{_ADAPTER}")]  # folders of further adapters
    if (folder / _INDEX).exists():
        yield _INDEX
        weights += sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    else:
        weights += [name for name in _WEIGHTS if (folder / name).exists()]
    if not weights and not any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        weights = ["model.safetensors"]
    yield from weights
    of_step, rng = ["optimizer.pt", "scheduler.pt"], any(folder.glob("rng_state*.pth"))
    if rng or any((folder / name).exists() for name in of_step):  # `save_only_model` writes none of them
        if not any(folder.glob("pytorch_model_fsdp*")) and not any(folder.glob("global_step*")):
            yield from of_step
        if not rng:
            yield "rng_state.pth"
    for shards in (*folder.glob("pytorch_model_fsdp_*/"), *folder.glob("optimizer_*/")):
        if shards.is_dir():
            yield f"{shards.name}/.metadata"  # torch writes it last, after all shards
    for pattern in ("*.pt", "*.pth", "*.bin"):
        yield from (path.name for path in folder.glob(pattern))


def _is_whole(path: Path) -> bool:
    """Whether a file can be parsed as far as its structure: JSON, the header of safetensors, the end of a zip."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="numpy"):
                pass
    except (SafetensorError, OSError, ValueError):
        return False
    # `torch.save` writes zip files, whose directory is at the end: a truncated one is no zip file.
    return path.suffix not in (".pt", ".pth", ".bin") or zipfile.is_zipfile(path)
