"""Generation from batches of either padding side."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .anatomy import find_decoder, find_pretrained, peft_configs_in
from .errors import require
from .model.inspection import parameters_of, takes
from .model.older import CACHES
from .model.positions import position_embeddings


__all__ = ["generate", "left_align"]


def left_align(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """
    Move the padding of a batch to the left, and drop columns that hold only padding.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`):
            Token ids, or embeddings of shape `(B, L, H)`.
        attention_mask (`torch.Tensor` of shape `(B, L)`):
            1 for real tokens, 0 for padding, anywhere: left, right, both ends, holes.
        *tensors (`torch.Tensor` of shape `(B, L, ...)`):
            Further values for each token, such as `mm_token_type_ids`.

    Returns:
        `tuple[torch.Tensor, ...]`: the arguments in their order, each `(B, l, ...)` for a longest row of `l` tokens.
        The real tokens of each row are at its right end, in their order.

    Raises:
        ValueError: If the mask holds other values than 0 and 1, or if shapes disagree.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import left_align

    >>> ids = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]])
    >>> left_align(ids, torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]))
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))

    ```
    """
    all_tensors = (input_ids, attention_mask, *tensors)
    if attention_mask.dim() != 2 or any(tensor.shape[:2] != attention_mask.shape for tensor in all_tensors):
        raise ValueError(
            f"The attention mask has shape {tuple(attention_mask.shape)} and the values to align have shapes "
            f"{[tuple(t.shape) for t in all_tensors if t is not attention_mask]}. All must begin with the same "
            "`(B, L)`."
        )
    if ((attention_mask != 0) & (attention_mask != 1)).any():
        raise ValueError(
            f"The attention mask holds {attention_mask.unique()[:5].tolist()}; aligning needs 1 for real tokens and 0 "
            "for padding. Additive and weighted masks do not say what is padding."
        )
    # A stable sort of 0 and 1 moves padding to the front and keeps the order of the real tokens.
    order = attention_mask.long().argsort(dim=1, stable=True)
    columns = order[:, order.shape[1] - int(attention_mask.sum(1).max()) :]
    rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
    return tuple(tensor[rows, columns] for tensor in all_tensors)


def generate(model: Any, inputs: Mapping[str, Any] | torch.Tensor, **kwargs: Any) -> Any:
    """
    `model.generate` for a batch of either padding side: every prompt is continued as it would be alone.

    `model.generate` appends tokens to the right of every row, so padding must be on the left. The batch is left-
    aligned first ([`left_align`]), with all its values for each token; images stay unchanged. The model generates in
    evaluation mode. Afterwards, also after an exception, each module is in its earlier mode. Attached padding removal
    stays attached.

    Args:
        model (`torch.nn.Module`):
            A [`~transformers.PreTrainedModel`] that generates, or one within PEFT, DDP or a compiled module. For an
            encoder-decoder the batch is passed on unchanged.
        inputs (`Mapping` or `torch.Tensor`):
            Output of a tokenizer, processor or collator: `input_ids` of shape `(B, L)`, `attention_mask`, and further
            arguments of the model. Or `input_ids` alone.
        **kwargs:
            As [`~transformers.GenerationMixin.generate`].

    Returns:
        The output of `model.generate`. The new tokens begin at column `L`, the length of the prompts in `inputs`.

    Raises:
        ValueError: If several rows have no attention mask, if a row is empty, or if a cache is passed.
        NotImplementedError: If the model numbers columns, padding included, and the prompts differ in length.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix import generate

    >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(config)
    >>> settings = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    >>> ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> together = generate(model, {"input_ids": ids, "attention_mask": mask}, **settings)[:, 3:]
    >>> alone = generate(model, {"input_ids": torch.tensor([[8]])}, **settings)[:, 1:]
    >>> torch.equal(together[1:], alone)
    True

    ```
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    require(nn.Module, model=model)
    call = dict(**(inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}), **kwargs)
    with ExitStack() as stack:
        # Per module: `model.train()` would also switch modules that the user keeps in evaluation mode.
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        main = "input_ids" if call.get("input_ids") is not None else "inputs_embeds"
        if model.config.is_encoder_decoder or call.get(main) is None:
            return model.generate(**call)
        require(torch.Tensor, **{main: call[main]})
        if call[main].dim() < 2:
            raise ValueError(f"`{main}` has shape {tuple(call[main].shape)}, not `(B, L)`. Pass a batch of one row.")
        columns = call[main].shape[1]
        call |= _aligned(call, main)
        removed = columns - call[main].shape[1]
        # They count the columns of the prompt.
        call |= {name: call[name] - removed for name in ("max_length", "min_length") if call.get(name)}
        lengths = call["attention_mask"].sum(1)
        if int(lengths.min()) < int(lengths.max()):
            _refuse_counted_columns(model)
        if getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
            # Router logits are for the load-balancing loss. It is not needed here, and fails with a cache: the mask is
            # longer than the one token of each row.
            call.setdefault("output_router_logits", False)
        output = model.generate(**call)
    if removed == 0 or main != "input_ids":
        return output
    # The padding columns that aligning removed: callers cut off the prompts at column `L`.
    pad = next((p for p in (call.get("pad_token_id"), model.generation_config.pad_token_id) if p is not None), 0)
    if isinstance(output, torch.Tensor):
        return nn.functional.pad(output, (removed, 0), value=pad)
    output["sequences"] = nn.functional.pad(output["sequences"], (removed, 0), value=pad)
    return output


def _aligned(call: dict[str, Any], main: str) -> dict[str, torch.Tensor]:
    """The arguments of a call with a value for each token, left-aligned; `main` is the name of ids or embeddings."""
    ids, mask = call[main], call.get("attention_mask")
    if mask is None and ids.shape[0] > 1:
        raise ValueError(
            f"A batch of {ids.shape[0]} prompts has no `attention_mask`, so its padding is unknown. Pass the mask "
            "of the tokenizer, or ones if the prompts are equally long."
        )
    if caches := [name for name in CACHES if call.get(name) is not None]:
        raise ValueError(
            f"The call carries `{caches[0]}`, a cache for the columns of an earlier batch: this batch cannot be "
            "aligned anymore. Generate from the whole prompts, or call `model.generate` on a left-padded batch."
        )
    mask = torch.ones(ids.shape[:2], dtype=torch.int64, device=ids.device) if mask is None else mask
    if mask.dim() == 2 and (empty := (mask.sum(1) == 0).nonzero().flatten().tolist()):
        raise ValueError(f"Prompts {empty} of the batch hold no real token: there is nothing to continue. Drop them.")
    # Ids and mask come first, as in the signature of `left_align`; the union keeps their places.
    tensors = {main: ids, "attention_mask": mask}
    tensors |= {n: v for n, v in call.items() if isinstance(v, torch.Tensor) and v.shape[:2] == ids.shape[:2]}
    return dict(zip(tensors, left_align(*tensors.values()), strict=True))


def _refuse_counted_columns(model: nn.Module) -> None:
    """Refuse prompts of several lengths if padding before a prompt changes the positions of its tokens."""
    remedy = (
        "so a prompt with padding before it would not be continued as when alone. Generate from prompts of one "
        "length at a time, or from one prompt at a time (in evaluation: `per_device_eval_batch_size=1`)."
    )
    if any(config.is_prompt_learning for config in peft_configs_in(model)):
        raise NotImplementedError(f"PEFT puts its virtual tokens before the padding, {remedy}")
    decoder = find_decoder(find_pretrained(model))
    inner = [module for module in decoder.modules() if module is not decoder]
    arguments = [parameters_of(module.forward) for module in inner]
    # Without positions the order of tokens is in a bias of distances (ALiBi) or in a recurrence. Both need the mask to
    # skip padding.
    has_order = any({"alibi", "position_bias"} & a.keys() for a in arguments) or model._is_stateful
    takes_mask = takes(decoder, "attention_mask")
    skips_padding = has_order and takes_mask and any("attention_mask" in a for a in arguments)
    counts_columns = position_embeddings(decoder) or not (takes(decoder, "position_ids") or skips_padding)
    # A compressor merges keys of adjacent columns, padding among them.
    if counts_columns or any(hasattr(module, "compressor") for module in inner):
        raise NotImplementedError(
            f"{type(decoder).__name__} counts the columns of the batch, padding included, {remedy}"
        )
