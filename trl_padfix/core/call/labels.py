"""Labels that only padding predicts: a packed forward has no such position, so it cannot score them."""

from __future__ import annotations

import torch


__all__ = ["SCORED_AT_PADDING", "SCORED_FROM_PADDING", "at_padding", "follow_padding"]

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
