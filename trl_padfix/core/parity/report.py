"""The result of a comparison of packed with padded."""

from __future__ import annotations

from dataclasses import dataclass

import torch


__all__ = ["ParityError", "ParityReport"]


class ParityError(RuntimeError):
    """
    The packed forward of a model differs from its padded forward; the message has the figures.

    Raised by a trainer on its first batches, and by [`ParityReport.raise_if_failed`].

    Example:

    ```python
    from trl_padfix import ParityError, check_parity

    try:
        check_parity(model, batch).raise_if_failed()
    except ParityError as error:
        print(error)
    ```
    """


@dataclass(frozen=True)
class ParityReport:
    """
    Result of one comparison of scores: natural log-probabilities, or outputs of a reward head.

    Attributes:
        mean, maximum (`float`): Mean and largest absolute difference of a score.
        mean_tolerance, maximum_tolerance (`float`): Limits of these differences.
        compared (`int`): Number of compared scores.
        padded_tokens, packed_tokens (`int`): Tokens that entered the decoder in the two forwards.
        dtype (`torch.dtype`): Precision that determines the tolerance.
        implementation (`str`): Attention implementation.
        prefix_sharing (`bool`): Whether prefixes were shared.
        finite (`bool`): Whether the padded forward itself gives finite scores.
        rounding (`float`, *optional*):
            Mean difference of two padded forwards with different attention functions. The tolerance is a multiple of
            it.
        gradient, gradient_tolerance (`float`, *optional*):
            Relative difference of the gradient and its limit; `None` if gradients were not compared.
        not_compared (`str`): Why gradients were not compared although requested.
        caveat (`str`): Why results of transformers itself depend on the batch; empty if they do not.

    Example:

    ```python
    from trl_padfix import check_parity

    report = check_parity(model, batch)
    print(report.ok, report.maximum, report.maximum_tolerance)
    report.raise_if_failed()  # ParityError if it is not ok
    ```
    """

    mean: float
    maximum: float
    mean_tolerance: float
    maximum_tolerance: float
    compared: int
    padded_tokens: int
    packed_tokens: int
    dtype: torch.dtype
    implementation: str
    prefix_sharing: bool
    finite: bool = True
    rounding: float | None = None
    gradient: float | None = None
    gradient_tolerance: float | None = None
    not_compared: str = ""
    caveat: str = ""

    @property
    def ok(self) -> bool:
        """Whether all differences are within tolerance; a NaN never is."""
        within_tolerance = self.gradient is None or self.gradient <= (self.gradient_tolerance or 0)
        return self._forward_is_right and within_tolerance

    @property
    def _forward_is_right(self) -> bool:
        return self.mean <= self.mean_tolerance and self.maximum <= self.maximum_tolerance

    def __str__(self) -> str:
        mode = "prefix sharing" if self.prefix_sharing else "padding-free"
        yardstick = "" if self.rounding is None else f", where two padded forwards differ by {self.rounding:.2e}"
        gradient = f"; gradients not compared: {self.not_compared}" if self.not_compared else ""
        if self.gradient is not None:
            gradient = f"; gradient off by {self.gradient:.2e} of its norm (at most {self.gradient_tolerance:.0e})"
        return (
            f"parity {'ok' if self.ok else 'FAILED'} ({mode}, {self.implementation}, {self.dtype}): difference of "
            f"{self.compared} scores mean {self.mean:.2e} (at most {self.mean_tolerance:.0e}), "
            f"largest {self.maximum:.2e} (at most {self.maximum_tolerance:.0e}){yardstick}{gradient}; "
            f"{self.packed_tokens} packed against {self.padded_tokens} padded tokens"
        )

    def raise_if_failed(self) -> None:
        """
        Raises:
            ParityError: If a difference is outside tolerance, with the figures; or if scores of the padded forward
                itself are not finite.
        """
        if not self.finite:
            raise ParityError(
                f"The padded forward of this model gives scores that are NaN or infinite ({self.dtype}, "
                f"{self.implementation}), so there is nothing to compare the packed one with, and nothing to train: "
                "look at the weights (`[n for n, p in model.named_parameters() if not p.isfinite().all()]`) and at "
                "the precision. Removing padding has no part in it."
            )
        if not self.ok:
            raise ParityError(
                f"{self}. The packed {'backward' if self._forward_is_right else 'forward'} of this model differs from "
                "the padded one, so training on it would not be the training you asked for. "
                + (f"{self.caveat}. " if self.caveat else "")
                + "Use `padding_free=False`"
                + (", or `prefix_sharing=False` if that alone passes" if self.prefix_sharing else "")
                + "; `parity_check=False` trains on regardless. Please report the model and these figures."
            )
