"""
DPO without padding, on one process or many: the script of `trl-padfix dpo`, for `accelerate launch`.

Train a tiny random model offline, on a CPU, in under a minute:

    python recipes/dpo.py --config recipes/dpo_tiny.yaml --use_cpu true

A real one (any flag of TRL's `trl dpo`, and ours):

    accelerate launch --config_file recipes/accelerate/single_gpu.yaml recipes/dpo.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized \
        --padding_free true --prefix_sharing auto \
        --per_device_train_batch_size 8 --learning_rate 5e-7 --output_dir runs/qwen-dpo
"""

import sys

from trl_padfix.cli.launch import run


if __name__ == "__main__":
    run("dpo", sys.argv[1:])
