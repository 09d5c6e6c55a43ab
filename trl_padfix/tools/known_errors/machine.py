"""Memory, GPUs and processes."""

from __future__ import annotations

from .entry import KnownError


__all__ = ["ERRORS"]

ERRORS = (
    # Memory and processes
    KnownError(
        "out of memory",
        r"CUDA out of memory|OutOfMemoryError",
        "Often not the decoder but the LM head: logits of `rows x length x vocabulary` in float32, twice in DPO.",
        "`padding_free=True, prefix_sharing=True` computes no padding and no prompt twice; `max_tokens_per_batch` "
        "bounds the tokens of a forward, whatever the rows; fewer rows per device with more "
        "`gradient_accumulation_steps`; `gradient_checkpointing=True`; `precompute_ref_log_probs=True`; a fused head "
        "(`use_liger_kernel=True`, or TRL 1.10 and later).",
        "torch built for CUDA: https://github.com/hiyouga/LlamaFactory/issues/6800",
    ),
    KnownError(
        "NCCL timeout",
        r"Watchdog caught collective operation timeout|NCCL watchdog|ncclRemoteError|ProcessGroupNCCL.*timeout",
        "One process waited for the others in vain: one of them failed or ran out of data earlier (look for the "
        "first error of any rank), generates or tokenizes alone, or has far longer rows than the rest.",
        "Fix the first error in the log; `dataset_num_proc` or a prepared dataset for slow tokenization; "
        "`ddp_timeout=7200` where the wait is meant. `TORCH_NCCL_ASYNC_ERROR_HANDLING` and `NCCL_DEBUG=INFO` name it.",
        "torch built for CUDA: https://github.com/hiyouga/LlamaFactory/issues/7396",
    ),
    KnownError(
        "DataParallel",
        r"nn\.DataParallel|in replica \d+ on device|parameters and buffers on device cuda:\d",
        "Several GPUs are visible to one process, so `Trainer` wraps the model in `nn.DataParallel`, whose copies "
        "share one decoder.",
        "`accelerate launch`, or one GPU with `CUDA_VISIBLE_DEVICES=0`.",
        "torch 2.13, nn/parallel/data_parallel.py; trl_padfix, trainers/base.py",
    ),
    KnownError(
        "parameters without a gradient in DDP",
        r"Expected to have finished reduction in the prior iteration",
        "Some parameters took no part in the loss of a step, and DDP waits for their gradients.",
        "Freeze what is not trained; else `ddp_find_unused_parameters=True`.",
        "torch 2.13, lib/libtorch_cpu.so",
    ),
    KnownError(
        "several devices",
        r"Expected all tensors to be on the same device",
        "The model is spread over devices (`device_map='auto'`), and a batch or a second model is on another one.",
        "`device_map=None` with `accelerate launch`; FSDP where one GPU is too small.",
        "torch 2.13, _meta_registrations.py",
    ),
    # The GPU and its driver
    KnownError(
        "no GPU is seen",
        r"No CUDA GPUs are available|Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system",
        "torch was built for CPUs, there is no driver, or `CUDA_VISIBLE_DEVICES` hides the GPUs.",
        "`trl-padfix doctor --json -` shows driver, CUDA and GPUs; install a torch built for CUDA; `use_cpu=True` to "
        "train on the CPU.",
        "torch 2.13, cuda/__init__.py; torch 2.13, lib/libtorch_cpu.so",
    ),
    KnownError(
        "driver too old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        "torch was built for a newer CUDA than the driver knows.",
        "A newer driver, or a torch for an older CUDA.",
        "torch built for CUDA: https://github.com/lllyasviel/Fooocus/issues/1313",
    ),
    KnownError(
        "cuBLAS fails",
        r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED)",
        "Mostly memory: cuBLAS found none for its workspace. Also an id beyond the vocabulary, seen late.",
        "What helps against out of memory; one step with `CUDA_LAUNCH_BLOCKING=1` shows an earlier error.",
        "torch built for CUDA: https://github.com/QwenLM/Qwen/issues/120",
    ),
    # Processes
    KnownError(
        "killed by the system",
        r"exitcode: -9\b|\(Signal 9|SIGKILL",
        "The system killed a process, nearly always because the memory of the host (not of the GPU) was used up.",
        "Fewer `dataloader_num_workers` and `dataset_num_proc`; streaming; weights loaded once "
        "(`fsdp_cpu_ram_efficient_loading`).",
        "torch's launcher: https://github.com/fidelity/stoke/issues/31",
    ),
    KnownError(
        "port in use",
        r"EADDRINUSE|Address already in use",
        "Another training on this machine uses the port on which processes meet.",
        "`--main_process_port 0` (or another port) for `accelerate launch` and the commands of `trl-padfix`.",
        "torch 2.13, lib/libtorch_cpu.so",
    ),
    KnownError(
        "too little shared memory",
        r"insufficient shared memory|unable to open shared memory object|Bus error",
        "Data loader workers hand batches over in shared memory, and a container has 64 MiB of it by default.",
        "`docker run --ipc=host` or `--shm-size=8g`; or `dataloader_num_workers=0`.",
        "torch 2.13, lib/libtorch_python.so; https://github.com/pytorch/pytorch/issues/5040",
    ),
    KnownError(
        "weights that ZeRO-3 has taken away",
        r"'weight' must be 2-D|size of tensor .*torch\.Size\(\[0\]\)",
        "Under ZeRO-3 a weight is empty outside the forward of its module, and it was used there.",
        "Use the module's forward, or `with deepspeed.zero.GatheredParameters(...)`; load models inside the trainer.",
        "torch 2.13, lib/libtorch_cpu.so; https://github.com/huggingface/trl/issues/600",
    ),
)
