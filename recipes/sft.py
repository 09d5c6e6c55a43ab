"""
SFT without padding, on one process or many: the script of `trl-padfix sft`, for `accelerate launch`.

Train a tiny random model offline, on a CPU, in under a minute:

    python recipes/sft.py --config recipes/sft_tiny.yaml --use_cpu true

A real one (any flag of TRL's `trl sft`, and ours):

    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/sft.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B \
        --dataset_name trl-lib/Capybara \
        --padding_free true --per_device_train_batch_size 16 --learning_rate 2e-5 --output_dir runs/qwen-sft
"""

import sys

from trl_padfix.cli.launch import run


if __name__ == "__main__":
    run("sft", sys.argv[1:])
