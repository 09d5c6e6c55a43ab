"""
Heads on packed states: an LM head on labels or packed tokens only, the pooling of sequence classifiers, and labels of
token classifiers.

[`LMHeadPatch`] and [`PoolingPatch`] wrap the forward of the model. They record in its [`ModelCall`] which states the
decoder must return. [`HeadPatch`] wraps the projection onto the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..anatomy import gathered_head
from ..call.arguments import DecoderInputs
from ..call.batch_cache import cache_of_call, on_host
from ..call.calls import ModelCall, ScoredLabels, model_call
from ..call.layout_of import layout_of
from ..context import within
from ..errors import UnpackableCallError
from ..handle import PaddingRemoval
from ..layout.layout import pack, to_device_async, unpack
from ..model.changes import has_reader
from ..model.older import has_cache
from ..model.patching import BatchPatch, ForwardPatch
from .plan import check_call


__all__ = [
    "SCORED_AT_PADDING", "SCORED_FROM_PADDING", "HeadPatch", "LMHeadPatch", "PoolingPatch", "TokenLabelsPatch",
    "at_padding", "follow_padding",
]  # fmt: skip

SCORED_FROM_PADDING = (
    "labels whose previous token the attention mask hides. They are predicted from a masked position, which a packed "
    "forward does not have. To train without padding set these labels to -100: at padding, after each hidden "
    "span, and at the first token of a row that is padded on the left"
)

SCORED_AT_PADDING = (
    "labels at tokens that the attention mask hides. Their states are in the loss of the padded model, and a packed "
    "forward does not have them. To train without padding set these labels to -100"
)


def follow_padding(labels: torch.Tensor, mask: torch.Tensor) -> bool:
    """
    Whether a label follows a masked token; labels and mask are both `(B, L)`, on the host.

    Example:

    ```python
    >>> import torch

    >>> mask = torch.tensor([[0, 1, 1]])
    >>> follow_padding(torch.tensor([[-100, 5, 6]]), mask), follow_padding(torch.tensor([[-100, -100, 6]]), mask)
    (True, False)

    ```
    """
    # Column 0 has no column before it: losses never score its label.
    return bool(((labels[:, 1:] != -100) & (mask[:, :-1] == 0)).any())


def at_padding(labels: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a masked token has its own label, both `(B, L)`: in a token classifier, or in `shift_labels`."""
    return bool(((labels != -100) & (mask == 0)).any())


class LMHeadPatch(BatchPatch):
    """
    Runs a fused LM head on the labeled positions of a batch only.

    Without Triton TRL's fused head (`model(..., labels=labels, fused_lm_head=True)`, since 1.15) scores every padded
    position. It also takes `shift_labels`, labels that need no shift. The patch passes the labeled positions as one
    row with `shift_labels`. It scatters the values of the row into `(B, L - 1)`, zero elsewhere, which is the shape
    that the fused head returns for the batch.

    Labels that are predicted from padding cannot be scored packed: a call with such labels is computed padded.
    """

    attachment: PaddingRemoval

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with gathered_head(self.module, self.attachment.decoder):
            return super().call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = self.bind(args, kwargs)
        with cache_of_call():  # the decoder reads the same tensors again
            # A loss takes `shift_labels`, if it gets them, in place of `labels`.
            is_shifted = call.get("shift_labels") is not None
            name, lack_states = ("shift_labels", at_padding) if is_shifted else ("labels", follow_padding)
            if _lack_states(call, name, lack_states):
                with self.attachment.padded(SCORED_FROM_PADDING):
                    return self.wrapped(*args, **kwargs)
            # Some models do not pass the arguments that describe their rows, and `use_cache`, to their decoder.
            names = ("attention_mask", "position_ids", "cu_seq_lens_q", "use_cache")
            row_arguments = {k: v for k, v in call.items() if k in names or k.startswith("tree_")}
            selects_columns = isinstance(call.get("logits_to_keep"), torch.Tensor)
            outer = ModelCall(self.attachment.decoder, model_arguments=row_arguments, selects_columns=selects_columns)
            output = None if is_shifted or not call.get("fused_lm_head") else self._with_fused_head(outer, call)
            if output is not None:
                return output
            with within(model=outer):
                return self.wrapped(**call)

    def _with_fused_head(self, outer: ModelCall, call: dict[str, Any]) -> Any:
        """The output of a fused head that gets the labeled positions as one row; `None` if it must get all of them."""
        labels = call.get("labels")
        if labels is None or not self._can_select_states(call, labels):
            return None
        (host_labels,) = on_host(labels)
        on_cpu = (host_labels[:, 1:] != -100).flatten().nonzero().squeeze(1)
        if on_cpu.numel() == 0:
            return None
        # `index` counts in `(B, L - 1)`, states in `(B, L)`: the label of a position is in the next column.
        index, columns = to_device_async(on_cpu, labels.device), labels.shape[1] - 1
        row, column = index // columns, index % columns
        try:
            local = self._local_labels(call, row * labels.shape[1] + column, labels[row, column + 1])
        except UnpackableCallError:
            return None  # the decoder warns of this error, or raises it
        with within(model=replace(outer, scored_index=local.index, selects_columns=False)):
            output = self.wrapped(**call | {"labels": None, "shift_labels": local.labels.unsqueeze(0)})
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.shape == (1, len(local.labels)):
                values = local.gather(value[0])
                padded = values.new_zeros(len(labels) * columns).index_copy(0, index, values)
                output[name] = padded.view(len(labels), columns)
        local.complete_loss(self.module, output, call.get("num_items_in_batch"))
        return output

    def _can_select_states(self, call: dict[str, Any], labels: torch.Tensor) -> bool:
        """Whether the decoder can return the states of some positions only, and no user hook gets them."""
        decoder, multimodal = self.attachment.decoder, self.attachment.multimodal
        if has_cache(call) or has_reader(decoder) or (multimodal is not None and has_reader(multimodal)):
            return False
        ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
        batch = embeds if ids is None and multimodal is None else ids
        return batch is not None and batch.shape[:2] == labels.shape

    def _local_labels(self, call: dict[str, Any], index: torch.Tensor, labels: torch.Tensor) -> ScoredLabels:
        """
        The labels that this process scores.

        Raises:
            UnpackableCallError: If processes divide the row, and this call cannot be packed.
        """
        handle = self.attachment
        # A head over images selects of the states of all processes.
        if handle.context_parallel is None or handle.multimodal is not None:
            return ScoredLabels(index, labels)
        inputs = DecoderInputs.read(call, handle)  # labels are divided as the tokens of the packed row are
        if (layout := layout_of(inputs, handle)) is None:
            return ScoredLabels(index, labels)
        check_call(handle, inputs, layout)
        return handle.tokens_of(layout).labels(index, labels)


def _lack_states(call: dict[str, Any], name: str, lack: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    """Whether labels `name` of a call that would be packed lack states: by `lack`, of labels and mask `(B, L)`."""
    labels: Any = call.get(name)
    mask: Any = call.get("attention_mask")
    has_both = isinstance(labels, torch.Tensor) and isinstance(mask, torch.Tensor) and not has_cache(call)
    if not has_both or mask.dim() != 2 or mask.shape != labels.shape or mask.device != labels.device:
        return False
    # The decoder will read the others as well: the host waits once for all of them.
    others = (x for x in (call.get("input_ids"), call.get("position_ids")) if isinstance(x, torch.Tensor))
    return lack(*on_host(labels, mask, *others)[:2])


class HeadPatch(ForwardPatch):
    """
    Applies the LM head to the packed tokens of a batch, if the model computes logits for all of it.

    The states `(B, L, H)` of the decoder are packed again: no shared token is projected twice, and no padding at all.
    The logits are unpacked to `(B, L, V)`, zero at padding.
    """

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = model_call(self.attachment.decoder)
        # After two calls of the decoder it is unknown which states these are.
        layout = None if call.selects_columns or len(call.returned) != 1 else call.returned[0]
        # An integer `logits_to_keep` slices columns off the states, so their shape no longer matches the batch.
        if layout is None or not args or args[0].dim() != 3 or tuple(args[0].shape[:2]) != layout.batch_shape:
            return self.wrapped(*args, **kwargs)
        return unpack(self.wrapped(pack(args[0], layout), *args[1:], **kwargs), layout)


class TokenLabelsPatch(BatchPatch):
    """
    Computes a call of a token classifier padded if it has labels at padding.

    A token classifier scores the state of the labeled token itself, and its loss skips only the label -100.
    """

    attachment: PaddingRemoval

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        with cache_of_call():
            scores_padding = _lack_states(self.bind(args, kwargs), "labels", at_padding)
            with self.attachment.padded(SCORED_AT_PADDING) if scores_padding else nullcontext():
                return self.wrapped(*args, **kwargs)


class PoolingPatch(BatchPatch):
    """
    Chooses the token that a sequence classifier scores.

    transformers scores the last token whose id is not `pad_token_id`. If the pad token is the EOS token and a sequence
    ends in it, this is the token before the end. By default that is kept, with one warning: the model must be served
    as it was trained. With `pool_last_token` the decoder returns the state of a row's last real token in every column,
    so any column that the model picks has that state. Pooling, labels and loss stay the model's.

    A call in which the model scores padding is computed padded: the collator's pad token then differs from the
    model's.
    """

    attachment: PaddingRemoval

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        if self.attachment.pool_last_token:
            with within(model=ModelCall(self.attachment.decoder, pools_last=True)):
                return self.wrapped(*args, **kwargs)
        with cache_of_call():
            is_padded = self._scores_padding(self.bind(args, kwargs))
            with self.attachment.disabled() if is_padded else nullcontext():
                return self.wrapped(*args, **kwargs)

    def _scores_padding(self, call: dict[str, Any]) -> bool:
        """Whether the model scores padding, whose state a packed forward does not have. Warns and counts the call."""
        ids, mask = call.get("input_ids"), call.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return False
        pad = self.module.config.get_text_config().pad_token_id
        not_last, is_padding = _pooled_tokens(ids, mask, pad)
        own_pad = (
            "Give the tokenizer a pad token of its own (`tokenizer.add_special_tokens({'pad_token': '<pad>'})`, "
            "`model.config.pad_token_id = tokenizer.pad_token_id`, `model.resize_token_embeddings(len(tokenizer))`)"
        )
        last = "the last real token with `pool_last_token=True`."
        # Without a pad token transformers raises an error for several rows, which no choice of a state prevents.
        remedy = f"{own_pad}." if pad is None else f"Score {last}" if ids is None else f"{own_pad}, or score {last}"
        if rows := is_padding.nonzero().flatten().tolist():
            # Raises the error if the handle is strict.
            self.attachment.run_padded(
                UnpackableCallError(
                    "scored padding",
                    f"{type(self.module).__name__} scores the last token that is not `pad_token_id={pad}` (without "
                    f"ids, as with prompt tuning, the last column), and in rows {rows} of the batch that is padding "
                    f"by the attention mask: the score depends on the padding. {remedy}",
                )
            )
            return True
        if not_last.any():
            self.attachment.say_once(
                f"In {int(not_last.sum())} of {len(mask)} rows of this batch {type(self.module).__name__} scores "
                f"a token other than the last one: they end in `pad_token_id={pad}`, which it takes for padding. The "
                f"served model does the same. {remedy} (Shown once.)",
                "pooled token",
            )
        return False


def _pooled_tokens(
    ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The token of each row that a sequence classifier of transformers scores: the last one that is not the pad token.

    Returns, for each row, whether it is not the last real token, and whether it is padding; both `(B,)`, bool.
    """
    ids, mask = on_host(ids, mask)
    column = torch.arange(mask.shape[1])
    # Without ids or a pad token transformers scores the last column.
    is_candidate = torch.ones_like(mask) if ids is None or pad_token_id is None else ids != pad_token_id
    pooled = (is_candidate * column).argmax(1)  # the last candidate; column 0 if there is none, as in transformers
    last = (mask.bool() * column).argmax(1)
    return pooled != last, mask.gather(1, pooled[:, None]).squeeze(1) == 0
