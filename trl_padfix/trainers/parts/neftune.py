"""NEFTune against shared prefixes: its noise differs in every row, so no two rows begin with equal embeddings."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger

from ...core.errors import PaddingRemovalError
from ...core.handle import PrefixSharing


__all__ = ["prefix_sharing_with_neftune"]

logger = get_logger(__name__)


def prefix_sharing_with_neftune(prefix_sharing: PrefixSharing, args: Any) -> PrefixSharing:
    """
    The `prefix_sharing` of a training: under NEFTune (`args.neftune_noise_alpha`) `"auto"` becomes `False`.

    Raises:
        PaddingRemovalError: If `prefix_sharing` is `True` under NEFTune.
    """
    if not prefix_sharing or args is None or not args.neftune_noise_alpha:
        return prefix_sharing
    if prefix_sharing == "auto":
        logger.info("prefix_sharing='auto': nothing is shared, because NEFTune's noise differs between rows.")
        return False
    raise PaddingRemovalError(
        "`neftune_noise_alpha` gives each token of each row its own noise, so no two rows begin the same and "
        "there is no prefix to share. Set `prefix_sharing=False`: padding is still removed, with the noise of "
        "the padded batch."
    )
