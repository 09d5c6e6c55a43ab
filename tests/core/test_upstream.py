"""
Names of transformers, TRL, accelerate and torch that are not their public interface, and that this package leans on.

Each is a test of its own, so that a name that is renamed or removed upstream is found by its name.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement


PACKAGE = Path(__file__).parents[2] / "trl_padfix"
ONLINE = ("GRPO", "RLOO")
GENERATING = (*ONLINE, "Distillation")


class Upstream(NamedTuple):
    """A private name: where it lives, what we use it for, and how to tell that it still fits."""

    name: str
    where: str
    why: str
    fits: Callable[..., bool]
    """Is called with the object at `where` and the name."""
    needs: str = ""
    """Versions that have it; it is skipped on others, for which the package has another way or no need."""


def has(owner: Any, name: str) -> bool:
    return hasattr(owner, name)


def takes(*arguments: str) -> Callable[..., bool]:
    """The name is a function that can be called with these arguments, beside `self`."""
    return lambda owner, name: set(arguments) <= set(parameters_of(getattr(owner, name)))


def is_set(value: str = "", owner: Any = None, name: str = "") -> bool:
    """The class assigns the name to its instances, to something that begins with `value`."""
    return re.search(rf"self\.{name}(: [^=]+)? = {re.escape(value)}", inspect.getsource(owner)) is not None


def is_attribute(owner: Any, name: str) -> bool:
    """Instances of the class have the name."""
    return name in vars(owner())


def says(owner: Any, name: str) -> bool:
    """The source of the object has the name in it."""
    return name in inspect.getsource(owner).lower()


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def is_parameter(owner: Any, name: str) -> bool:
    return name in parameters_of(owner)


def global_names(owner: Any, name: str) -> bool:
    """The name is a global of the object's code, or of that of its forward."""
    return name in inspect.unwrap(getattr(owner, "forward", owner)).__code__.co_names


def keywords_in(function: Any) -> list[str]:
    """Names of the keyword arguments in the calls of a function."""
    return [n for c in inspect.unwrap(function).__code__.co_consts if isinstance(c, tuple) for n in c]


def local_names(owner: Any, name: str) -> bool:
    return name in inspect.unwrap(owner.forward).__code__.co_varnames


def of_trainers(name: str, why: str, fits: Callable, *methods: str, needs: str = "") -> list[Upstream]:
    """The same name in the trainers of several methods."""
    versions = {"Distillation": "trl>=1.16"}
    return [Upstream(name, f"trl.{m}Trainer", why, fits, needs or versions.get(m, "trl>=1.10")) for m in methods]


MASKS = "transformers.masking_utils"
MODELS = "transformers.models"

TRANSFORMERS = [
    Upstream("_attn_implementation_internal", "transformers.PretrainedConfig._attn_implementation.fget",
             "switches the attention of a forward without the checks of the setter, and puts it back", says),
    Upstream("_attn_implementation", "transformers.PretrainedConfig", "which attention a model runs with",
             lambda owner, name: isinstance(getattr(owner, name), property)),
    Upstream("_set_signature_columns_if_needed", "transformers.Trainer", "finds the columns that are kept", has),
    Upstream("_signature_columns", "transformers.Trainer", "the columns of a dataset that are kept",
             partial(is_set, "")),
    Upstream("_global_mapping", f"{MASKS}.ALL_MASK_ATTENTION_FUNCTIONS",
             "the mask functions look only here for the name of an attention",
             lambda owner, name: {"sdpa", "eager"} <= getattr(owner, name).keys(), "transformers>=4.53"),
    Upstream("find_packed_sequence_indices", MASKS, "replaced while models are attached, since it waits",
             takes("position_ids"), "transformers>=4.57"),
    Upstream("find_packed_sequence_indices", f"{MASKS}._preprocess_mask_arguments",
             "is looked up among the globals of the module, where the replacement is found", global_names,
             "transformers>=4.57"),
    Upstream("or_masks", MASKS, "a mask that is more than causal is known by the function that widened it",
             lambda owner, name: getattr(owner, name)().__qualname__.startswith("or_masks"), "transformers>=4.53"),
    Upstream("local_size", f"{MASKS}.sdpa_mask", "the window or chunk that a mask function is called with",
             is_parameter, "transformers>=4.53"),
    Upstream("use_vmap", f"{MASKS}.sdpa_mask", "a mask function is called with it where a model adds a condition",
             is_parameter, "transformers>=5.0"),
    Upstream("allow_is_bidirectional_skip", f"{MASKS}.create_bidirectional_mask",
             "tells a bidirectional mask from a causal one",
             lambda owner, name: name in (*inspect.unwrap(owner).__code__.co_names, *keywords_in(owner)),
             "transformers>=5.0"),
    Upstream("create_masks_for_generate", MASKS, "the masks that a decoder makes of a two-dimensional one",
             takes("config", "attention_mask"), "transformers>=4.53"),
    *(
        Upstream(name, f"{MODELS}.{attention}", f"{what} is known by this name in its forward", global_names)
        for attention in ("qwen2.modeling_qwen2.Qwen2Attention", "gpt2.modeling_gpt2.GPT2Attention")
        for name, what in {
            "ALL_ATTENTION_FUNCTIONS": "an attention module that goes through the interface",
            "eager_attention_forward": "the eager function of a module",
        }.items()
    ),
    Upstream("_local_mapping", "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
             "item assignment registers a function, and deletion takes it out again", has),
    Upstream("arange", f"{MODELS}.llama4.modeling_llama4.Llama4TextAttention",
             "an attention that numbers its columns itself is known by this name in its forward", global_names,
             "transformers>=5.23"),
    *(
        Upstream("pooled_logits", f"transformers.{model}ForSequenceClassification",
                 "a classifier that scores one state of each row is known by this local of its forward", local_names)
        for model in ("Qwen2", "GPT2")
    ),
    Upstream("pad_token_id", "transformers.Qwen2ForSequenceClassification",
             "a classifier that looks for the id of the pad token is known by this name in its forward", global_names),
    Upstream("create_position_ids_from_input_ids", f"{MODELS}.roberta.modeling_roberta.RobertaEmbeddings",
             "a module that numbers tokens by their ids has it", takes("input_ids", "padding_idx"),
             "transformers>=5.0"),
    Upstream("position_ids", f"{MODELS}.opt.modeling_opt.OPTLearnedPositionalEmbedding.forward",
             "an embedding of positions is known by this argument", is_parameter),
    Upstream("neftune_noise_alpha", "transformers.Trainer", "NEFTune is on where the embedding has it", says),
    Upstream("_is_stateful", "transformers.GenerationMixin", "models whose order is in a recurrence",
             lambda owner, name: says(owner, f".{name}")),
    *(
        Upstream(f"_supports_{attention}", "transformers.PreTrainedModel", "which attention a class has", has, needs)
        for attention, needs in [
            ("flash_attn", "transformers>=4.54"), ("flash_attn_2", "transformers<4.53"),
            ("sdpa", ""), ("flex_attn", ""),
        ]
    ),
    Upstream("_compatible_flash_implementations", "transformers.PreTrainedModel",
             "the FlashAttention that a model with sinks needs", has, "transformers>=5.23"),
    Upstream("_from_config", "transformers.PreTrainedModel", "builds a model without weights", takes("config")),
    Upstream("_update_causal_mask", "transformers.GPT2Model", "older decoders make their mask in this method", has,
             "transformers<4.53"),
    Upstream("_prepare_4d_causal_attention_mask_with_cache_position", "transformers.MistralModel",
             "whether the mask of an older decoder has a window", has, "transformers<4.53"),
    Upstream("_gradient_checkpointing_func", "transformers.PreTrainedModel",
             "older decoders call it themselves, some without keyword arguments", says, "transformers<4.53"),
    Upstream("_train_batch_size", "transformers.Trainer", "rows of a process in a step",
             partial(is_set, "args.train_batch_size")),
    Upstream("_get_train_sampler", "transformers.Trainer", "overridden: the order of an epoch",
             takes("train_dataset")),
    Upstream("_remove_unused_columns", "transformers.Trainer",
             "what is asked for the rows of a step has the columns of the collator", takes("dataset", "description")),
    Upstream("_get_num_items_in_batch", "transformers.Trainer", "overridden: counts the labels of all micro-batches",
             takes("batch_samples", "device"), "transformers>=5.23"),
    Upstream("_track_num_input_tokens", "transformers.Trainer", "overridden: counts the tokens of all micro-batches",
             takes("inputs"), "transformers>=5.23"),
    Upstream("_prepare_inputs", "transformers.Trainer", "moves a batch to the device", takes("inputs")),
    Upstream("_tp_plan", "transformers.PreTrainedModel", "which projections tensor parallelism divides", has),
    Upstream("_defer_fsdp_gradient_reduction", "transformers.Trainer", "`no_sync` of a model loaded sharded", has,
             "transformers>=5.23"),
    Upstream("get_tp_size", "transformers.Trainer", "tensor-parallel processes have the same rows", has,
             "transformers>=4.57"),
    Upstream("call_event", "transformers.trainer_callback.CallbackHandler", "replaced: every event goes through it",
             takes("event", "args", "state", "control")),
    Upstream("_VALID_DICT_FIELDS", "transformers.TrainingArguments", "fields whose text is read as JSON",
             lambda owner, name: isinstance(getattr(owner, name), list)),
    *(
        Upstream("_initialized", f"transformers.integrations.{tracker}Callback",
                 "whether the run of a tracker has begun", partial(is_set, "False"))
        for tracker in ("Wandb", "Comet", "Trackio")
        if tracker != "Trackio" or hasattr(import_module("transformers.integrations"), "TrackioCallback")
    ),
]  # fmt: skip

TRL = [
    *of_trainers("_metrics", "what TRL logs, by mode",
                 partial(is_set, '{"train": defaultdict(list), "eval": defaultdict(list)}'),
                 "DPO", "SFT", "Reward", "KTO", *ONLINE),
    *of_trainers("_total_train_tokens", "the tokens that TRL has counted", partial(is_set, "0"), "DPO", "SFT"),
    *of_trainers("_tp_size", "processes with the same rows, by which tokens seen are divided",
                 partial(is_set, "self.accelerator.parallelism_config.tp_size"), "DPO", "SFT", "Reward", "KTO",
                 needs="trl>=1.16"),
    *of_trainers("_compute_kl_logps", "replaced within a step: takes the KL term of all its rows at once",
                 takes("model", "batch"), "KTO", needs="trl>=1.16"),
    *of_trainers("_get_per_token_logps_and_entropies", "overridden: its forwards are split by tokens",
                 takes("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"), *ONLINE,
                 needs="trl>=0.20"),
    *of_trainers("_get_last_hidden_state", "overridden: its forwards are split by tokens",
                 takes("unwrapped_model", "input_ids", "attention_mask"), "Distillation"),
    *of_trainers("_buffered_inputs", "the micro-batches of a generation", partial(is_set, "["), *GENERATING),
    *of_trainers("_step", "which micro-batch comes next", partial(is_set, "0"), *GENERATING),
    *of_trainers("_is_vision_dataset", "whether the rows have images", partial(is_set, '"image" in'), "DPO", "SFT"),
    *of_trainers("_entropy_bonus_enabled", "whether rows may change micro-batches", partial(is_set, ""), "GRPO"),
    *of_trainers("aux_loss_enabled", "a loss over the experts of a whole forward", partial(is_set, ""), "DPO", "SFT",
                 *ONLINE),
    *of_trainers("_prepare_dataset", "overridden: checks rows before TRL tokenizes them",
                 takes("dataset", "processing_class", "args", "dataset_name"), "DPO", "Reward", "KTO"),
    *of_trainers("_prepare_dataset", "overridden: checks rows before TRL tokenizes them",
                 takes("dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"), "SFT"),
    *of_trainers("_precompute_ref_logps", "overridden: called in TRL's `__init__`, must find the models attached",
                 lambda owner, name: has(owner, name) and says(owner.__init__, f"self.{name}("), "DPO", "KTO"),
    *of_trainers("_tokenize_prompts", "overridden: refuses prompts without a token", takes("prompts"), *GENERATING),
    *of_trainers("_generate_single_turn", "overridden: generates with padding removal off", has, *GENERATING),
    *of_trainers("_generate_and_score_completions", "overridden: where processes share rows, a group is one",
                 takes("inputs"), *GENERATING),
    *of_trainers("_prepare_inputs", "overridden: groups the rows of a generation", takes("generation_batch"),
                 *GENERATING),
    *(
        Upstream(name, f"trl.scripts.{method}", "is called, and finds our classes in `trl`", has, needs)
        for method, needs in {"dpo": "trl>=1.10", "kto": "trl>=1.10", "distillation": "trl>=1.16"}.items()
        for name in ("main", "make_parser")
    ),
    Upstream("resolve_accelerate_config_argument", "trl.cli.accelerate_config",
             "a name of `--accelerate_config` as a file", takes("launch_args"), "trl>=1.10"),
    Upstream("fused_lm_head", "trl.trainer.utils.add_fused_lm_head",
             "the keyword that asks the model for log-probabilities instead of logits", says, "trl>=1.10"),
    Upstream("shift_labels", "trl.trainer.utils", "labels that need no shift: those of the packed row", says,
             "trl>=1.10"),
    Upstream("_use_triton", "trl.trainer.utils.add_fused_lm_head",
             "whether the fused head selects the labelled positions, for which the host waits",
             lambda owner, name: says(owner, f"compact = {name}("), "trl>=1.16"),
    Upstream("load_balancing_loss_func", f"{MODELS}.mixtral.modeling_mixtral",
             "the loss of experts, over all sub-batches of a forward",
             takes("gate_logits", "num_experts", "top_k", "attention_mask")),
    *(
        Upstream(f"{name}_pixel_values_by_grid", "trl.trainer.utils",
                 "rows that change places take their images along", takes("batch"), "trl>=1.10")
        for name in ("split", "unsplit")
    ),
    Upstream("flash attention variant", "trl.trainer.sft_trainer",
             "TRL's warning that packing needs FlashAttention, which is filtered out by these words", says,
             "trl<1.16"),
]  # fmt: skip

OTHERS = [
    Upstream("_scaled_dot_product_flash_attention_for_cpu", "torch.ops.aten", "gives the log-sum-exp that joins parts",
             has),
    Upstream("_scaled_dot_product_flash_attention_for_cpu_backward", "torch.ops.aten", "takes that of all parts", has),
    Upstream("_compiled_call_impl", "torch.nn.Module", "whether a module is compiled", has),
    Upstream("_prepare_cp", "accelerate.Accelerator",
             "puts its ring attention on a model, in whose place packed rows are split", has, "accelerate>=1.10"),
    Upstream("_prepare_context_parallel_inputs", "transformers.Trainer", "cuts padded rows for the ring",
             takes("model", "inputs"), "transformers>=4.57"),
    Upstream("_set_sync_gradients", "accelerate.state.GradientState",
             "all but the last micro-batch of a step do not reduce gradients", takes("sync_gradients")),
    Upstream("remainder", "accelerate.state.GradientState", "how many rows of the last batch are not repeats", has),
    Upstream("_BatchNorm", "torch.nn.modules.batchnorm", "a module with statistics of its batch", has),
    Upstream("_hf_hook", "accelerate.hooks.add_hook_to_module", "the hook that moves a module's inputs to its device",
             lambda owner, name: says(owner, f"module.{name} = ")),
    *(
        Upstream(name, "torch.nn.Module", f"the {what} of a module, by name", is_attribute)
        for name, what in {"_modules": "children", "_buffers": "buffers"}.items()
    ),
    *(
        Upstream(name, "torch.nn.Module", "hooks that a module has, by which backward hooks are noticed", is_attribute)
        for name in ("_backward_hooks", "_backward_pre_hooks")
    ),
    *(
        Upstream(name, "torch.nn.modules.module", "hooks of all modules, which a run may set in its middle", has)
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ),
    Upstream("_in_backward_optimizers", "torch.distributed.optim.apply_optimizer_in_backward",
             "an optimizer that steps within the backward", says),
    Upstream("_DropoutNd", "torch.nn.modules.dropout", "a module that draws", has),
    Upstream("_reshard", "torch.distributed.fsdp._runtime_utils", "FSDP1 gathers its parameters again",
             takes("state", "handle", "free_unsharded_flat_param")),
    Upstream("_handle", "torch.distributed.fsdp.FullyShardedDataParallel", "what a unit of FSDP1 shards",
             lambda owner, name: says(owner.forward, f"self.{name}")),
    Upstream("_current_graph_task_id", "torch._C", "whether a forward runs within a backward: its recomputation", has),
    Upstream("_top_saved_tensors_default_hooks", "torch._C._autograd",
             "whether a checkpoint, or another block of saved tensors, is around a forward", has),
    Upstream("_autograd", "torch._C", "has the function above", has),
    Upstream("_cdata", "torch.UntypedStorage", "tells storages apart, whatever tensors view them",
             lambda owner, name: isinstance(getattr(owner(), name), int)),
    Upstream("_foreach_norm", "torch", "norms of many gradients in one call", has),
    Upstream("_base", "torch.Tensor", "the tensor that another one is a view of", has),
    Upstream("_is_view", "torch.Tensor", "whether a tensor is a view, as a slice of all rows is", has),
    Upstream("_version", "torch.Tensor", "whether a tensor was written to since its layout was built", has),
    Upstream("_pytree", "torch.utils", "the tensors within an output, and how it is put together again", has),
]  # fmt: skip

NAMES = [*TRANSFORMERS, *TRL, *OTHERS]
OF_PYTHON = {"_actions", "_action_groups", "_asdict", "_group_actions", "_optionals", "_replace"} | {"_getframe"}
OF_STACKS = {
    "_build_fsdp_module",
    "_engines",
}  # verl's; `integrations/verl.py` asks for its version, and `nox -s plugins` runs it


def resolve(where: str) -> Any:
    """The object of a dotted name: the longest module in it, and attributes of that."""
    parts = where.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(where)


def is_installed(needs: str) -> bool:
    requirement = Requirement(needs)
    return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)


def users_of(name: str) -> list[str]:
    """The modules of the package that have the name in them."""
    paths = (path for path in PACKAGE.rglob("*.py") if re.search(rf"\b{re.escape(name)}", path.read_text()))
    return sorted(str(path.relative_to(PACKAGE)) for path in paths)


@pytest.mark.parametrize("upstream", NAMES, ids=lambda u: f"{u.where}-{u.name}")
def test_the_name_is_there_and_fits(upstream):
    if upstream.needs and not is_installed(upstream.needs):
        pytest.skip(f"is there with {upstream.needs}")
    try:
        fits, error = upstream.fits(owner=resolve(upstream.where), name=upstream.name), ""
    except (AttributeError, ModuleNotFoundError, TypeError) as failure:
        fits, error = False, f" ({failure})"
    assert fits, (
        f"`{upstream.name}` of `{upstream.where}` is not what it was{error}. It is used by "
        f"{users_of(upstream.name)}: {upstream.why}."
    )


def test_a_name_that_is_gone_is_found_by_its_name():
    gone = Upstream("_set_sync", "accelerate.state.GradientState", "reduces gradients", has)
    with pytest.raises(AssertionError, match=r"`_set_sync` of .*GradientState` is not what it was"):
        test_the_name_is_there_and_fits(gone)
    for name, fits in (
        ("_metrics", partial(is_set, "[]")),
        ("_metric", partial(is_set, "")),
        ("log", takes("prompt")),
    ):
        with pytest.raises(AssertionError, match="is not what it was"):
            test_the_name_is_there_and_fits(Upstream(name, "trl.DPOTrainer", "nothing", fits, "trl>=1.10"))


def test_no_private_name_is_left_out():
    used, ours = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                (ours if own else used).add(node.attr)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                used |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
    private = {name for name in used - ours if re.fullmatch(r"_[A-Za-z]\w*[a-z]", name)}
    assert private
    assert private - OF_PYTHON - OF_STACKS - {upstream.name for upstream in NAMES} == set()
