"""
DPO without padding, on one process or many.

A tiny model built on the spot, offline, on CPU, in under a minute of training:

    accelerate launch --cpu recipes/dpo.py --config recipes/dpo_tiny.yaml

A real one (any flag of TRL's `trl dpo`, and ours):

    accelerate launch recipes/dpo.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized \
        --padding_free true --prefix_sharing true \
        --per_device_train_batch_size 8 --learning_rate 5e-7 --output_dir runs/qwen-dpo
"""

from dataclasses import dataclass, field
from pathlib import Path

import trl
from datasets import DatasetDict, load_dataset
from rich.console import Console
from transformers import set_seed
from trl.data_utils import is_conversational

from trl_padfix import DPOConfig, DPOTrainer
from trl_padfix.cli.mistakes import explained
from trl_padfix.tools.initial_model import built_once, fingerprint
from trl_padfix.tools.report import plot_curves, summary_table
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer
from trl_padfix.trainers.checkpoints import checkpoint_to_resume, saying_what_is_safe


@dataclass
class RecipeArguments(trl.ScriptArguments):
    """TRL's script arguments, and the model that is built rather than loaded."""

    tiny_model: str | None = field(
        default=None,
        metadata={
            "help": "Train a random Qwen2 of this shape with a tokenizer trained on the data, instead of a pretrained "
            "model: no download.",
            "choices": list(SHAPES),
        },
    )


def load_pairs(script_args: RecipeArguments, dataset_args: trl.DatasetMixtureConfig) -> DatasetDict:
    """The data of `datasets:` (a mixture) or of `dataset_name`; a local folder or file counts as one."""
    if bool(dataset_args.datasets) == bool(script_args.dataset_name):
        raise ValueError("Give the data either as `datasets:` (a list, in the YAML) or as `dataset_name`.")
    if dataset_args.datasets:
        return trl.get_dataset(dataset_args)
    return load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )


def build_tiny(shape: str, rows, directory: Path) -> str:
    """A tokenizer trained on the data and a random model for it, saved like a downloaded one."""

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer((text for row in rows for text in texts(row)), SHAPES[shape]["vocab_size"])
        tokenizer.save_pretrained(folder)
        build_qwen2(tokenizer, **SHAPES[shape] | {"vocab_size": len(tokenizer)}).save_pretrained(folder)

    data = fingerprint(text for row in rows for text in texts(row))
    return built_once(directory, {"tiny_model": shape, **SHAPES[shape], "texts": data}, build)


def texts(row: dict) -> list[str]:
    """All text of a row, standard or conversational."""
    names = ("prompt", "chosen", "rejected", "completion", "messages", "text")
    fields = [row[name] for name in names if name in row]
    return [m["content"] for messages in fields for m in messages] if is_conversational(row) else fields


def model_to_train(script_args, training_args, model_args, rows) -> str:
    """The model that is named, or a tiny one built for the data."""
    model = model_args.model_name_or_path
    if not script_args.tiny_model:
        return model
    if model:
        raise ValueError("`tiny_model` builds a model and `model_name_or_path` loads one: give one of them.")
    return build_tiny(script_args.tiny_model, rows, Path(training_args.output_dir) / "initial_model")


def run(trainer_class: type, model: str, dataset, script_args, training_args, model_args) -> None:
    """Train and save a model, and say where it came out."""
    evaluates = training_args.eval_strategy != "no"
    checkpoint = checkpoint_to_resume(training_args.resume_from_checkpoint, training_args.output_dir)
    training_args.attn_implementation = model_args.attn_implementation
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision if model == model_args.model_name_or_path else None,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=trl.get_quantization_config(model_args),
        peft_config=trl.get_peft_config(model_args),
    )
    with saying_what_is_safe(training_args.output_dir):
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(training_args.output_dir)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        Console().print(summary_table(history))
        picture = plot_curves(history, Path(training_args.output_dir) / "curves.png")
        print(f"model and curves: {training_args.output_dir} ({picture.name})")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


def main(script_args, training_args, model_args, dataset_args) -> None:
    set_seed(training_args.seed)  # `test_split_size` draws the held-out rows
    dataset = load_pairs(script_args, dataset_args)
    model = model_to_train(script_args, training_args, model_args, dataset[script_args.dataset_train_split])
    run(DPOTrainer, model, dataset, script_args, training_args, model_args)


if __name__ == "__main__":
    parser = trl.TrlParser((RecipeArguments, DPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    with explained("recipes/dpo.py"):
        main(*parser.parse_args_and_config(fail_with_unknown_args=True))
