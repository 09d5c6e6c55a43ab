"""
SFT without padding, on one process or many.

A tiny model built on the spot, offline, on CPU, in under a minute of training:

    accelerate launch --cpu recipes/sft.py --config recipes/sft_tiny.yaml

A real one (any flag of TRL's `trl sft`, and ours):

    accelerate launch recipes/sft.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B --dtype bfloat16 \
        --dataset_name trl-lib/Capybara \
        --padding_free true --per_device_train_batch_size 16 --learning_rate 2e-5 --output_dir runs/qwen-sft

Preference pairs are taken too: what is chosen is what is learned.
"""

from pathlib import Path

import trl
from datasets import Dataset
from dpo import RecipeArguments, build_tiny, load_pairs
from rich.console import Console
from transformers import set_seed
from trl.data_utils import is_conversational

from trl_padfix import SFTConfig, SFTTrainer
from trl_padfix.report import plot_curves, summary_table


def to_dialogues(dataset: Dataset) -> Dataset:
    """The chosen side of preference pairs, as prompts with completions, chats or texts; other data as it is."""
    columns = set(dataset.column_names or next(iter(dataset)))
    if "chosen" not in columns:
        return dataset
    alone = "messages" if is_conversational(next(iter(dataset))) else "text"
    name = "completion" if "prompt" in columns else alone
    return dataset.rename_column("chosen", name).select_columns([name, *columns & {"prompt"}])


def main(script_args, training_args, model_args, dataset_args) -> None:
    set_seed(training_args.seed)  # `test_split_size` draws the held-out rows
    dataset = {name: to_dialogues(rows) for name, rows in load_pairs(script_args, dataset_args).items()}
    train = dataset[script_args.dataset_train_split]
    evaluates = training_args.eval_strategy != "no"
    model = model_args.model_name_or_path
    if script_args.tiny_model:
        if model:
            raise ValueError("`tiny_model` builds a model and `model_name_or_path` loads one: give one of them.")
        model = build_tiny(script_args.tiny_model, train, Path(training_args.output_dir) / "initial_model")
    training_args.model_init_kwargs = {
        "revision": None if script_args.tiny_model else model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=trl.get_quantization_config(model_args),
        peft_config=trl.get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        Console().print(summary_table(history))
        picture = plot_curves(history, Path(training_args.output_dir) / "curves.png")
        print(f"model and curves: {training_args.output_dir} ({picture.name})")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = trl.TrlParser((RecipeArguments, SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    main(*parser.parse_args_and_config(fail_with_unknown_args=True))
