"""Labels that are predicted from padding: a packed forward has no such position, so it cannot score them."""

from __future__ import annotations

from typing import NamedTuple

import torch


__all__ = [
    "FIRST_TOKENS_DROPPED",
    "SCORED_AT_PADDING",
    "SCORED_FROM_PADDING",
    "LabelsAfterPadding",
    "find_labels_after_padding",
]

SCORED_FROM_PADDING = (
    "labels whose previous token the attention mask hides. They are predicted from a masked position, which a packed "
    "forward does not have. To train without padding set these labels to -100: those of padding, and the one after "
    "each hidden span"
)

SCORED_AT_PADDING = (
    "labels at tokens that the attention mask hides. Their states are in the loss of the padded model, and a packed "
    "forward does not have them. To train without padding set these labels to -100"
)

FIRST_TOKENS_DROPPED = (
    "Rows that are padded on the left have a label for their first token, which only padding precedes. It is neither "
    "scored nor counted, so that the loss is that of right padding. Said once."
)


class LabelsAfterPadding(NamedTuple):
    """
    Which labels of a batch follow a masked token.

    Attributes:
        first_tokens (`bool`): Whether a row that is padded on the left has a label for its first token.
        others (`bool`): Whether there are any others: labels of padding, or after a masked span.
    """

    first_tokens: bool
    others: bool

    @classmethod
    def of(cls, labels: torch.Tensor, mask: torch.Tensor) -> LabelsAfterPadding:
        """Read labels and mask, both `(B, L)`; one synchronisation if they are on a device."""
        first, others = find_labels_after_padding(labels, mask)
        return cls(*torch.stack([first.any(), others.any()]).tolist())


def find_labels_after_padding(labels: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Labels that follow a masked token: those of first tokens, and all others; two tensors `(B, L)`, bool.

    Example:

    ```python
    >>> import torch

    >>> labels, mask = torch.tensor([[-100, 5, 6, 7]]), torch.tensor([[0, 1, 0, 1]])
    >>> first, others = find_labels_after_padding(labels, mask)
    >>> first.long(), others.long()
    (tensor([[0, 1, 0, 0]]), tensor([[0, 0, 0, 1]]))

    ```
    """
    is_real = mask.bool()
    # Column 0 has no column before it: losses never score its label.
    follows_padding = torch.nn.functional.pad(~is_real[:, :-1], (1, 0), value=False) & (labels != -100)
    count = is_real.cumsum(1)  # real tokens up to and including each column
    # Padding has no labels. If a masked token at the start of a row has one, the caller hid a token of the sequence.
    begins_hidden = ((count == 0) & (labels != -100)).any(1, keepdim=True)
    begins_row = is_real & (count == 1) & ~begins_hidden
    return follows_padding & begins_row, follows_padding & ~begins_row
