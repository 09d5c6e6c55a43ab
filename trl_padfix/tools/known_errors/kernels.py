"""Padding and attention kernels."""

from __future__ import annotations

from .entry import KnownError


__all__ = ["ERRORS"]

ERRORS = (
    # Padding
    KnownError(
        "padding_side",
        r"batched generation with padding_side='right'",
        "Nobody need be generating: transformers 4.37 to 4.52 raise this in the FlashAttention 2 path of Qwen2, "
        "Mistral, Phi-3 and others whenever a row of a batch ends in padding and the cache is on, which it is by "
        "default.",
        "`remove_padding(model)`, or `padding_free=True` in a trainer's configuration: no padding reaches the "
        "decoder, which runs without a cache. `attn_implementation='sdpa'` avoids the check and keeps the padding.",
        "https://github.com/QwenLM/Qwen3/issues/468 (transformers 4.37 to 4.52)",
    ),
    KnownError(
        "TRL's padding-free DPO is off",
        r"`?padding_free=True`? is temporarily unavailable",
        "TRL switched its own `padding_free` off for DPO in 0.29: the run goes on, with padding.",
        "Import `DPOConfig` and `DPOTrainer` from `trl_padfix`: `padding_free=True` is done there.",
        "trl 1.16, trainer/dpo_trainer.py",
    ),
    KnownError(
        "TRL's padding-free SFT takes no images",
        r"padding-free training is yet not supported for vision|Padding-free training is not yet supported for vision",
        "TRL's own `padding_free` flattens batches in its collator, which it cannot do with images.",
        "Set `padding_free=False`, or train through `trl_padfix`, which packs at the decoder's door; `trl-padfix "
        "doctor --model ID` says whether it packs this model.",
        "trl 1.16, trainer/sft_trainer.py",
    ),
    KnownError(
        "TRL's padding-free SFT takes no collator of yours",
        r"custom data collator is not supported when using padding-free",
        "TRL's own `padding_free` is a mode of its default collator.",
        "Import `SFTTrainer` from `trl_padfix`: any collator's padded batches are packed at the decoder's door.",
        "trl 1.16, trainer/sft_trainer.py",
    ),
    KnownError(
        "`max_length` is not enforced",
        r"`?padding_free=True`? without packing, `?max_length`? is not enforced",
        "TRL's own padding-free collator does not truncate, so TRL refuses `max_length` beside it.",
        "Import `SFTTrainer` from `trl_padfix`: rows are truncated as without `padding_free`. With TRL's own, set "
        "`packing=True`, or `max_length=None` on data that is truncated already.",
        "trl 1.16, trainer/sft_trainer.py",
    ),
    # FlashAttention and kernels
    KnownError(
        "FlashAttention is not installed",
        r"package flash_attn seems to be not installed|package for FlashAttention\d doesn't seem to be installed"
        r"|No module named '?flash_attn'?|flash-attn(-\d)? is not installed",
        "`attn_implementation` asks for a FlashAttention package that is not there.",
        "`pip install flash-attn --no-build-isolation`; or leave it out: with `attn_implementation='sdpa'` packed "
        "batches run on torch's own variable-length FlashAttention on a GPU. `trl-padfix doctor` lists what can run.",
        "transformers 5.23, modeling_utils.py",
    ),
    KnownError(
        "FlashAttention on a CPU",
        r"FlashAttention\d? is not available on CPU|Flash Attention [\d.]+ with a model not initialized on GPU",
        "FlashAttention runs on GPUs only, and the model is on the CPU.",
        "Move the model to a GPU, or use `attn_implementation='sdpa'`.",
        "transformers 5.23, modeling_utils.py",
    ),
    KnownError(
        "GPU too old for FlashAttention",
        r"FlashAttention only supports? Ampere GPUs or newer|requires compute capability >=",
        "FlashAttention 2 needs an NVIDIA GPU of compute capability 8.0 (A100, RTX 30) or newer; T4 and V100 are "
        "older. FlashAttention 4 needs 9.0.",
        "`attn_implementation='sdpa'`, and `fp16=True` in place of `bf16=True` on such a GPU.",
        "transformers 5.23, modeling_utils.py; https://github.com/Dao-AILab/flash-attention/issues/762",
    ),
    KnownError(
        "FlashAttention in float32",
        r"FlashAttention only supports? fp16(,| and) bf16|Flash Attention [\d.]+ only supports torch\.float16"
        r"|without specifying a (torch )?dtype|FlashAttention failed with torch\.float32",
        "FlashAttention computes in half precision, and the queries are float32. TRL loads models in float32.",
        "Train with `bf16=True` (or `fp16=True`), or load the model with `dtype='bfloat16'`; in float32 use "
        "`attn_implementation='sdpa'`.",
        "transformers 5.23, modeling_utils.py; https://github.com/unslothai/unsloth/issues/827",
    ),
    KnownError(
        "no kernel for this GPU",
        r"no kernel image is available for execution|device kernel image is invalid",
        "A package was built for other GPUs than this one: torch or flash-attn is older than the GPU, or was "
        "compiled elsewhere (`TORCH_CUDA_ARCH_LIST`).",
        "Install a torch for this GPU's CUDA, then `pip install flash-attn --no-build-isolation --no-cache-dir "
        "--force-reinstall --no-deps`; until then `attn_implementation='sdpa'`.",
        "https://github.com/hiyouga/LlamaFactory/issues/10132",
    ),
    KnownError(
        "undefined symbol",
        r"undefined symbol: _ZN?K?\d*(c10|2at|3c10|2at4|5torch)|flash_attn_\w*cuda[\w.-]*\.so: undefined symbol"
        r"|it was built for another torch",
        "A compiled package (mostly flash-attn) was built against another torch than the one that is installed.",
        "`pip install flash-attn --no-build-isolation --no-cache-dir --force-reinstall --no-deps`, or a wheel whose "
        "name carries this torch, CUDA, Python and C++ ABI.",
        "https://github.com/Dao-AILab/flash-attention/issues/723",
    ),
    KnownError(
        "flash-attn does not build",
        r"CUDA_HOME environment variable is not set|flash_attn was requested, but nvcc was not found"
        r"|Precompiled wheel not found\. Building from source",
        "There is no ready-made flash-attn for this torch and Python, and to compile it needs the CUDA toolkit.",
        "Install a wheel from the releases of Dao-AILab/flash-attention that names this torch, or the toolkit "
        "(`nvcc`); or do without: `attn_implementation='sdpa'`.",
        "torch 2.13, utils/cpp_extension.py; https://github.com/Dao-AILab/flash-attention/issues/509",
    ),
    KnownError(
        "flash-attn builds without torch",
        r"(flash.attn|get_requires_for_build_wheel).*No module named 'torch'"
        r"|No module named 'torch'.*(flash.attn|get_requires_for_build_wheel)",
        "flash-attn needs torch to be built, and pip builds in an environment without it.",
        "`pip install flash-attn --no-build-isolation`, after torch.",
        "https://github.com/Dao-AILab/flash-attention/issues/1920",
    ),
    KnownError(
        "Hub kernel without a build",
        r"Cannot find a build variant for this system|does not have (one of )?build:",
        "The kernel's repository on the Hub has no build for this torch, CUDA and platform.",
        "Name another version of it (`kernels-community/flash-attn2@v3`), another torch, or "
        "`attn_implementation='sdpa'`.",
        "the package `kernels`, when it loads a kernel of the Hub",
    ),
    KnownError(
        "Hub kernels are not installed",
        r"`?kernels`? is either not installed or uses an incompatible version|kernels is not installed",
        "`attn_implementation` names a kernel of the Hub, which the `kernels` package loads; each transformers takes "
        "a few versions of it only.",
        "`trl-padfix doctor` prints the exact `pip install` line.",
        "transformers 5.23, integrations/hub_kernels.py",
    ),
    KnownError(
        "attention that the model does not have",
        r"does not support (Flash Attention|an attention implementation through)",
        "transformers has no such attention for this model.",
        "`trl-padfix doctor --model ID` lists what it has; `attn_implementation='auto'` takes the fastest of it.",
        "transformers 5.23, modeling_utils.py",
    ),
)
