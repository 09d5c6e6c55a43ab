"""
Heads on packed states: language modelling on labels only or on packed tokens only, and the pooling of classifiers.

[`LMHeadPatch`] and [`PoolingPatch`] stand at the door of the model, and say in its [`ModelCall`] which states the
decoder is to return; [`HeadPatch`] stands at the projection onto the vocabulary.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch
from transformers.utils import logging

from .call.arguments import bind
from .call.batch_metadata import Pooled, VerifiedMetadata, defer_check, facts_of, pooled_tokens, share_layouts_in_call
from .call.calls import ModelCall, model_call
from .context import within
from .errors import PaddingRemovalError
from .layout.layout import Layout, pack, unpack
from .model.patching import Attachment, ForwardPatch
from .model.sharded import gathered_head
from .parallel.layout import ContextParallelLayout


__all__ = ["HeadPatch", "LMHeadPatch", "PoolingPatch", "skip_first_comparison"]

logger = logging.get_logger(__name__)


class LMHeadPatch(ForwardPatch):
    """
    Runs a fused LM head on the labelled positions of a batch only, and lets no label be predicted from padding.

    TRL's fused head (`model(..., labels=labels, fused_lm_head=True)`, since 1.10) scores every padded position where
    there is no Triton. It also takes `shift_labels`, labels that need no shift: the labelled positions of the batch
    are handed to it as one row, and what it returns for them is laid out over `(B, L - 1)`, zero elsewhere, as it
    would have done itself.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.word = VerifiedMetadata()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with gathered_head(self.module, self.attachment.decoder):
            return super().call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        labels, decoder = kwargs.get("labels"), self.attachment.decoder
        if not kwargs.get("fused_lm_head"):
            call = bind(self.wrapped, args, kwargs)
            selects = isinstance(call.get("logits_to_keep"), torch.Tensor)
            with within(model=ModelCall(decoder, given=_row_arguments(call), selects=selects)):
                return self.wrapped(**(call | self._predictable(call)))
        if labels is None or kwargs.get("shift_labels") is not None:
            return self.wrapped(*args, **kwargs)
        call = bind(self.wrapped, args, {k: v for k, v in kwargs.items() if k not in ("labels", "fused_lm_head")})
        with share_layouts_in_call():  # the decoder finds the layout that is made here
            layout = self.attachment.layout_of(call) if self.attachment.multimodal is None else None
            if not self._returns_states_at_places(call, labels, layout):
                return self.wrapped(*args, **kwargs)
            index = self._places(labels, call.get("input_ids"), call.get("attention_mask"))
            if index.numel() == 0:
                return self.wrapped(*args, **kwargs)
            columns = labels.shape[1] - 1
            row, column = index // columns, index % columns
            own = OwnLabels(
                row * labels.shape[1] + column, labels[row, column + 1], self.attachment.cp_layout_of(layout)
            )
            more = {**kwargs, "labels": None, "shift_labels": own.labels.unsqueeze(0)}
            with within(model=ModelCall(decoder, scored=own.places, given=_row_arguments(call))):
                output = _without_selecting(self.wrapped)(*args, **more)
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.shape == (1, len(own.labels)):
                values = own.told(value[0])
                spread = values.new_zeros(len(labels) * columns).index_copy(0, index, values)
                output[name] = spread.view(len(labels), columns)
        if own.cp_layout is not None and output.get("loss") is not None:
            output["loss"] = self._loss(output, kwargs.get("num_items_in_batch"), index.numel())
        return output

    def _loss(self, output: Any, items: Any, labels: int) -> torch.Tensor:
        """The loss of the head from what all processes have computed; what it said itself is that of own labels."""
        loss = -output["log_probs"].sum() / (labels if items is None else items)
        if output.get("aux_loss") is None:
            return loss
        config = self.module.config.get_text_config()
        return loss + getattr(config, "router_aux_loss_coef", 0.0) * output["aux_loss"]

    def _places(self, labels: torch.Tensor, ids: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
        """Places of `(B, L - 1)` from which a label is predicted: as the batch came with them, if it did."""
        # A label is predicted from the column before it. Where that is padding there is nothing to predict it from.
        target = labels[:, 1:] != -100
        if mask is not None:
            target = target & mask[:, :-1].bool()
        facts = facts_of(ids, mask)
        if facts is not None and facts.scored is not None:
            known = target.new_zeros(target.numel()).index_fill(0, facts.scored, True).view_as(target)
            if self.word.verify("The labels of the batch are where its collator saw them", (known != target).any(1)):
                return facts.scored
        return target.flatten().nonzero().squeeze(1)

    def _returns_states_at_places(self, call: dict[str, Any], labels: torch.Tensor, layout: Layout | None) -> bool:
        """Whether the decoder can be asked for the states at some places of a call of the model only."""
        if self.attachment.multimodal is None:
            return layout is not None and tuple(labels.shape) == layout.batch_shape
        ids = call.get("input_ids")
        return ids is not None and ids.shape == labels.shape and call.get("past_key_values") is None

    def _predictable(self, call: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Labels with those predicted from padding removed."""
        labels: Any = call.get("labels")
        mask: Any = call.get("attention_mask")
        cached = call.get("past_key_values") is not None or call.get("use_cache") is True
        both = isinstance(labels, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.shape == labels.shape
        if cached or not both or not self.attachment.packs_padded:
            return {}
        follows = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1) == 0
        return {"labels": labels.masked_fill(follows, -100)}


def _without_selecting(forward: Any) -> Any:
    """
    TRL's fused head for labels that are all labels.

    Where there is Triton it selects the labelled positions, and the host waits twice in the forward and twice in the
    backward to learn how many they are. Its other way, without Triton, scores every position in the same kernels.
    """
    if not isinstance(forward, MethodType) or "_use_triton" not in forward.__func__.__code__.co_names:
        return forward
    function = forward.__func__
    names = function.__globals__ | {"_use_triton": lambda device: False}
    told = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    told.__kwdefaults__ = function.__kwdefaults__
    return MethodType(told, forward.__self__)


def _row_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of a model say of its rows, and of a cache."""
    return {k: v for k, v in call.items() if k in ("attention_mask", "position_ids", "cu_seq_lens_q", "use_cache")}


def skip_first_comparison(attachment: Attachment) -> None:
    """Take the labels' places of the first batch too from its layout; for a benchmark that attaches in every step."""
    for patch in attachment._patches:
        if isinstance(patch, LMHeadPatch):
            patch.word.holds = True


class OwnLabels:
    """
    The labels that this process scores, `(n,)`, and the places in the flattened batch from which they are predicted.

    All labels, or with `cp_layout` those of own tokens; a process without any scores one token, for nothing.
    """

    def __init__(self, places: torch.Tensor, labels: torch.Tensor, cp_layout: ContextParallelLayout | None):
        self.places, self.labels, self.cp_layout = places, labels, cp_layout
        if cp_layout is None:
            return
        layout, rank = cp_layout.layout, cp_layout.group.rank
        owner = cp_layout.owners(layout.packed_positions_of(places))
        self._order = owner.argsort(stable=True).argsort()
        self._counts = owner.bincount(minlength=cp_layout.group.size).tolist()
        self.places, self.labels = places[owner == rank], labels[owner == rank]
        if not self._counts[rank]:  # every process has its part in each exchange of backward
            self.places = cp_layout.cut(layout.packed_index)[:1]
            self.labels = labels.new_full((1,), -100)

    def told(self, values: torch.Tensor) -> torch.Tensor:
        """What all processes say of their labels, one number for each, in the order of all labels."""
        if self.cp_layout is None:
            return values
        group = self.cp_layout.group
        own = values[: self._counts[group.rank]]
        told = group.told(own.byte() if own.dtype == torch.bool else own, self._counts).index_select(0, self._order)
        return told.to(values.dtype)


class HeadPatch(ForwardPatch):
    """
    Applies the LM head to the packed tokens of a batch, where a model builds logits for all of it.

    What the decoder gave `(B, L, H)` for is packed again, so that no token is projected onto the vocabulary twice and
    no padding at all; the logits are laid out over `(B, L, V)`, zero at padding.
    """

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = model_call(self.attachment.decoder)
        layout = call.layout if call is not None and not call.selects else None
        # A number for `logits_to_keep` leaves a slice of the columns.
        if layout is None or not args or args[0].dim() != 3 or tuple(args[0].shape[:2]) != layout.batch_shape:
            return self.wrapped(*args, **kwargs)
        return unpack(self.wrapped(pack(args[0], layout), *args[1:], **kwargs), layout)


class PoolingPatch(ForwardPatch):
    """
    Sees to the token that a sequence classifier scores.

    transformers scores the last token whose id is not the pad token's. Where the pad token is the EOS token and a
    sequence ends in it, that is the token before: the state that is scored has not seen the end. By default it stays
    so, and is said once: a model is served as it was trained. With `pool_last_token` the decoder answers with the
    state of a row's last real token in every column, so whichever the model picks is that one; pooling, labels and
    loss stay the model's.
    """

    _said = False

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        decoder = self.attachment.decoder
        if self.attachment.pool_last_token:
            with within(model=ModelCall(decoder, pools_last=True)):
                return self.wrapped(*args, **kwargs)
        self._check_pooled(bind(self.wrapped, args, kwargs))
        return self.wrapped(*args, **kwargs)

    def _check_pooled(self, call: dict[str, Any]) -> None:
        """Raise a [`PaddingRemovalError`] if padding would be scored, which has no state here."""
        ids, mask = call.get("input_ids"), call.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return
        pad = self.module.config.get_text_config().pad_token_id
        facts = facts_of(ids, mask)
        pooled = facts.pooled if facts is not None else None
        if pooled is None or pooled.pad_token_id != pad:
            pooled = Pooled.of(ids, mask, pad)
        elif not any(pooled.padding):
            defer_check("No padding of the batch is scored", pooled_tokens(ids, mask, pad)[1])
        remedy = (
            "Give the tokenizer a pad token of its own (`tokenizer.add_special_tokens({'pad_token': '<pad>'})`, "
            "`model.resize_token_embeddings(len(tokenizer))`, `model.config.pad_token_id = tokenizer.pad_token_id`), "
            "or score the last token of the attention mask: `pool_last_token=True`."
        )
        if any(pooled.padding):
            rows = [row for row, is_padding in enumerate(pooled.padding) if is_padding]
            raise PaddingRemovalError(
                f"{type(self.module).__name__} scores the last token that is not `pad_token_id={pad}`, and in rows "
                f"{rows} of the batch that is padding by the attention mask: the score would depend on the padding. "
                f"{remedy}"
            )
        if any(pooled.others) and not self._said:
            self._said = True
            logger.warning(
                f"In {sum(pooled.others)} of {len(mask)} rows of this batch {type(self.module).__name__} scores "
                f"another token than the last one: they end in `pad_token_id={pad}`, which it takes for padding. So "
                f"does the model when it is served. {remedy} Said once."
            )
