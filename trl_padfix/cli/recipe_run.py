"""
Additions of `trl-padfix` trainings to TRL's scripts: a tiny model built on the spot, preference pairs for SFT, and a
report at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from datasets import load_dataset
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..tools.formats import to_dialogues
from ..tools.initial_model import build_tiny
from ..tools.report import plot_curves, summary_table, write_report
from ..tools.tiny import SHAPES


__all__ = ["RecipeArguments", "ReportCallback", "model_to_train", "reporting", "to_dialogues"]


@dataclass
class RecipeArguments(trl.ScriptArguments):
    """TRL's script arguments, and the shape of a model that is built instead of loaded."""

    tiny_model: str | None = field(
        default=None,
        metadata={
            "help": "Train a random Qwen2 of this shape with a tokenizer trained on the data, instead of a pretrained "
            "model: no download.",
            "choices": list(SHAPES),
        },
    )


class ReportCallback(TrainerCallback):
    """Prints first and last metrics of a training; writes `report.json` and `curves.png` into its output folder."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        Console().print(summary_table(state.log_history))
        written = [write_report(state.log_history, args, folder / "report.json")]
        written += [path for path in [plot_curves(state.log_history, folder / "curves.png")] if path is not None]
        print(f"report: {folder} ({', '.join(path.name for path in written)})")


def reporting(trainer_class: type, convert: Callable[[Any], Any] = lambda dataset: dataset) -> Callable[..., Any]:
    """A stand-in for the trainer class in TRL's script, which converts the data and adds [`ReportCallback`]."""

    def build(*args: Any, **kwargs: Any) -> Any:
        for name in ("train_dataset", "eval_dataset"):
            if kwargs.get(name) is not None:
                kwargs[name] = convert(kwargs[name])
        trainer = trainer_class(*args, **kwargs)
        trainer.add_callback(ReportCallback())
        return trainer

    return build


def model_to_train(
    script: trl.ScriptArguments, training: TrainingArguments, model: trl.ModelConfig, data: trl.DatasetMixtureConfig
) -> str | None:
    """The model that is named, or a tiny one built for the data; raises a `ValueError` if both are requested."""
    tiny_model = getattr(script, "tiny_model", None)
    if not tiny_model:
        return model.model_name_or_path
    if model.model_name_or_path:
        raise ValueError("`tiny_model` builds a model and `model_name_or_path` loads one: give one of them.")
    if bool(data.datasets) == bool(script.dataset_name):
        raise ValueError("Give the data either as `datasets:` (a list, in the YAML) or as `dataset_name`.")
    if data.datasets:
        rows = trl.get_dataset(data)[script.dataset_train_split]
    else:
        split, name = script.dataset_train_split, script.dataset_config
        rows = load_dataset(script.dataset_name, name=name, split=split, streaming=script.dataset_streaming)
    return build_tiny(tiny_model, rows, Path(training.output_dir) / "initial_model")
