"""The errors that users paste: in the words in which they were printed, or raised on the spot."""

from collections.abc import Callable

import pytest
import torch
from kit.models import CONFIGS, build
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import trl_padfix
from trl_padfix import ParityReport, remove_padding
from trl_padfix.core.attention.attention import packed_attention
from trl_padfix.tools.known_errors import KNOWN_ERRORS, explain
from trl_padfix.tools.tiny import train_tokenizer


needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="raises what a machine without a GPU raises")

PRINTED = {
    # transformers 4.52.4
    "padding_side": [
        "ValueError: You are attempting to perform batched generation with padding_side='right' this may lead to "
        "unexpected behaviour for Flash Attention version of Qwen2. Make sure to  call `tokenizer.padding_side  = "
        "'left'` before tokenizing the input. "
    ],
    # TRL 1.16
    "TRL's padding-free DPO is off": [
        "`padding_free=True` is temporarily unavailable after a refactor and is currently disabled. Falling back to "
        "standard padding (`padding_free=False`). This feature is planned to return in a future update; for now, "
        "please set `padding_free=False` explicitly."
    ],
    "TRL's padding-free SFT takes no images": [
        "ValueError: Padding-free training is yet not supported for vision datasets. Please set `padding_free=False` "
        "in the `SFTConfig`."
    ],
    "TRL's padding-free SFT takes no collator of yours": [
        "ValueError: Passing a custom data collator is not supported when using padding-free."
    ],
    "`max_length` is not enforced": [
        "ValueError: When `padding_free=True` without packing, `max_length` is not enforced. Either enable packing "
        "(e.g., `packing=True, packing_strategy='bfd'`), provide already truncated inputs, or set `max_length=None`."
    ],
    # transformers 4.52.4 and 5.23
    "FlashAttention is not installed": [
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the "
        "package flash_attn seems to be not installed. Please refer to the documentation of https://huggingface.co/"
        "docs/transformers/perf_infer_gpu_one#flashattention-2 to install Flash Attention 2.",
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the "
        "package for FlashAttention2 doesn't seem to be installed.",
        "ModuleNotFoundError: No module named 'flash_attn'",
    ],
    "FlashAttention on a CPU": [
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: "
        "FlashAttention2 is not available on CPU. Please make sure you are on any of the supported devices: ("
        "'cuda',)",
        "ValueError: You are attempting to use Flash Attention 2.0 with a model not initialized on GPU and with no "
        "GPU available. This is not supported yet.",
        "You are attempting to use Flash Attention 2 with a model not initialized on GPU. Please make sure to have "
        "access to a GPU",
    ],
    # Dao-AILab/flash-attention issues 762 and 1540
    "GPU too old for FlashAttention": [
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.\nException raised from mha_fwd at "
        "...csrc\\flash_attn\\flash_api.cpp:370 (most recent call first):",
        "ImportError: FlashAttention4 requires compute capability >= 9, but found (8, 0) with compute capability 8.x",
    ],
    # unslothai/unsloth issue 827; transformers
    "FlashAttention in float32": [
        "RuntimeError: FlashAttention only support fp16 and bf16 data type",
        "Flash Attention 2 only supports torch.float16 and torch.bfloat16 dtypes, but the current dype in "
        "Qwen2ForCausalLM is torch.float32. You should run training or inference using Automatic Mixed-Precision",
        "You are attempting to use Flash Attention 2.0 without specifying a torch dtype. This might lead to "
        "unexpected behaviour",
    ],
    # tdrussell/diffusion-pipe issue 178, hiyouga/LlamaFactory issue 10132, Dao-AILab/flash-attention issue 1749
    "no kernel for this GPU": [
        "[rank0]: RuntimeError: CUDA error: no kernel image is available for execution on the device\n[rank0]: "
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA error (/build/source/flash-attn/flash_fwd_launch_template.h:191): no kernel image is available for "
        "execution on the device",
        "RuntimeError: CUDA error: device kernel image is invalid",
    ],
    # Dao-AILab/flash-attention issues 723, 940 and 966
    "undefined symbol": [
        "ImportError: /usr/local/lib/python3.8/dist-packages/flash_attn_2_cuda.cpython-38-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c104cuda9SetDeviceEi",
        "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7"
        "__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "undefined symbol: _ZN2at4_ops9_pad_enum4callERKNS_6TensorEN3c108ArrayRefINS5_6SymIntEEElNS5_8optionalIdEE",
    ],
    "flash-attn does not build": [
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
        "Precompiled wheel not found. Building from source...",
    ],
    # Dao-AILab/flash-attention issues 1920 and 1421
    "flash-attn builds without torch": [
        "Collecting flash_attn\n  Using cached flash_attn-2.8.3.tar.gz (8.4 MB)\n  Getting requirements to build "
        "wheel ... error\n  in get_requires_for_build_wheel\n  ModuleNotFoundError: No module named 'torch'"
    ],
    # huggingface/kernels-community issue 1082, huggingface/kernels issue 179
    "Hub kernel without a build": [
        "Cannot find a build variant for this system in kernels-community/flash-attn2\n    torch212-cxx11-cu126-x86_64"
        "-linux: Torch version (2.12) does not match environment Torch version (2.13)",
        "FileNotFoundError: Kernel at path `/root/.cache/huggingface/hub/models--kernels-community--flash-attn2/"
        "snapshots/4c6b6ddcdbc5` does not have build: torch28-cxx11-cu128-x86_64-linux",
    ],
    "Hub kernels are not installed": [
        "ImportError: `kernels` is either not installed or uses an incompatible version. Please install a compatible "
        "version (0.18.2 <= version < 0.19.0), e.g. `pip install kernels==0.18.2`"
    ],
    "attention that the model does not have": [
        "ValueError: BloomForCausalLM does not support Flash Attention 2 yet. Please request to add support where the "
        "model is hosted",
        "ValueError: GptOssForCausalLM does not support an attention implementation through "
        "torch.nn.functional.scaled_dot_product_attention yet.",
    ],
    # huggingface/trl issue 1236, and how it is asked
    "the first loss of DPO is not 0.693": [
        "{'loss': 0.3271, 'learning_rate': 2.8571428571428573e-06, 'rewards/chosen': 9.76550579071045, "
        "'rewards/rejected': 5.694394111633301, 'rewards/accuracies': 1.0, 'rewards/margins': 4.071112155914307, "
        "'logps/rejected': -222.74356079101562, 'logps/chosen': -379.7199401855469, 'epoch': 0.0}",
        "first DPO loss not 0.693",
        "Why is the initial loss 1.2 and not ln(2)?",
    ],
    # huggingface/trl issue 4023
    "the loss stays at 0.693": [
        "{'loss': 0.6934, 'grad_norm': 0.0, 'learning_rate': 9.5e-05, 'rewards/chosen': 0.0, 'rewards/rejected': 0.0, "
        "'rewards/accuracies': 0.0, 'rewards/margins': 0.0, 'epoch': 0.0}"
    ],
    # huggingface/trl issues 2435 and 1473
    "NaN": [
        "NaN logits",
        "{'loss': 0.6931, 'grad_norm': 2.299546957015991, 'rewards/margins': 0.00011704633652698249, 'logits/chosen': "
        "nan, 'logits/rejected': nan, 'epoch': 0.03}",
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 2.5000000000000002e-08, 'rewards/chosen': nan}",
    ],
    "float16 weights with a gradient scaler": ["ValueError: Attempting to unscale FP16 gradients."],
    "bf16 is not there": [
        "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train the model "
        "on CPU."
    ],
    # modelscope/ms-swift issue 2044
    "out of memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.36 GiB. GPU 1 has a total capacity of 47.50 "
        "GiB of which 1.52 GiB is free."
    ],
    # hiyouga/LlamaFactory issue 7396, pytorch/pytorch issue 118369
    "NCCL timeout": [
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) "
        "ran for 600060 milliseconds before timing out.",
        "NCCL watchdog thread terminated with exception",
    ],
    # ours, torch's
    "DataParallel": [
        "PaddingRemovalError: `nn.DataParallel` on 2 GPUs runs copies of the model that share one decoder.",
        "RuntimeError: module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of "
        "them on device: cuda:1",
    ],
    "parameters without a gradient in DDP": [
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."
    ],
    "several devices": [
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:1 "
        "and cuda:0!"
    ],
    # transformers, torch
    "cache and gradient checkpointing": [
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
    ],
    "checkpointing without gradients": [
        "UserWarning: None of the inputs have requires_grad=True. Gradients will be None"
    ],
    "checkpointing recomputed something else": [
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was saved "
        "during the original forward and recomputation.\nNumber of tensors saved during forward: 42"
    ],
    # microsoft/dion issue 23
    "recompilation": [
        "W0110 12:27:06.332000 158 torch/_dynamo/convert_frame.py:1551] [2/8] torch._dynamo hit "
        "config.recompile_limit (8)",
        "torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with fullgraph=True.",
    ],
    # huggingface/trl issue 2996
    "an id beyond the vocabulary": [
        "../aten/src/ATen/native/cuda/Indexing.cu:1308: indexSelectLargeIndex: block: [56,0,0], thread: [30,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed."
    ],
    "device-side assert": ["RuntimeError: CUDA error: device-side assert triggered"],
    "no pad token": ["ValueError: Cannot handle batch sizes > 1 if no padding token is defined."],
    "no chat template": [
        "ValueError: Cannot use apply_chat_template because this processor does not have a chat template."
    ],
    "rows longer than the model": [
        "Token indices sequence length is longer than the specified maximum sequence length for this model (5000 > "
        "2048). Running this sequence through the model will result in indexing errors"
    ],
    "the argument `tokenizer`": ["TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'"],
    "a field that TRL does not have any more": [
        "TypeError: DPOConfig.__init__() got an unexpected keyword argument 'max_prompt_length'"
    ],
    "generation without a mask": [
        "The attention mask and the pad token id were not set. As a consequence, you may observe unexpected behavior. "
        "Please pass your input's `attention_mask` to obtain reliable results."
    ],
    "rows of different lengths in one tensor": [
        "ValueError: Unable to create tensor, you should probably activate truncation and/or padding with "
        "'padding=True' 'truncation=True' to have batched tensors with the same length."
    ],
    "images and their tokens do not match": [
        "ValueError: Image features and image tokens do not match, tokens: 1020, features: 1024"
    ],
    "generations that do not divide the batch": [
        "ValueError: generation_batch_size (6) must be divisible by num_generations (4).",
    ],
    "prefix caching": [
        "Hybrid or mamba-based model detected: disabling prefix caching since it is not yet supported."
    ],
    "nothing requires a gradient": [
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    ],
    "weights of two precisions under FSDP": [
        "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
        "ValueError: Must flatten tensors with the same `dtype` but got torch.bfloat16 and torch.float32",
    ],
    "two precisions in one product": [
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"
    ],
    "quantized weights cannot be trained": [
        "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on "
        "top of the quantized model to correctly perform fine-tuning."
    ],
    "adapters without their modules": [
        "ValueError: Target modules {'query_key_value'} not found in the base model. Please check the target modules"
    ],
    "tensors that share memory": [
        "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential "
        "differences "
        "when loading them again: [{'lm_head.weight', 'model.embed_tokens.weight'}]."
    ],
    "another size of the embeddings": [
        "RuntimeError: size mismatch for base_model.model.model.embed_tokens.weight: copying a param with shape "
        "torch.Size([32001, 4096]) from checkpoint, the shape in current model is torch.Size([32000, 4096]).",
        "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation config.",
    ],
    "no checkpoint to resume from": ["ValueError: No valid checkpoint found in output directory (runs/dpo)"],
    "a weight file that is cut short": [
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not "
        "fully covered"
    ],
    "pickled weights are refused": [
        "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we "
        "now require "
        "users to upgrade torch to at least v2.6 in order to use the function."
    ],
    "disk full": ["OSError: [Errno 28] No space left on device"],
    "a gated or private repository": [
        "OSError: You are trying to access a gated repo. Make sure to have access to it: 401 Client Error. "
        "Cannot access "
        "gated repo"
    ],
    "offline, and not in the cache": [
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache "
        "and outgoing "
        "traffic has been disabled."
    ],
    "no such repository": [
        "OSError: Qwen/Qwen9 is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co'"
    ],
    "no GPU is seen": [
        "RuntimeError: No CUDA GPUs are available",
        "AssertionError: Torch not compiled with CUDA enabled",
    ],
    "driver too old": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your "
        "GPU driver"
    ],
    "cuBLAS fails": ["RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"],
    "killed by the system": ["  exitcode: -9 (pid: 4321)", "Signal 9 (SIGKILL) received by PID 4321"],
    "port in use": [
        "RuntimeError: The server socket has failed to listen on any local network address. EADDRINUSE, "
        "message: address "
        "already in use"
    ],
    "too little shared memory": [
        "RuntimeError: DataLoader worker (pid 4321) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
    ],
    "weights that ZeRO-3 has taken away": ["RuntimeError: 'weight' must be 2-D"],
    # NVIDIA/garak issue 750
    "tokenizers and forked processes": [
        "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. "
        "Disabling parallelism to avoid deadlocks..."
    ],
}  # fmt: skip


def load(name: str, implementation: str):
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)


def tokenizer(**settings) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["a few words"], 300)
    return PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **settings)


def differing_report() -> ParityReport:
    return ParityReport(1.0, 2.0, 1e-4, 1e-3, 9, 20, 10, torch.float32, "sdpa", False)


def attend_without_layout() -> None:
    packed_attention(build("qwen2").model.layers[0].self_attn, *[torch.zeros(1, 4, 3, 8)] * 3, None)


def share_embeddings() -> None:
    model, mask = build("qwen2"), torch.ones(2, 3, dtype=torch.int64)
    with remove_padding(model, prefix_sharing=True):
        model(inputs_embeds=torch.zeros(2, 3, 32), attention_mask=mask)


def read_beyond_the_vocabulary() -> None:
    model = build("qwen2")
    with remove_padding(model):
        model(torch.tensor([[1, 2, 99]]), attention_mask=torch.tensor([[0, 1, 1]]))


RAISED: dict[str, list[Callable]] = {
    "FlashAttention is not installed": [
        lambda: load("qwen2", "flash_attention_2")
    ],
    "Hub kernels are not installed": [
        lambda: load("qwen2", "kernels-community/flash-attn2")
    ],
    "attention that the model does not have": [
        lambda: load("gpt_oss", "sdpa")
    ],
    "no pad token": [lambda: tokenizer()(["a", "a few"], padding=True)],
    "no chat template": [lambda: tokenizer().apply_chat_template([{"role": "user", "content": "a"}])],
    "NaN": [lambda: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)],
    "an id beyond the vocabulary": [
        lambda: torch.nn.Embedding(4, 2)(torch.tensor([5])),
        read_beyond_the_vocabulary,
    ],
    "the packed forward differs": [lambda: differing_report().raise_if_failed()],
    "padding cannot be removed": [lambda: remove_padding(build("qwen2", "flex_attention"))],
    "prefix sharing without packing": [
        lambda: trl_padfix.DPOConfig(prefix_sharing=True, use_cpu=True, bf16=False, report_to=[])
    ],
    "prefix sharing and more than ids": [share_embeddings],
    "the layout did not arrive": [attend_without_layout],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in PRINTED.items() for text in texts])
def test_an_error_that_was_printed_is_explained(name, text):
    assert [error.name for error in explain(text)] == [name]


@needs_cpu
@pytest.mark.parametrize(("name", "fail"), [(name, fail) for name, calls in RAISED.items() for fail in calls])
def test_an_error_that_is_raised_is_explained(name, fail):
    with pytest.raises((ValueError, ImportError, RuntimeError, NotImplementedError, IndexError)) as error:
        fail()
    assert name in [known.name for known in explain(f"{error.type.__name__}: {error.value}")]


def test_every_known_error_is_tried():
    names = [error.name for error in KNOWN_ERRORS]
    assert len(names) == len(set(names)) >= 55
    assert set(names) == PRINTED.keys() | RAISED.keys()
    assert all(error.cause.endswith((".", "numbers.")) and error.fix for error in KNOWN_ERRORS)
