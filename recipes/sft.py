"""
SFT without padding, on one process or many.

A tiny model built on the spot, offline, on CPU, in under a minute of training:

    accelerate launch --cpu recipes/sft.py --config recipes/sft_tiny.yaml

A real one (any flag of TRL's `trl sft`, and ours):

    accelerate launch recipes/sft.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B \
        --dataset_name trl-lib/Capybara \
        --padding_free true --per_device_train_batch_size 16 --learning_rate 2e-5 --output_dir runs/qwen-sft

Preference pairs are taken too: what is chosen is what is learned.
"""

import trl
from datasets import Dataset
from dpo import RecipeArguments, load_pairs, model_to_train, run
from transformers import set_seed
from trl.data_utils import is_conversational

from trl_padfix import SFTConfig, SFTTrainer
from trl_padfix.cli.mistakes import explained


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
    model = model_to_train(script_args, training_args, model_args, dataset[script_args.dataset_train_split])
    run(SFTTrainer, model, dataset, script_args, training_args, model_args)


if __name__ == "__main__":
    parser = trl.TrlParser((RecipeArguments, SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    with explained("recipes/sft.py"):
        main(*parser.parse_args_and_config(fail_with_unknown_args=True))
