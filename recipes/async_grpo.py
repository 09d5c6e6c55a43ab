"""
Asynchronous GRPO without padding: the script of `trl-padfix async-grpo`, for `accelerate launch`.

A tiny model built on the spot, which answers on a server of its own, offline, on CPU, in about a minute of training:

    accelerate launch --cpu recipes/async_grpo.py --config recipes/async_grpo_tiny.yaml

A real one, beside `vllm serve Qwen/Qwen3-0.6B` (any flag of TRL's configuration, and ours):

    accelerate launch recipes/async_grpo.py \
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward \
        --padding_free true --prefix_sharing true --output_dir runs/qwen-async-grpo
"""

import sys

from trl_padfix.cli.launch import run


if __name__ == "__main__":  # the rollout worker's process imports this file, too
    run("async-grpo", sys.argv[1:])
