"""`trl-padfix plan`."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from .console import LONGEST, JsonOption, console, figure_table, one_of, outputs, print_as_is, write_json, write_output
from .recipe import folder
from .user_errors import user_errors_of


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
    head_tokens: Annotated[
        int, Option(min=0, help="Tokens whose scores are held at once; TRL's fused head has chunks. 0: all.")
    ] = 1024,
    accelerate: Annotated[Path | None, Option(help="Write accelerate's configuration to this file.")] = None,
    json: JsonOption = None,
) -> None:
    """Memory of each GPU by item, and the sharding, checkpointing and token budget that fit. Nothing is trained."""
    import yaml

    from ..tools import plan as p

    one_of("--method", method, ["dpo", "kto", "sft", "reward", "grpo", "rloo"])
    if load_in_4bit and not lora:
        raise typer.BadParameter("needs adapters, which are trained: give `--lora 16`.", param_hint="--load-in-4bit")
    if lora and find_spec("peft") is None:
        raise typer.BadParameter("adapters need peft: `pip install 'trl-padfix[peft]'`.", param_hint="--lora")
    outputs(accelerate=accelerate, json=json)
    tokens, per_row, data = max_length or 1024, None, "DATA"
    if stats is not None:
        with user_errors_of("--stats"):
            tokens, per_row, data = _lengths(stats, max_length)
    is_online = method in ("grpo", "rloo")
    sequences = 2 if method in ("dpo", "reward") else 1  # of a row, which no forward parts
    with user_errors_of("MODEL"), console.status("Counting"):
        sizes = p.load_sizes(model)
    with user_errors_of("--memory"), console.status("Counting"):
        try:
            found = p.smallest_fit(
                sizes, gpus=gpus, available=int(memory * 1e9), longest=sequences * tokens, lora=lora,
                quantized=load_in_4bit, reference=method in ("dpo", "kto"), head_tokens=head_tokens,
                budget=max_tokens_per_batch, may_split=not is_online,
            )  # fmt: skip
        except NotImplementedError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
    what = f"LoRA of rank {lora}{' on 4 bits' if load_in_4bit else ''}" if lora else "all weights"
    active = f" ({sizes.active / 1e9:.2f}e9 for a token)" if sizes.active < sizes.parameters else ""
    about = f"{sizes.name}: {sizes.parameters / 1e9:.2f}e9 parameters{active}"
    print_as_is(f"{about}, {method}, {what}, {gpus} x {memory:g} GB")
    items = dict(found.memory.items)
    for name, size in found.memory.per_token.items():
        items[f"{name}: {size / 1e6:.3f} MB x {found.tokens:,} tokens"] = size * found.tokens
    items["together"] = found.memory.total(found.tokens)
    console.print(figure_table(("item", "GB of each GPU"), ((name, f"{n / 1e9:.2f}") for name, n in items.items())))
    how = found.training
    sharding = f"sharded over {gpus} GPUs (FSDP2)" if how.sharded else "not sharded"
    sharding += f", each row computed by {how.split} of them (cp_size)" if how.split > 1 else ""
    console.print(f"{sharding}, {'with' if how.checkpointing else 'without'} gradient checkpointing")
    if per_row:
        console.print(
            f"a forward of {found.tokens:,} tokens holds about {found.tokens / per_row:,.0f} rows of the data"
        )
    if load_in_4bit and sizes.active < sizes.parameters:
        in_bits = sizes.linear_weights / sizes.parameters
        console.print(f"bitsandbytes quantizes linear layers, {in_bits:.0%} of the weights, and no stacked experts")
    console.print("a count of a step in bfloat16 (docs/scaling.md); nothing was measured on a GPU")
    path = accelerate or Path("accelerate.yaml")
    launch = f"accelerate launch --config_file {shlex.quote(str(path))}{p.splitting_flags(how)}"
    is_file = Path(data).is_file()
    named = ["--config", data] if data.endswith((".yaml", ".yml")) else ["--dataset_name", "DATA" if is_file else data]
    command = f"{launch} -m trl_padfix {method} {shlex.join(['--model_name_or_path', sizes.name, *named])}"
    more = p.flags(found, None if is_online else tokens, sequences, sizes.active < sizes.parameters)
    print_as_is("\n" + " \\\n  ".join([command, *more]))
    if is_file:
        print_as_is("(DATA stands for a folder or a Hub id: `--dataset_name` takes no single file)")
    shipped = "fsdp2" if how.sharded else "multi_gpu" if gpus > 1 else "single_gpu"
    config = yaml.safe_load((folder() / f"accelerate/{shipped}.yaml").read_text()) | {"num_processes": gpus}
    config = yaml.safe_dump(config, sort_keys=False)
    if accelerate is None:
        print_as_is(f"\n{path}:\n{config}")
    else:
        write_output("--accelerate", accelerate, lambda beside: beside.write_text(config))
    write_json(json, {"model": sizes.name, "method": method, **found.to_dict()})


def _lengths(path: Path, max_length: int | None) -> tuple[int, float | None, str]:
    """The longest row, the tokens of a row on average, and the data, of the figures of `trl-padfix stats`."""
    import json as json_module

    from ..tools.reading import reading

    with path.open("rb") as file, reading(f"the figures {str(path)!r}", "Give what `trl-padfix stats --json` wrote."):
        found = json_module.load(file)
    try:
        parts = found["lengths"]
        longest = int(parts["sequence" if "sequence" in parts else "text"]["max"])
        batches, data = found["batches"], found["data"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} has no {error}: give what `trl-padfix stats --json` wrote.") from error
    limits = [n for n in (longest, found.get("max_length"), max_length) if n]
    each = [batch["distinct"] / batch["batch_size"] for batch in batches]
    return min(limits), each[-1] if each else None, data
