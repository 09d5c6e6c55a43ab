#!/bin/bash
# DPO of Qwen2.5-7B-Instruct on two nodes of 8 GPUs: 128 pairs a step (64: `--per_device_train_batch_size 4`).
# Submit it in a clone, and set these three lines and `GPUS` for your cluster:
#   sbatch recipes/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8

export GPUS=8 HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'accelerate launch --config_file recipes/accelerate/fsdp2.yaml \
    --num_machines $SLURM_NNODES --num_processes $((GPUS * SLURM_NNODES)) --machine_rank $SLURM_NODEID \
    --main_process_ip $HEAD --main_process_port 29500 --rdzv_backend static \
    recipes/dpo.py --config recipes/dpo_qwen2.5_7b_fsdp2.yaml'
