"""The handle of padding removal: its parts, settings and token counts. State of one call is in `call/calls.py`."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import logging

from .anatomy import Anatomy, find_decoder, find_pretrained, restore_attention
from .call.calls import LocalTokens, PackedCall, packed_call, rows_call
from .context import context, in_backward
from .errors import UnpackableCallError
from .layout.layout import Layout
from .layout.shared_prefixes import PrefixedLayout
from .model.changes import ModuleChanges
from .model.inspection import takes, takes_any_argument
from .model.older import resume_packed_search, spare_packed_search
from .model.patching import Attachment, ForwardPatch, patches_on
from .parallel.collectives import Group
from .parallel.local import tokens_of


if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Lengths", "PaddingRemoval", "PaddingStats", "PrefixSharing", "check_multiple", "check_prefix_sharing"]

logger = logging.get_logger(__name__)

PrefixSharing = bool | Literal["auto"]
"""Whether shared prefixes are computed once; `True` also warns where sharing is impossible."""

Lengths = int | Sequence[int]
"""Lengths of packed rows: multiples of one number, or one of several numbers in ascending order."""


def check_prefix_sharing(prefix_sharing: Any) -> None:
    """Raise a `ValueError` for a value that `prefix_sharing` cannot have."""
    if not isinstance(prefix_sharing, bool) and prefix_sharing != "auto":
        raise ValueError(f"`prefix_sharing` is True, False or 'auto', got {prefix_sharing!r}.")


def check_multiple(packed_multiple_of: Any) -> None:
    """Raise a `ValueError` for a value that `packed_multiple_of` cannot have."""
    if packed_multiple_of is None:
        return
    lengths = packed_multiple_of if isinstance(packed_multiple_of, list | tuple) else [packed_multiple_of]
    are_numbers = lengths and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in lengths)
    if not are_numbers or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(
            "`packed_multiple_of` is a number of tokens, such as 64 or 128, a list of lengths in ascending order, "
            f"such as [1024, 2048, 4096], or None; got {packed_multiple_of!r}."
        )


@dataclass
class PaddingStats:
    """
    Token counts of the packed forwards, summed since attachment or the last [`PaddingStats.reset`].

    Attributes:
        padded_tokens (`int`): Tokens that the decoder would have computed padded, `B * L` per forward. The parts of a
            batch within a token budget count the `L` of the batch.
        real_tokens (`int`): Tokens that are not padding.
        packed_tokens (`int`): Tokens that the decoder computed, without filler.
        forwards (`int`): Number of packed forwards.
        shared_forwards (`int`): Number of forwards that computed some prefix once for several rows.
        padded_forwards (`int`): Forwards that ran padded, because they could not be packed; a step that is
            padded as a whole counts once for each model. Their tokens are not among those above.
        filler_tokens (`int`): Tokens computed only to lengthen packed rows (`packed_multiple_of`).

    Example:

    ```python
    >>> from trl_padfix import PaddingStats

    >>> stats = PaddingStats(padded_tokens=100, real_tokens=60, packed_tokens=45)
    >>> stats.pad_fraction, stats.shared_fraction  # of the padded tokens, of the real ones
    (0.4, 0.25)

    ```
    """

    padded_tokens: int = 0
    real_tokens: int = 0
    packed_tokens: int = 0
    forwards: int = 0
    shared_forwards: int = 0
    padded_forwards: int = 0
    filler_tokens: int = 0

    def __repr__(self) -> str:
        counts = (f"{name}={count}" for name, count in vars(self).items() if count or name != "filler_tokens")
        return f"{type(self).__name__}({', '.join(counts)})"

    @property
    def pad_fraction(self) -> float:
        """Fraction of the padded tokens that is padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def shared_fraction(self) -> float:
        """Fraction of the real tokens that needed no computation, because another row has the same prefix."""
        return 1 - self.packed_tokens / self.real_tokens if self.real_tokens else 0.0

    def add(self, layout: Layout) -> None:
        """Count one forward with this layout."""
        computed = layout.computed_tokens
        with _counting:
            self.packed_tokens += computed
            self.filler_tokens += layout.filler or 0
            if isinstance(layout, PrefixedLayout) and layout.is_prefix:
                return  # a prefix forward: its rows are counted by the micro-batches that read the prefix
            self.padded_tokens += layout.padded_tokens + layout.batch_shape[0] * context().left_out
            self.real_tokens += layout.real_tokens
            self.forwards += 1
            self.shared_forwards += computed < layout.real_tokens

    def __sub__(self, before: PaddingStats) -> PaddingStats:
        """The counts since `before`."""
        return PaddingStats(**{name: count - vars(before)[name] for name, count in vars(self).items()})

    def reset(self) -> None:
        """Set all counts to zero."""
        self.__init__()


_counting = threading.Lock()
"""Threads may share a model, and `+=` on an attribute is not atomic."""


class PaddingRemoval(Attachment):
    """
    Handle that [`remove_padding`] returns; a context manager that detaches at its end.

    Attributes:
        decoder (`torch.nn.Module`):
            The decoder that packs its calls.
        multimodal (`torch.nn.Module`, *optional*):
            The module around the decoder that turns images and other inputs into embeddings.
        anatomy ([`Anatomy`]):
            All parts of the model that padding removal works on.
        prefix_sharing (`bool` or `"auto"`):
            Whether a prefix that several rows have in common is computed once.
        pool_last_token (`bool`):
            Whether a sequence classifier scores the last token of the mask instead of the last that is not a pad
            token.
        strict (`bool`):
            Whether a call that cannot be packed raises an error. By default it is computed padded, with a warning.
        packed_multiple_of (`int` or `list[int]`, *optional*):
            Filler lengthens each packed row to a multiple of this number, or to one of these lengths. With context
            parallelism this is the length of one process's part.
        context_parallel ([`Group`], *optional*):
            The processes that compute each packed row together; see [`split_rows`].
        stats ([`PaddingStats`]):
            Token counts of the packed forwards.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> from trl_padfix import remove_padding

    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                                      num_attention_heads=2, num_key_value_heads=1))
    >>> ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]])  # (B, L)
    >>> handle = remove_padding(model, prefix_sharing="auto")
    >>> model(ids, attention_mask=(ids > 0).long()).logits.shape  # (B, L, V), as without it
    torch.Size([2, 4, 32])
    >>> handle.stats.packed_tokens, handle.stats.padded_tokens
    (5, 8)
    >>> handle.remove()

    ```
    """

    def __init__(
        self,
        anatomy: Anatomy,
        *,
        prefix_sharing: PrefixSharing = False,
        pool_last_token: bool = False,
        strict: bool = False,
        packed_multiple_of: Lengths | None = None,
    ):
        super().__init__(anatomy.pretrained)
        self.anatomy = anatomy
        self.decoder, self.multimodal = anatomy.decoder, anatomy.multimodal
        self.prefix_sharing: PrefixSharing = prefix_sharing
        self.pool_last_token = pool_last_token
        self.strict = strict
        self.packed_multiple_of = packed_multiple_of
        self.token_budget: int | None = None  # from a trainer; forwards with more real tokens always share prefixes
        # Mamba's decoder accepts positions among its `**kwargs` and ignores them; its layout still depends on them.
        self.takes_positions = takes(self.decoder, "position_ids") or takes_any_argument(self.decoder)
        # Their statistics are of all tokens of a batch, padding included.
        self.batch_norms = [m for m in self.decoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.context_parallel: Group | None = None
        self.stats = PaddingStats()
        self.attention_before: list[tuple[PretrainedConfig, str | None]] = []  # values to restore
        self.changes: ModuleChanges | None = None  # finds hooks and modules that are new since attachment
        self.name = "handle"  # in messages: where a user finds it
        self._reported: set[str] = set()

    def tokens_of(self, layout: Layout) -> LocalTokens:
        """The tokens of a packed row that this process computes."""
        return LocalTokens(layout) if self.context_parallel is None else tokens_of(layout, self.context_parallel)

    @property
    def running_stats(self) -> PaddingStats:
        """The counts of the forwards of this thread: `stats`, or those of a running comparison."""
        return context().stats or self.stats

    def count(self, layout: Layout) -> None:
        """Count a packed forward; not its recomputation in a backward."""
        if not in_backward():
            self.running_stats.add(layout)

    @property
    def is_strict(self) -> bool:
        """Whether a call of this thread that cannot be packed raises an error."""
        return self.strict or context().strict

    def say_once(self, message: str, kind: str | None = None, tell: Callable[[str], None] = logger.warning) -> None:
        """Tell a message, unless this handle has told one of this `kind`; by default the message is its kind."""
        kind = message if kind is None else kind
        if kind not in self._reported:
            self._reported.add(kind)
            tell(self._named(message))

    def _named(self, message: str) -> str:
        return re.sub(r"\bhandle(?=\.\w)", self.name, message)

    @contextmanager
    def padded(self, reason: str, is_told: bool = True) -> Iterator[None]:
        """Run the forwards of a block padded, counted as one; `reason` completes "The forward has ..." in a log."""
        self._reported |= set() if is_told else {reason}
        self.run_padded(UnpackableCallError(reason, f"The forward has {reason}."))
        with self.disabled():
            yield

    def accept_hooks(self) -> None:
        """Pack calls although hooks were registered on modules of the decoder since attachment."""
        if self.changes is not None:
            self.changes.accept_hooks()

    def run_padded(self, error: UnpackableCallError) -> None:
        """
        Count a call that is computed padded, and warn about it, once for each kind of error.

        Raises:
            UnpackableCallError: `error` itself, if the handle is `strict`, or if the step shares prefixes across its
                micro-batches: a padded micro-batch would compute these prefixes again, and leave others without them.
        """
        planned = context().planned
        if self.is_strict or (planned is not None and isinstance(planned.layout, PrefixedLayout)):
            error.args = (self._named(str(error)),)
            raise error
        with _counting:
            self.running_stats.padded_forwards += 1
        self.say_once(
            f"A forward of {type(self.decoder).__name__} runs padded, as without this package: no work is "
            f"saved. {error} `handle.stats.padded_forwards` counts such forwards. (Shown once for this reason.)",
            error.kind,
        )

    @property
    def has_changed(self) -> bool:
        """Whether calls are computed padded, because a module of the decoder has a new hook, or was replaced."""
        try:
            if self.changes is not None:
                self.changes.check()
        except UnpackableCallError:
            return True
        return False

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The handle of the padding removal of a model, or of its deep copy; `None` if the model computes padded."""
        attached = (patch.attachment for patch in patches_on(find_decoder(find_pretrained(model))))
        return next((attachment for attachment in attached if isinstance(attachment, cls)), None)

    def attach(self, patches: Iterable[ForwardPatch]) -> Self:
        # transformers searches `position_ids` for packed sequences, and the host waits for the result. Packed forwards
        # have a layout and need no search.
        spare_packed_search(self, _are_packed)
        super().attach(patches)
        self.changes = ModuleChanges(self.decoder, [patch.module for patch in self._patches])
        return self

    def remove(self) -> None:
        """
        Detach: the model computes as before attachment. Removing twice does no harm.

        If gradient checkpointing still has to recompute a packed forward, the patches that this needs stay until the
        graph of that forward is freed.
        """
        super().remove()
        if not self._patches:
            resume_packed_search(self)
            restore_attention(self.attention_before)
            self.attention_before, self.changes = [], None

    def remember(self, call: PackedCall) -> None:
        """Record a packed forward for as long as gradient checkpointing can recompute it."""
        # The graph of the forward holds `call` in the arguments of its checkpoints: it is freed together with them.
        self._recomputable.add(id(call))
        weakref.finalize(call, self._forget, id(call)).atexit = False

    def _forget(self, call: int) -> None:
        self._recomputable.discard(call)
        if self.is_detached:
            self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.decoder).__name__}, {self.state}, {self.stats})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no graph to recompute.
        state = "copied" if self.state in ("attached", "in use") else self.state
        return vars(self) | {"_recomputable": set(), "state": state}


def _are_packed(position_ids: torch.Tensor, or_rows: bool) -> bool:
    """Whether `position_ids` belong to the running packed forward or, with `or_rows`, to its dry run over rows."""
    call = packed_call() or (rows_call() if or_rows else None)
    # By address: the decoder passes on a view of the tensor. Comparing values would wait for the device.
    return call is not None and position_ids.data_ptr() == call.position_ids.data_ptr()
