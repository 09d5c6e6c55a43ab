"""The errors that users paste: what tells them, what causes them, what to do. One table, for `doctor --explain`."""

from __future__ import annotations

import re
from dataclasses import dataclass


__all__ = ["KNOWN_ERRORS", "KnownError", "explain"]


@dataclass(frozen=True)
class KnownError:
    """
    An error and its explanation.

    Attributes:
        name (`str`): Short, for a heading.
        pattern (`str`): Regular expression that its text matches, whatever the case and the line breaks.
        cause (`str`): What brought it about.
        fix (`str`): What to do.
    """

    name: str
    pattern: str
    cause: str
    fix: str


def explain(text: str) -> list[KnownError]:
    """
    The known errors in a text, such as a traceback; none if it holds none.

    Args:
        text (`str`):
            What was printed.

    Example:

    ```python
    >>> from trl_padfix.tools.known_errors import explain

    >>> [error.name for error in explain("RuntimeError: FlashAttention only supports Ampere GPUs or newer.")]
    ['GPU too old for FlashAttention']

    ```
    """
    line = " ".join(text.split())
    return [error for error in KNOWN_ERRORS if re.search(error.pattern, line, re.IGNORECASE)]


KNOWN_ERRORS = (
    # Padding
    KnownError(
        "padding_side",
        r"batched generation with padding_side='right'",
        "Nobody need be generating: transformers 4.37 to 4.52 raise this in the FlashAttention 2 path of Qwen2, "
        "Mistral, Phi-3 and others whenever a row of a batch ends in padding and the cache is on, which it is by "
        "default.",
        "`remove_padding(model)`, or `padding_free=True` in a trainer's configuration: no padding reaches the "
        "decoder, which runs without a cache. `attn_implementation='sdpa'` avoids the check and keeps the padding.",
    ),
    KnownError(
        "TRL's padding-free DPO is off",
        r"`?padding_free=True`? is temporarily unavailable",
        "TRL switched its own `padding_free` off for DPO in 0.29: the run goes on, with padding.",
        "Import `DPOConfig` and `DPOTrainer` from `trl_padfix`: `padding_free=True` is done there.",
    ),
    KnownError(
        "TRL's padding-free SFT takes no images",
        r"padding-free training is yet not supported for vision|Padding-free training is not yet supported for vision",
        "TRL's own `padding_free` flattens batches in its collator, which it cannot do with images.",
        "Set `padding_free=False`, or train through `trl_padfix`, which packs at the decoder's door; "
        "`trl-padfix doctor --model ID` says whether it packs this model.",
    ),
    KnownError(
        "TRL's padding-free SFT takes no collator of yours",
        r"custom data collator is not supported when using padding-free",
        "TRL's own `padding_free` is a mode of its default collator.",
        "Import `SFTTrainer` from `trl_padfix`: any collator's padded batches are packed at the decoder's door.",
    ),
    KnownError(
        "`max_length` is not enforced",
        r"`?padding_free=True`? without packing, `?max_length`? is not enforced",
        "TRL's own padding-free collator does not truncate, so TRL refuses `max_length` beside it.",
        "Import `SFTTrainer` from `trl_padfix`: rows are truncated as without `padding_free`. With TRL's own, set "
        "`packing=True`, or `max_length=None` on data that is truncated already.",
    ),
    # FlashAttention and kernels
    KnownError(
        "FlashAttention is not installed",
        r"package flash_attn seems to be not installed|package for FlashAttention\d doesn't seem to be installed"
        r"|No module named '?flash_attn'?|flash-attn(-\d)? is not installed",
        "`attn_implementation` asks for a FlashAttention package that is not there.",
        "`pip install flash-attn --no-build-isolation`; or leave it out: with `attn_implementation='sdpa'` packed "
        "batches run on torch's own variable-length FlashAttention on a GPU. `trl-padfix doctor` lists what can run.",
    ),
    KnownError(
        "FlashAttention on a CPU",
        r"FlashAttention\d? is not available on CPU|Flash Attention [\d.]+ with a model not initialized on GPU",
        "FlashAttention runs on GPUs only, and the model is on the CPU.",
        "Move the model to a GPU, or use `attn_implementation='sdpa'`.",
    ),
    KnownError(
        "GPU too old for FlashAttention",
        r"FlashAttention only supports? Ampere GPUs or newer|requires compute capability >=",
        "FlashAttention 2 needs an NVIDIA GPU of compute capability 8.0 (A100, RTX 30) or newer; T4 and V100 are "
        "older. FlashAttention 4 needs 9.0.",
        "`attn_implementation='sdpa'`, and `fp16=True` in place of `bf16=True` on such a GPU.",
    ),
    KnownError(
        "FlashAttention in float32",
        r"FlashAttention only supports? fp16(,| and) bf16|Flash Attention [\d.]+ only supports torch\.float16"
        r"|without specifying a (torch )?dtype|FlashAttention failed with torch\.float32",
        "FlashAttention computes in half precision, and the queries are float32. TRL loads models in float32.",
        "Train with `bf16=True` (or `fp16=True`), or load the model with `dtype='bfloat16'`; in float32 use "
        "`attn_implementation='sdpa'`.",
    ),
    KnownError(
        "no kernel for this GPU",
        r"no kernel image is available for execution|device kernel image is invalid",
        "A package was built for other GPUs than this one: torch or flash-attn is older than the GPU, or was compiled "
        "elsewhere (`TORCH_CUDA_ARCH_LIST`).",
        "Install a torch for this GPU's CUDA, then `pip install flash-attn --no-build-isolation --no-cache-dir "
        "--force-reinstall --no-deps`; until then `attn_implementation='sdpa'`.",
    ),
    KnownError(
        "undefined symbol",
        r"undefined symbol: _ZN?K?\d*(c10|2at|3c10|2at4|5torch)|flash_attn_\w*cuda[\w.-]*\.so: undefined symbol"
        r"|it was built for another torch",
        "A compiled package (mostly flash-attn) was built against another torch than the one that is installed.",
        "`pip install flash-attn --no-build-isolation --no-cache-dir --force-reinstall --no-deps`, or a wheel whose "
        "name carries this torch, CUDA, Python and C++ ABI.",
    ),
    KnownError(
        "flash-attn does not build",
        r"CUDA_HOME environment variable is not set|flash_attn was requested, but nvcc was not found"
        r"|Precompiled wheel not found\. Building from source",
        "There is no ready-made flash-attn for this torch and Python, and to compile it needs the CUDA toolkit.",
        "Install a wheel from the releases of Dao-AILab/flash-attention that names this torch, or the toolkit "
        "(`nvcc`); or do without: `attn_implementation='sdpa'`.",
    ),
    KnownError(
        "flash-attn builds without torch",
        r"(flash.attn|get_requires_for_build_wheel).*No module named 'torch'"
        r"|No module named 'torch'.*(flash.attn|get_requires_for_build_wheel)",
        "flash-attn needs torch to be built, and pip builds in an environment without it.",
        "`pip install flash-attn --no-build-isolation`, after torch.",
    ),
    KnownError(
        "Hub kernel without a build",
        r"Cannot find a build variant for this system|does not have (one of )?build:",
        "The kernel's repository on the Hub has no build for this torch, CUDA and platform.",
        "Name another version of it (`kernels-community/flash-attn2@v3`), another torch, or "
        "`attn_implementation='sdpa'`.",
    ),
    KnownError(
        "Hub kernels are not installed",
        r"`?kernels`? is either not installed or uses an incompatible version|kernels is not installed",
        "`attn_implementation` names a kernel of the Hub, which the `kernels` package loads; each transformers takes "
        "a few versions of it only.",
        "`trl-padfix doctor` prints the exact `pip install` line.",
    ),
    KnownError(
        "attention that the model does not have",
        r"does not support (Flash Attention|an attention implementation through)",
        "transformers has no such attention for this model.",
        "`trl-padfix doctor --model ID` lists what it has; `attn_implementation='auto'` takes the fastest of it.",
    ),
    # Figures
    KnownError(
        "the first loss of DPO is not 0.693",
        r"(not|instead of|should be|expected|other than|differs? from)\W+(about |around |ln ?\(?2\)? ?=? ?)?0?\.69"
        r"|(first|initial|starting)\b.{0,30}\bloss\b.{0,60}(0\.69|ln ?\(?2|log ?\(?2)"
        r"|\{'loss': '?(?!0\.69)\d[^}]*'rewards/margins'[^}]*'epoch': '?0(\.0+)?'?[,}]",
        "At the first step policy and reference are one model, so the loss is ln 2 = 0.693. Another value means that "
        "they differ: another checkpoint, another precision or attention, dropout left on, an adapter that does not "
        "start at zero, or batches that the two see differently (padding, missing position ids).",
        "Leave `ref_model` out, so that it is loaded as the policy is; keep `disable_dropout=True`; compare in "
        "float32. `padding_free=True` takes padding out as a cause, and its parity check says so if the model itself "
        "differs. Losses other than `sigmoid`, and `label_smoothing`, start elsewhere.",
    ),
    KnownError(
        "the loss stays at 0.693",
        r"'loss': '?0\.693\d*'?, 'grad_norm': '?0(\.0)?'?,",
        "The gradient is zero: nothing that is trained takes part in the loss, or its gradient was cut off.",
        "With adapters, check `model.print_trainable_parameters()`; with gradient checkpointing, "
        "`gradient_checkpointing_kwargs={'use_reentrant': False}`; drop pairs whose completions are equal.",
    ),
    KnownError(
        "NaN",
        r"(logits|loss|grad_norm|logps|rewards?)\W{0,6}(/\w+\W{0,4})?(is|are|become|became|=|:)? ?'?nan\b"
        r"|contains either `?inf`?, `?nan`? or element < 0|nan (logits|loss|in logits)",
        "Mostly float16 that overflows, a row of a padded batch that is all padding (its softmax has nothing to sum "
        "over), or a learning rate that blew the weights up.",
        "`bf16=True` in place of `fp16=True`; drop empty rows; a smaller learning rate, `max_grad_norm=1`. With "
        "`padding_free=True` there is no padding to attend from.",
    ),
    KnownError(
        "float16 weights with a gradient scaler",
        r"Attempting to unscale FP16 gradients",
        "`fp16=True` scales gradients of float32 weights, and these weights are float16 themselves.",
        "Load the model in float32 (TRL's default) and keep `fp16=True`, or load it in bfloat16 with `bf16=True`.",
    ),
    KnownError(
        "bf16 is not there",
        r"Your setup doesn't support bf16|bf16.*requires? .*Ampere",
        "`bf16=True` is TRL's default, and this machine has no GPU, or one without bfloat16.",
        "`bf16=False` with `fp16=True` on an older GPU; on a CPU `use_cpu=True`.",
    ),
    # This package
    KnownError(
        "the packed forward differs",
        r"ParityError|parity FAILED",
        "On the first batch the packed forward of the model was compared with the padded one, and their scores "
        "differ: some layer mixes tokens in a way that no rule knows.",
        "`prefix_sharing=False`, and if that differs too, `padding_free=False`. Please report the model and the "
        "figures. `parity_check=False` trains on regardless.",
    ),
    KnownError(
        "the layout did not arrive",
        r"did not receive the layout of the packed batch",
        "The decoder does not hand keyword arguments down to its attention, so that cannot be told where rows begin.",
        "`padding_free=False` for this model; a newer transformers may hand them down.",
    ),
    KnownError(
        "padding cannot be removed",
        r"Padding cannot be removed from|padding cannot be removed with it",
        "The message names the layer or setting that mixes the tokens of a packed batch, or an attention that cannot "
        "be told its rows. It is refused, because the numbers would be others.",
        "`padding_free=False`, or what the message names. `trl-padfix doctor --model ID` says it before a run.",
    ),
    KnownError(
        "prefix sharing without packing",
        r"`?prefix_sharing=True`? needs `?padding_free=True`?",
        "Prefixes are shared in the packed row, and without `padding_free` there is none.",
        "Set both, or neither.",
    ),
    KnownError(
        "prefix sharing and more than ids",
        r"`?prefix_sharing=True`? compares token ids",
        "Two rows are computed once as far as their ids and positions agree, and this call carries something else for "
        "each token, or no ids.",
        "`prefix_sharing=False`: padding is removed all the same.",
    ),
    # Memory and processes
    KnownError(
        "out of memory",
        r"CUDA out of memory|OutOfMemoryError",
        "Often not the decoder but the LM head: logits of `rows x length x vocabulary` in float32, twice in DPO.",
        "`padding_free=True, prefix_sharing=True` computes no padding and no prompt twice; fewer rows per device with "
        "more `gradient_accumulation_steps`; `gradient_checkpointing=True`; `precompute_ref_log_probs=True`; a fused "
        "head (`use_liger_kernel=True`, or TRL 1.10 and later).",
    ),
    KnownError(
        "NCCL timeout",
        r"Watchdog caught collective operation timeout|NCCL watchdog|ncclRemoteError|ProcessGroupNCCL.*timeout",
        "One process waited for the others in vain: one of them failed or ran out of data earlier (look for the first "
        "error of any rank), generates or tokenizes alone, or has far longer rows than the rest.",
        "Fix the first error in the log; `dataset_num_proc` or a prepared dataset for slow tokenization; "
        "`ddp_timeout=7200` where the wait is meant. `TORCH_NCCL_ASYNC_ERROR_HANDLING` and `NCCL_DEBUG=INFO` name it.",
    ),
    KnownError(
        "DataParallel",
        r"nn\.DataParallel|in replica \d+ on device|parameters and buffers on device cuda:\d",
        "Several GPUs are visible to one process, so `Trainer` wraps the model in `nn.DataParallel`, whose copies "
        "share one decoder.",
        "`accelerate launch`, or one GPU with `CUDA_VISIBLE_DEVICES=0`.",
    ),
    KnownError(
        "parameters without a gradient in DDP",
        r"Expected to have finished reduction in the prior iteration",
        "Some parameters took no part in the loss of a step, and DDP waits for their gradients.",
        "Freeze what is not trained; else `ddp_find_unused_parameters=True`.",
    ),
    KnownError(
        "several devices",
        r"Expected all tensors to be on the same device",
        "The model is spread over devices (`device_map='auto'`), and a batch or a second model is on another one.",
        "`device_map=None` with `accelerate launch`; FSDP where one GPU is too small.",
    ),
    # Checkpointing and compilation
    KnownError(
        "cache and gradient checkpointing",
        r"`?use_cache=True`? is incompatible with gradient checkpointing",
        "A warning: the cache is of no use in training, and transformers switches it off.",
        "Nothing; `model.config.use_cache = False` silences it. Packed forwards run without a cache anyway.",
    ),
    KnownError(
        "checkpointing without gradients",
        r"None of the inputs have requires_grad=True",
        "Reentrant checkpointing sees no input with a gradient, as with LoRA on frozen embeddings: layers get none.",
        "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or `model.enable_input_require_grads()`.",
    ),
    KnownError(
        "checkpointing recomputed something else",
        r"CheckpointError|Recomputed values for the following tensors have different metadata"
        r"|different number of tensors was saved during the original forward and recomputation",
        "The recomputation in backward took another path than the forward: a model whose mode, attention or handles "
        "were changed in between.",
        "Change them between steps only; backward of a packed forward belongs to the layout that it ran with.",
    ),
    KnownError(
        "recompilation",
        r"torch\._dynamo hit config\.(recompile_limit|cache_size_limit|accumulated_\w+)|recompile_limit reached",
        "`torch.compile` makes a new graph for each new shape, and batches have a new length each time.",
        "`padding_free=True` with `torch_compile=True`: layers are compiled one by one, for all lengths. Else "
        "`pad_to_multiple_of=64`, or `torch.compile(dynamic=True)`.",
    ),
    # Tokens
    KnownError(
        "an id beyond the vocabulary",
        r"index out of range in self|srcIndex < srcSelectDimSize|the embedding of \w+ has \d+ rows",
        "A token id is as large as the embedding or larger: another model's tokenizer, or tokens that were added "
        "without resizing.",
        "Use the model's own tokenizer, or `model.resize_token_embeddings(len(tokenizer))`.",
    ),
    KnownError(
        "device-side assert",
        r"device-side assert triggered",
        "A kernel checked its input and stopped; mostly an id beyond the vocabulary, or a label that is not -100 and "
        "not in it. The line of the traceback is not where it happened.",
        "Run one step with `use_cpu=True`, which names it, or with `CUDA_LAUNCH_BLOCKING=1`.",
    ),
    KnownError(
        "no pad token",
        r"does not have a padding token|no padding token is defined|neither a pad token nor an EOS token",
        "Batches are padded with the tokenizer's pad token, and it has none.",
        "`tokenizer.pad_token = tokenizer.eos_token`, and for a sequence classifier also "
        "`model.config.pad_token_id = tokenizer.pad_token_id`.",
    ),
    KnownError(
        "no chat template",
        r"tokenizer\.chat_template is not set|does not have a chat template",
        "The data is conversations, and a base model's tokenizer has no template to write them as text with.",
        "Use the model's instruct variant, set `chat_template_path`, or `trl.clone_chat_template`.",
    ),
    KnownError(
        "rows longer than the model",
        r"sequence length is longer than the specified maximum sequence length",
        "A warning while tokenizing: a row is longer than the model was made for. What is trained on is cut to "
        "`max_length` later.",
        "Nothing, if `max_length` is below it; see how many rows that cuts with `trl-padfix stats`.",
    ),
    KnownError(
        "tokenizers and forked processes",
        r"current process just got forked, after parallelism has already been used",
        "A warning: data loader workers were forked after a fast tokenizer used its threads, so these are switched "
        "off.",
        "`TOKENIZERS_PARALLELISM=false` in the environment.",
    ),
)
