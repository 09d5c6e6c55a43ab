"""`trl-padfix plan`: options and printed lines of a plan. [`trl_padfix.tools.plan`] computes it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from .console import LONGEST, JsonOption, console, figure_table, one_of, outputs, print_as_is, write_json, write_output
from .recipe import folder
from .user_errors import user_errors_of


if TYPE_CHECKING:
    from ..tools.model_sizes import ModelSizes
    from ..tools.plan import Plan
    from ..tools.plan_command import DataLengths

__all__ = ["plan"]


def plan(
    model: Annotated[str, Argument(help="Hub id of a model, its folder, or its config.json.")],
    gpus: Annotated[int, Option(min=1, help="How many GPUs.")] = 1,
    memory: Annotated[float, Option(min=0.1, help="Memory of each, in GB (10^9 bytes).")] = 80.0,
    method: Annotated[str, Option(help="dpo, kto (with a reference model), sft, reward, grpo or rloo.")] = "sft",
    lora: Annotated[int, Option(min=0, help="Rank of adapters on all linear layers; 0 trains all.")] = 0,
    load_in_4bit: Annotated[
        bool, Option("--load-in-4bit", help="With --lora: the layers below in 4 bits, by bitsandbytes (QLoRA).")
    ] = False,
    max_length: Annotated[int | None, Option(min=1, max=LONGEST, help="Longest row, in tokens. [1024]")] = None,
    stats: Annotated[Path | None, Option(help="What `trl-padfix stats --json` wrote: its lengths.")] = None,
    max_tokens_per_batch: Annotated[
        int | None, Option(min=1, help="The token budget to plan for. By default the largest that fits.")
    ] = None,
    expert_parallel: Annotated[
        int, Option(min=1, help="GPUs that have the experts of a layer together (`ep_size`), under FSDP2.")
    ] = 1,
    tensor_parallel: Annotated[int, Option(min=1, help="GPUs that have each layer together (`tp_size`).")] = 1,
    head_tokens: Annotated[
        int, Option(min=0, help="Tokens whose scores are held at once; TRL's fused head has chunks. 0: all.")
    ] = 1024,
    accelerate: Annotated[Path | None, Option(help="Write accelerate's configuration to this file.")] = None,
    json: JsonOption = None,
) -> None:
    """Memory of each GPU by item, and the sharding, checkpointing and token budget that fit. Nothing is trained."""
    from ..tools.model_sizes import load_sizes
    from ..tools.plan import Training, check_experts, smallest_fit
    from ..tools.plan_command import DataLengths, accelerate_config, flags, read_lengths, training_command

    one_of("--method", method, ["dpo", "kto", "sft", "reward", "grpo", "rloo"])
    _check_options(gpus, lora, load_in_4bit, max_tokens_per_batch, expert_parallel, tensor_parallel)
    outputs(accelerate=accelerate, json=json)
    lengths = DataLengths(max_length or 1024, None, "DATA")
    if stats is not None:
        with user_errors_of("--stats"):
            lengths = read_lengths(stats, max_length)
    is_online = method in ("grpo", "rloo")
    rows = 2 if method in ("dpo", "reward") else 1  # a forward cannot divide a pair
    with user_errors_of("MODEL"), console.status("Counting"):
        sizes = load_sizes(model)
    if expert_parallel > 1:
        with user_errors_of("--expert-parallel"):
            check_experts(sizes, gpus, expert_parallel)
    of_one = sizes
    if tensor_parallel > 1:
        with user_errors_of("--tensor-parallel"):
            of_one = sizes.of_one(tensor_parallel)
    base = Training(
        gpus, lora=lora, quantized=load_in_4bit, reference=method in ("dpo", "kto"), head_tokens=head_tokens,
        expert_parallel=expert_parallel, tensor_parallel=tensor_parallel,
    )  # fmt: skip
    with user_errors_of("--memory"), console.status("Counting"):
        try:
            fit = smallest_fit(
                of_one, base, available=int(memory * 1e9), longest=rows * lengths.longest,
                budget=max_tokens_per_batch, may_split=not is_online,
            )  # fmt: skip
        except NotImplementedError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
    trained = f"LoRA of rank {lora}{' on 4 bits' if load_in_4bit else ''}" if lora else "all weights"
    print_as_is(f"{sizes.describe()}, {method}, {trained}, {gpus} x {memory:g} GB")
    _print_memory(fit)
    _print_notes(fit, sizes, lengths)
    path = accelerate or Path("accelerate.yaml")
    more = flags(fit, None if is_online else lengths.longest, sizes.has_experts, rows * lengths.longest)
    command = training_command(fit, sizes.name, method, lengths.data, path, more)
    print_as_is(f"\n{command}")
    if "--dataset_name DATA" in command and lengths.data != "DATA":
        print_as_is("(DATA stands for a folder or a Hub id: `--dataset_name` takes no single file)")
    config = accelerate_config(fit.training, folder() / "accelerate")
    if accelerate is None:
        print_as_is(f"\n{path}:\n{config}")
    else:
        write_output("--accelerate", accelerate, lambda beside: beside.write_text(config))
    write_json(json, {"model": sizes.name, "method": method, **fit.to_dict()})


def _check_options(
    gpus: int, lora: int, load_in_4bit: bool, budget: int | None, expert_parallel: int, tensor_parallel: int
) -> None:
    """Refuse options that do not go together, or that this machine cannot count."""
    if load_in_4bit and not lora:
        raise typer.BadParameter("needs adapters, which are trained: give `--lora 16`.", param_hint="--load-in-4bit")
    if expert_parallel > 1 and lora:
        raise typer.BadParameter("adapters on experts of other GPUs were not run.", param_hint="--expert-parallel")
    if tensor_parallel > 1 and (lora or expert_parallel > 1 or budget):
        raise typer.BadParameter(
            "was not counted with --expert-parallel and --lora, and has no token budget: the GPUs of a group have one "
            "batch. Leave those out.", param_hint="--tensor-parallel"
        )  # fmt: skip
    if gpus % tensor_parallel:
        message = f"{tensor_parallel} GPUs share each layer, and do not divide {gpus} GPUs."
        raise typer.BadParameter(message, param_hint="--tensor-parallel")
    if lora and find_spec("peft") is None:
        raise typer.BadParameter("adapters need peft: `pip install 'trl-padfix[peft]'`.", param_hint="--lora")


def _print_memory(fit: Plan) -> None:
    """Print the memory of a GPU by item."""
    items = dict(fit.memory.items)
    for name, size in fit.memory.per_token.items():
        items[f"{name}: {size / 1e6:.3f} MB x {fit.tokens:,} tokens"] = size * fit.tokens
    items["together"] = fit.memory.total(fit.tokens)
    console.print(figure_table(("item", "GB of each GPU"), ((name, f"{n / 1e9:.2f}") for name, n in items.items())))


def _print_notes(fit: Plan, sizes: ModelSizes, lengths: DataLengths) -> None:
    """Print how the training is sharded, how many rows a forward holds, and the restrictions of the plan."""
    training = fit.training
    sharding = f"sharded over {training.gpus} GPUs (FSDP2)" if training.sharded else "not sharded"
    sharding += f", each row computed by {training.split} of them (cp_size)" if training.split > 1 else ""
    if training.expert_parallel > 1:
        sharding += f", experts over {training.expert_parallel} (ep_size), to which tokens are routed evenly"
    if training.tensor_parallel > 1:
        groups = training.gpus // training.tensor_parallel
        sharding = f"each layer over {training.tensor_parallel} GPUs (tp_size), {groups} batches"
    host = ", checkpoints offloaded to the host" if training.offload else ""
    console.print(f"{sharding}, {'with' if training.checkpointing else 'without'} gradient checkpointing{host}")
    if lengths.distinct_per_row:
        rows = fit.tokens / lengths.distinct_per_row
        console.print(f"a forward of {fit.tokens:,} tokens holds about {rows:,.0f} rows of the data")
    if training.quantized and sizes.has_experts:
        fraction = sizes.linear_weights / sizes.parameters
        console.print(f"bitsandbytes quantizes linear layers, {fraction:.0%} of the weights, and no stacked experts")
    console.print("a count of a step in bfloat16 (docs/scaling.md); nothing was measured on a GPU")
