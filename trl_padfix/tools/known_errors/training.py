"""Figures of a training, this package, gradients, precision and compilation."""

from __future__ import annotations

from .entry import KnownError


__all__ = ["ERRORS"]

ERRORS = (
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
        "a log of TRL: https://github.com/huggingface/trl/issues/1236",
    ),
    KnownError(
        "the loss stays at 0.693",
        r"'loss': '?0\.693\d*'?, 'grad_norm': '?0(\.0)?'?,",
        "The gradient is zero: nothing that is trained takes part in the loss, or its gradient was cut off.",
        "With adapters, check `model.print_trainable_parameters()`; with gradient checkpointing, "
        "`gradient_checkpointing_kwargs={'use_reentrant': False}`; drop pairs whose completions are equal.",
        "a log of TRL: https://github.com/huggingface/trl/issues/4023",
    ),
    KnownError(
        "NaN",
        r"(logits|loss|grad_norm|logps|rewards?)\W{0,6}(/\w+\W{0,4})?(is|are|become|became|=|:)? ?'?nan\b"
        r"|contains either `?inf`?, `?nan`? or element < 0|nan (logits|loss|in logits)",
        "Mostly float16 that overflows, a row of a padded batch that is all padding (its softmax has nothing to sum "
        "over), or a learning rate that blew the weights up.",
        "`bf16=True` in place of `fp16=True`; drop empty rows; a smaller learning rate, `max_grad_norm=1`. With "
        "`padding_free=True` there is no padding to attend from.",
        "torch 2.13, lib/libtorch_cpu.so; a log of TRL: https://github.com/huggingface/trl/issues/2435",
    ),
    KnownError(
        "float16 weights with a gradient scaler",
        r"Attempting to unscale FP16 gradients",
        "`fp16=True` scales gradients of float32 weights, and these weights are float16 themselves.",
        "Load the model in float32 (TRL's default) and keep `fp16=True`, or load it in bfloat16 with `bf16=True`.",
        "torch 2.13, amp/grad_scaler.py",
    ),
    KnownError(
        "bf16 is not there",
        r"Your setup doesn't support bf16|bf16.*requires? .*Ampere",
        "`bf16=True` is TRL's default, and this machine has no GPU, or one without bfloat16.",
        "`bf16=False` with `fp16=True` on an older GPU; on a CPU `use_cpu=True`.",
        "transformers 5.23, training_args.py",
    ),
    # This package
    KnownError(
        "the packed forward differs",
        r"ParityError|parity FAILED",
        "On the first batch the packed forward of the model was compared with the padded one, and their scores "
        "differ: some layer mixes tokens in a way that no rule knows.",
        "`prefix_sharing=False`, and if that differs too, `padding_free=False`. Please report the model and the "
        "figures. `parity_check=False` trains on regardless.",
        "trl_padfix, core/parity.py",
    ),
    KnownError(
        "the layout did not arrive",
        r"did not receive the layout of the packed batch",
        "The decoder does not hand keyword arguments down to its attention, so that cannot be told where rows begin.",
        "`padding_free=False` for this model; a newer transformers may hand them down.",
        "trl_padfix, core/attention/attention.py",
    ),
    KnownError(
        "padding cannot be removed",
        r"Padding cannot be removed from|padding cannot be removed with it",
        "The message names the layer or setting that mixes the tokens of a packed batch, or an attention that cannot "
        "be told its rows. It is refused, because the numbers would be others.",
        "`padding_free=False`, or what the message names. `trl-padfix doctor --model ID` says it before a run.",
        "trl_padfix, core/remove.py",
    ),
    KnownError(
        "prefix sharing without packing",
        r"`?prefix_sharing=True`? needs `?padding_free=True`?",
        "Prefixes are shared in the packed row, and without `padding_free` there is none.",
        "Set both, or neither.",
        "trl_padfix, trainers/field_types.py",
    ),
    KnownError(
        "prefix sharing and more than ids",
        r"`?prefix_sharing=True`? compares token ids",
        "Two rows are computed once as far as their ids and positions agree, and this call carries something else "
        "for each token, or no ids.",
        "`prefix_sharing=False`: padding is removed all the same.",
        "trl_padfix, core/call/layout_of.py",
    ),
    # Gradients and precision
    KnownError(
        "nothing requires a gradient",
        r"element 0 of tensors does not require grad",
        "The loss does not depend on anything that is trained: all weights are frozen, or reentrant gradient "
        "checkpointing cut the graph at frozen embeddings.",
        "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or `model.enable_input_require_grads()`; with "
        "PEFT, look at `model.print_trainable_parameters()`.",
        "torch 2.13, lib/libtorch_cpu.so",
    ),
    KnownError(
        "weights of two precisions under FSDP",
        r"Must flatten tensors with (the same|uniform) `?dtype",
        "FSDP (version 1) joins the weights of a layer into one, and these have two precisions: adapters in float32 "
        "on a base in bfloat16, mostly.",
        "FSDP2 (`fsdp_version: 2`; `recipes/accelerate/fsdp2.yaml`) does not join them; or load all in one "
        "precision: `dtype='bfloat16'` for model and adapters.",
        "torch 2.13, distributed/fsdp/_flat_param.py",
    ),
    KnownError(
        "two precisions in one product",
        r"expected (mat1 and mat2|m1 and m2) to have the same dtype"
        r"|expected scalar type (Float|Half|BFloat16|Double) but found",
        "Weights and activations have two precisions, and no autocast brings them together.",
        "Train with `bf16=True`, or load everything in one `dtype`. Outside a trainer: `with torch.autocast(...)`.",
        "torch 2.13, _meta_registrations.py; torch 2.13, lib/libtorch_cpu.so",
    ),
    KnownError(
        "quantized weights cannot be trained",
        r"cannot perform fine-tuning on purely quantized models",
        "4-bit and 8-bit weights are not trained; adapters on them are.",
        "`peft_config=LoraConfig(...)`, or `--use_peft` on the command line.",
        "transformers 5.23, trainer_utils.py",
    ),
    KnownError(
        "adapters without their modules",
        r"Target modules .* not found in the base model",
        "`target_modules` of the LoRA configuration names layers that this model does not have.",
        "`target_modules='all-linear'`, or names out of `model.named_modules()`.",
        "peft 0.21, tuners/tuners_utils.py",
    ),
    # Checkpointing and compilation
    KnownError(
        "cache and gradient checkpointing",
        r"`?use_cache=True`? is incompatible with gradient checkpointing",
        "A warning: the cache is of no use in training, and transformers switches it off.",
        "Nothing; `model.config.use_cache = False` silences it. Packed forwards run without a cache anyway.",
        "transformers 5.23, modeling_layers.py",
    ),
    KnownError(
        "checkpointing without gradients",
        r"None of the inputs have requires_grad=True",
        "Reentrant checkpointing sees no input with a gradient, as with LoRA on frozen embeddings: layers get none.",
        "`gradient_checkpointing_kwargs={'use_reentrant': False}`, or `model.enable_input_require_grads()`.",
        "torch 2.13, utils/checkpoint.py",
    ),
    KnownError(
        "checkpointing recomputed something else",
        r"CheckpointError|Recomputed values for the following tensors have different metadata"
        r"|different number of tensors was saved during the original forward and recomputation",
        "The recomputation in backward took another path than the forward: a model whose mode, attention or handles "
        "were changed in between.",
        "Change them between steps only; backward of a packed forward belongs to the layout that it ran with.",
        "torch 2.13, utils/checkpoint.py",
    ),
    KnownError(
        "recompilation",
        r"torch\._dynamo hit config\.(recompile_limit|cache_size_limit|accumulated_\w+)|recompile_limit reached",
        "`torch.compile` makes a new graph for each new shape, and batches have a new length each time.",
        "`padding_free=True` with `torch_compile=True`: layers are compiled one by one, for all lengths. Else "
        "`pad_to_multiple_of=64`, or `torch.compile(dynamic=True)`.",
        "torch 2.13, _dynamo/convert_frame.py; https://github.com/microsoft/dion/issues/23",
    ),
)
