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
    """A private name: where it lives, which modules of ours use it, what for, and how to tell that it still fits."""

    name: str
    where: str
    used_by: str
    why: str
    fits: Callable[..., bool]
    """Is called with the object at `where` and the name."""
    needs: str = ""
    """Versions that have it; it is skipped on others, for which the package has another way or no need."""


def has(owner: Any, name: str) -> bool:
    return hasattr(owner, name)


def takes(*arguments: str) -> Callable[..., bool]:
    """The name is a function that can be called with these arguments, beside `self`."""

    def fits(owner: Any, name: str) -> bool:
        parameters = list(inspect.signature(getattr(owner, name)).parameters)
        return set(arguments) <= set(parameters)

    return fits


def is_set(value: str = "", owner: Any = None, name: str = "") -> bool:
    """The class assigns the name to its instances, to something that begins with `value`."""
    return re.search(rf"self\.{name}(: [^=]+)? = {re.escape(value)}", inspect.getsource(owner)) is not None


def code_of(owner: Any) -> Any:
    return inspect.unwrap(owner.forward).__code__


def global_names(owner: Any, name: str) -> bool:
    return name in code_of(owner).co_names


def local_names(owner: Any, name: str) -> bool:
    return name in code_of(owner).co_varnames


def of_trainers(name: str, used_by: str, why: str, fits: Callable, *methods: str, needs: str = "") -> list[Upstream]:
    """The same name in the trainers of several methods."""
    found = []
    for method in methods:
        versions = {"KTO": "trl>=1.9.2", "Distillation": "trl>=1.16"}.get(method, "trl>=1.0")
        found.append(Upstream(name, f"trl.{method}Trainer", used_by, why, fits, needs or versions))
    return found


TRANSFORMERS = [
    Upstream(
        "_attn_implementation_internal", "transformers.PretrainedConfig", "core.attention, trainers.attention_choice",
        "switches the attention of a forward without the checks of the setter, and puts it back",
        lambda owner, name: name in inspect.getsource(owner._attn_implementation.fget),
    ),
    Upstream(
        "_attn_implementation", "transformers.PretrainedConfig", "core.attention, core.refusals, trainers, cards",
        "which attention a model runs with", lambda owner, name: isinstance(getattr(owner, name), property),
    ),
    Upstream(
        "_global_mapping", "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS", "core.model.masks",
        "the mask functions look only here for the name of an attention",
        lambda owner, name: {"sdpa", "eager"} <= getattr(owner, name).keys(), "transformers>=4.53",
    ),
    Upstream(
        "find_packed_sequence_indices", "transformers.masking_utils", "core.model.masks",
        "replaced while a packed forward runs, since it waits for the device", takes("position_ids"),
        "transformers>=4.57",
    ),
    Upstream(
        "find_packed_sequence_indices", "transformers.masking_utils._preprocess_mask_arguments", "core.model.masks",
        "is looked up among the globals of the module, where the replacement is found",
        lambda owner, name: name in owner.__code__.co_names, "transformers>=4.57",
    ),
    Upstream(
        "or_masks", "transformers.masking_utils", "core.model.masks",
        "a mask that lets tokens see more than causally is known by the name of the function that widened it",
        lambda owner, name: getattr(owner, name)().__qualname__.startswith("or_masks"), "transformers>=4.53",
    ),
    Upstream(
        "local_size", "transformers.masking_utils.sdpa_mask", "core.model.masks",
        "the window or chunk that a mask function is called with", lambda owner, name: name in parameters_of(owner),
        "transformers>=4.53",
    ),
    Upstream(
        "use_vmap", "transformers.masking_utils.sdpa_mask", "core.model.masks",
        "a mask function is called with it where a model adds a condition of its own",
        lambda owner, name: name in parameters_of(owner), "transformers>=5.0",
    ),
    Upstream(
        "allow_is_bidirectional_skip", "transformers.masking_utils.create_bidirectional_mask", "core.model.masks",
        "tells a bidirectional mask from a causal one", lambda owner, name: name in owner.__code__.co_names
        or name in str(owner.__code__.co_consts), "transformers>=5.0",
    ),
    Upstream(
        "create_masks_for_generate", "transformers.masking_utils", "core.model.older",
        "the masks that a decoder makes of a two-dimensional one",
        takes("config", "attention_mask", "past_key_values"), "transformers>=4.53",
    ),
    Upstream(
        "ALL_ATTENTION_FUNCTIONS", "transformers.models.qwen2.modeling_qwen2.Qwen2Attention", "core.attention",
        "an attention module that goes through the interface is known by this name in its forward", global_names,
    ),
    Upstream(
        "ALL_ATTENTION_FUNCTIONS", "transformers.models.gpt2.modeling_gpt2.GPT2Attention", "core.attention.attention",
        "an attention module that goes through the interface is known by this name in its forward", global_names,
    ),
    Upstream(
        "_local_mapping", "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS", "core.attention.attention",
        "item assignment registers a function, and deletion takes it out again", has,
    ),
    Upstream(
        "eager_attention_forward", "transformers.models.qwen2.modeling_qwen2.Qwen2Attention", "core.attention",
        "the eager function of a module is found by the name that its forward uses", global_names,
    ),
    Upstream(
        "eager_attention_forward", "transformers.models.gpt2.modeling_gpt2.GPT2Attention", "core.attention.attention",
        "the eager function of a module is found by the name that its forward uses", global_names,
    ),
    Upstream(
        "arange", "transformers.models.llama4.modeling_llama4.Llama4TextAttention", "core.attention, core.refusals",
        "an attention that numbers its columns itself is known by this name in its forward",
        global_names, "transformers>=5.23",
    ),
    Upstream(
        "pooled_logits", "transformers.Qwen2ForSequenceClassification", "core.decoder",
        "a classifier that scores one state of each row is known by this local of its forward", local_names,
    ),
    Upstream(
        "pad_token_id", "transformers.Qwen2ForSequenceClassification", "core.decoder",
        "a classifier that looks for the id of the pad token is known by this name in its forward", global_names,
    ),
    Upstream(
        "pooled_logits", "transformers.GPT2ForSequenceClassification", "core.decoder",
        "a classifier that scores one state of each row is known by this local of its forward", local_names,
    ),
    Upstream(
        "create_position_ids_from_input_ids", "transformers.models.roberta.modeling_roberta.RobertaEmbeddings",
        "core.model.positions", "a module that numbers tokens by their ids has it",
        takes("input_ids", "padding_idx"), "transformers>=5.0",
    ),
    Upstream(
        "position_ids", "transformers.models.opt.modeling_opt.OPTLearnedPositionalEmbedding", "core.model.positions",
        "an embedding of positions is known by this argument",
        lambda owner, name: name in parameters_of(owner.forward),
    ),
    Upstream(
        "neftune_noise_alpha", "transformers.Trainer", "core.decoder",
        "NEFTune is on where the embedding has this attribute",
        lambda owner, name: name in inspect.getsource(owner),
    ),
    Upstream(
        "_is_stateful", "transformers.GenerationMixin", "core.generation",
        "models whose order is in a recurrence", lambda owner, name: f"._{name[1:]}" in inspect.getsource(owner),
    ),
    Upstream(
        "_supports_flash_attn", "transformers.PreTrainedModel", "core.model.older", "which attention a class has", has,
        "transformers>=4.54",
    ),
    Upstream(
        "_supports_flash_attn_2", "transformers.PreTrainedModel", "core.model", "which attention a class has", has,
        "transformers<4.53",
    ),
    Upstream("_supports_sdpa", "transformers.PreTrainedModel", "core.model.older", "which attention a class has", has),
    Upstream("_supports_flex_attn", "transformers.PreTrainedModel", "core.model", "which attention a class has", has),
    Upstream(
        "_compatible_flash_implementations", "transformers.PreTrainedModel", "core.attention.backends",
        "the FlashAttention that a model with sinks needs", has, "transformers>=5.23",
    ),
    Upstream(
        "_from_config", "transformers.PreTrainedModel", "tools.doctor", "builds a model without weights",
        takes("config"),
    ),
    Upstream(
        "_update_causal_mask", "transformers.GPT2Model", "core.model.older",
        "older decoders make their mask in this method", has, "transformers<4.53",
    ),
    Upstream(
        "_prepare_4d_causal_attention_mask_with_cache_position", "transformers.MistralModel", "core.model.older",
        "whether the mask of an older decoder has a window", has, "transformers<4.53",
    ),
    Upstream(
        "_gradient_checkpointing_func", "transformers.PreTrainedModel", "core.model.older",
        "older decoders call it themselves, some without keyword arguments",
        lambda owner, name: name in inspect.getsource(owner), "transformers<4.53",
    ),
    Upstream(
        "_train_batch_size", "transformers.Trainer", "trainers.steps.budget, trainers.steps.sampler",
        "rows of a process in a step", partial(is_set, "args.train_batch_size"),
    ),
    Upstream(
        "_get_train_sampler", "transformers.Trainer", "trainers.base", "overridden: the order of an epoch",
        takes("train_dataset"),
    ),
    Upstream(
        "_remove_unused_columns", "transformers.Trainer", "trainers.steps.budget",
        "what is asked for the rows of a step has the columns of the collator", takes("dataset", "description"),
    ),
    Upstream(
        "_get_num_items_in_batch", "transformers.Trainer", "trainers.base",
        "overridden: counts the labels of all micro-batches", takes("batch_samples", "device"), "transformers>=5.23",
    ),
    Upstream(
        "_track_num_input_tokens", "transformers.Trainer", "trainers.base",
        "overridden: counts the tokens of all micro-batches", takes("inputs"), "transformers>=5.23",
    ),
    Upstream(
        "_prepare_inputs", "transformers.Trainer",
        "tools.bench.steps, tools.bench.building, trainers.generation.evaluation",
        "moves a batch to the device", takes("inputs"),
    ),
    Upstream(
        "get_tp_size", "transformers.Trainer", "trainers.watch.token_counts",
        "tensor-parallel processes have the same rows", has, "transformers>=4.57",
    ),
    Upstream(
        "call_event", "transformers.trainer_callback.CallbackHandler", "trainers.packing",
        "replaced: every event goes through it", takes("event", "args", "state", "control"),
    ),
    Upstream(
        "_VALID_DICT_FIELDS", "transformers.TrainingArguments", "trainers.config",
        "fields whose text is read as JSON", lambda owner, name: isinstance(getattr(owner, name), list),
    ),
    *(
        Upstream(
            "_initialized", f"transformers.integrations.{tracker}Callback", "trainers.generation.samples",
            "whether the run of a tracker has begun", partial(is_set, "False"),
        )
        for tracker in ("Wandb", "Comet", "Trackio")
        if tracker != "Trackio" or hasattr(import_module("transformers.integrations"), "TrackioCallback")
    ),
]  # fmt: skip

TRL = [
    *of_trainers(
        "_metrics", "trainers.watch.exact_means, trainers.steps.budget", "what TRL logs, by mode",
        partial(is_set, '{"train": defaultdict(list), "eval": defaultdict(list)}'),
        "DPO", "SFT", "Reward", "KTO", *ONLINE,
    ),
    *of_trainers(
        "_total_train_tokens", "trainers.steps.budget", "the tokens that TRL has counted", partial(is_set, "0"),
        "DPO", "SFT",
    ),
    *of_trainers(
        "_tp_size", "trainers.split_rows", "processes with the same rows, by which tokens seen are divided",
        partial(is_set, "self.accelerator.parallelism_config.tp_size"), "DPO", "SFT", "Reward", "KTO",
        needs="trl>=1.16",
    ),
    *of_trainers(
        "_compute_kl_logps", "trainers.kto", "replaced within a step: takes the KL term of all its rows at once",
        takes("model", "batch"), "KTO", needs="trl>=1.16",
    ),
    *of_trainers(
        "_get_per_token_logps_and_entropies", "trainers.online, tools.bench.building",
        "overridden: its forwards are split by tokens; called by a step that is measured",
        takes("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"), *ONLINE, needs="trl>=0.20",
    ),
    *of_trainers(
        "_get_last_hidden_state", "trainers.distillation", "overridden: its forwards are split by tokens",
        takes("unwrapped_model", "input_ids", "attention_mask"), "Distillation",
    ),
    *of_trainers(
        "_buffered_inputs", "trainers.online", "the micro-batches of a generation", partial(is_set, "["), *GENERATING,
    ),
    *of_trainers("_step", "trainers.online", "which micro-batch comes next", partial(is_set, "0"), *GENERATING),
    *of_trainers(
        "_is_vision_dataset", "trainers.packing, trainers.steps.sampler, trainers.generation.evaluation",
        "whether the rows have images", partial(is_set, '"image" in'), "DPO", "SFT",
    ),
    *of_trainers(
        "_entropy_bonus_enabled", "trainers.grpo", "whether rows may change micro-batches", partial(is_set, ""),
        "GRPO", needs="trl>=1.9.2",
    ),
    *of_trainers(
        "aux_loss_enabled", "trainers.task, trainers.online, trainers.steps.budget",
        "a loss over the experts of a whole forward",
        partial(is_set, ""), "DPO", "SFT", *ONLINE, needs="trl>=1.9.2",
    ),
    *of_trainers(
        "_prepare_dataset", "trainers.base", "overridden: checks rows before TRL tokenizes them",
        takes("dataset", "processing_class", "args", "dataset_name"), "DPO", "Reward", "KTO",
    ),
    *of_trainers(
        "_prepare_dataset", "trainers.base, trainers.sft", "overridden: checks rows before TRL tokenizes them",
        takes("dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"), "SFT",
    ),
    *of_trainers(
        "_precompute_ref_logps", "trainers.base",
        "overridden: is called in TRL's `__init__`, and must find the models attached",
        lambda owner, name: has(owner, name) and f"self.{name}(" in inspect.getsource(owner.__init__), "DPO", "KTO",
    ),
    *of_trainers(
        "_tokenize_prompts", "trainers.online", "overridden: refuses prompts without a token",
        takes("prompts"), *GENERATING,
    ),
    *of_trainers(
        "_generate_single_turn", "trainers.online", "overridden: generates with padding removal off", has,
        *GENERATING,
    ),
    *of_trainers(
        "_generate_and_score_completions", "trainers.online", "overridden: where processes share rows, a group is one",
        takes("inputs"), *GENERATING,
    ),
    *of_trainers(
        "_prepare_inputs", "trainers.online", "overridden: groups the rows of a generation", takes("generation_batch"),
        *GENERATING,
    ),
    *(
        Upstream(name, f"trl.scripts.{method}", "cli.launch", "is called, and finds our classes in `trl`", has, needs)
        for method, needs in {"dpo": "trl>=1.0", "kto": "trl>=1.9.2", "distillation": "trl>=1.16"}.items()
        for name in ("main", "make_parser")
    ),
    Upstream(
        "resolve_accelerate_config_argument", "trl.cli.accelerate_config", "cli.launch",
        "a name of `--accelerate_config` as a file", takes("launch_args"), "trl>=1.0",
    ),
    Upstream(
        "fused_lm_head", "trl.trainer.utils.add_fused_lm_head", "core.decoder",
        "the keyword that asks the model for log-probabilities instead of logits",
        lambda owner, name: name in inspect.getsource(owner), "trl>=1.10",
    ),
    Upstream(
        "shift_labels", "trl.trainer.utils.add_fused_lm_head", "core.decoder",
        "labels that need no shift: those of the packed row",
        lambda owner, name: name in inspect.getsource(import_module(owner.__module__)), "trl>=1.10",
    ),
    Upstream(
        "_use_triton", "trl.trainer.utils.add_fused_lm_head", "core.heads",
        "whether the fused head selects the labelled positions, for which the host waits",
        lambda owner, name: f"compact = {name}(" in inspect.getsource(owner), "trl>=1.16",
    ),
    Upstream(
        "load_balancing_loss_func", "transformers.models.mixtral.modeling_mixtral", "trainers.steps.split_forward",
        "the loss of experts, over all pieces of a forward",
        takes("gate_logits", "num_experts", "top_k", "attention_mask"),
    ),
    *(
        Upstream(
            f"{name}_pixel_values_by_grid", "trl.trainer.utils", "trainers.online",
            "rows that change places take their images along", takes("batch"), "trl>=1.0",
        )
        for name in ("split", "unsplit")
    ),
    Upstream(
        "flash attention variant", "trl.trainer.sft_trainer", "core.model.older",
        "TRL's warning that packing needs FlashAttention, which is filtered out by these words",
        lambda owner, name: name in inspect.getsource(owner).lower(), "trl<1.16",
    ),
]  # fmt: skip

OTHERS = [
    Upstream(
        "_compiled_call_impl", "torch.nn.Module", "integrations.callback", "whether a module is compiled", has,
    ),
    Upstream(
        "_prepare_cp", "accelerate.Accelerator", "trainers.split_rows",
        "puts its ring attention on a model, in whose place packed rows are split", has, "accelerate>=1.10",
    ),
    Upstream(
        "_prepare_context_parallel_inputs", "transformers.Trainer", "trainers.split_rows",
        "cuts padded rows for the ring", takes("model", "inputs"), "transformers>=4.57",
    ),
    Upstream(
        "_set_sync_gradients", "accelerate.state.GradientState", "trainers.steps.budget",
        "all but the last micro-batch of a step are told not to reduce gradients", takes("sync_gradients"),
    ),
    Upstream(
        "remainder", "accelerate.state.GradientState", "trainers.watch.exact_means",
        "how many rows of the last batch are not repeats", has,
    ),
    Upstream(
        "_BatchNorm", "torch.nn.modules.batchnorm", "core.towers", "a module with statistics of its batch", has,
    ),
    Upstream("_assert_async", "torch", "core.heads", "checks labels on the device without waiting for it", has),
    Upstream(
        "_hf_hook", "accelerate.hooks", "core.refusals", "the hook that moves a module's inputs to its device",
        lambda owner, name: f"module.{name} = " in inspect.getsource(owner.add_hook_to_module),
    ),
    Upstream(
        "_modules", "torch.nn.Module", "core.attention.compiled", "the children of a module, by name",
        lambda owner, name: name in vars(owner()),
    ),
    Upstream(
        "_buffers", "torch.nn.Module", "tools.counted_step", "the buffers of a module, by name",
        lambda owner, name: name in vars(owner()),
    ),
    Upstream("_DropoutNd", "torch.nn.modules.dropout", "core.towers", "a module that draws", has),
    Upstream("_foreach_norm", "torch", "tools.bench.steps", "norms of many gradients in one call", has),
    Upstream("_base", "torch.Tensor", "core.call.step", "the tensor that another one is a view of", has),
    Upstream("_is_view", "torch.Tensor", "core.call", "whether a tensor is a view, as a slice of all rows is", has),
    Upstream(
        "_version", "torch.Tensor", "core.remove", "whether a tensor was written to since its layout was built", has,
    ),
]  # fmt: skip

NAMES = [*TRANSFORMERS, *TRL, *OTHERS]
OF_PYTHON = {"_actions", "_action_groups", "_asdict", "_group_actions", "_optionals", "_replace"} | {"_getframe"}
OF_STACKS = {"_build_fsdp_module"}  # verl's; `integrations/verl.py` asks for its version, and `nox -s plugins` runs it


def parameters_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


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


@pytest.mark.parametrize("upstream", NAMES, ids=lambda u: f"{u.where}-{u.name}")
def test_the_name_is_there_and_fits(upstream):
    if upstream.needs and not is_installed(upstream.needs):
        pytest.skip(f"is there with {upstream.needs}")
    try:
        fits, error = upstream.fits(owner=resolve(upstream.where), name=upstream.name), ""
    except (AttributeError, ModuleNotFoundError, TypeError) as failure:
        fits, error = False, f" ({failure})"
    assert fits, (
        f"`{upstream.name}` of `{upstream.where}` is not what it was{error}. It is used by {upstream.used_by}: "
        f"{upstream.why}."
    )


def test_a_name_that_is_gone_is_found_by_its_name():
    gone = Upstream("_set_sync", "accelerate.state.GradientState", "trainers.steps.budget", "reduces gradients", has)
    with pytest.raises(AssertionError, match=r"`_set_sync` of .*GradientState` is not what it was"):
        test_the_name_is_there_and_fits(gone)
    for name, fits in (
        ("_metrics", partial(is_set, "[]")),
        ("_metric", partial(is_set, "")),
        ("log", takes("prompt")),
    ):
        with pytest.raises(AssertionError, match="is not what it was"):
            test_the_name_is_there_and_fits(Upstream(name, "trl.DPOTrainer", "nobody", "nothing", fits, "trl>=1.0"))


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
    assert len(private) > 20
    assert private - OF_PYTHON - OF_STACKS - {upstream.name for upstream in NAMES} == set()
