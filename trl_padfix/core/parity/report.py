"""The result of a comparison of packed with padded."""

from __future__ import annotations

from dataclasses import dataclass

import torch


__all__ = ["Distance", "ParityError", "ParityReport"]


class ParityError(RuntimeError):
    """
    Packed results of a model are wrong: they differ from padded ones and from each row alone. The message has the
    figures.

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
class Distance:
    """Mean and largest difference of scores, and the relative one of their gradient, each with its limit."""

    mean: float
    maximum: float
    mean_tolerance: float
    maximum_tolerance: float
    gradient: float | None = None
    gradient_tolerance: float | None = None

    @property
    def ok(self) -> bool:
        """Whether all differences are within their limits; a NaN never is."""
        return self.scores_agree and (self.gradient is None or self.gradient <= (self.gradient_tolerance or 0))

    @property
    def scores_agree(self) -> bool:
        return self.mean <= self.mean_tolerance and self.maximum <= self.maximum_tolerance

    def __repr__(self) -> str:
        scores = (
            f"mean {self.mean:.2e} (at most {self.mean_tolerance:.0e}), "
            f"largest {self.maximum:.2e} (at most {self.maximum_tolerance:.0e})"
        )
        if self.gradient is None:
            return scores
        return f"{scores}; gradient off by {self.gradient:.2e} of its norm (at most {self.gradient_tolerance:.0e})"


@dataclass(frozen=True, kw_only=True)
class ParityReport(Distance):
    """
    Result of one comparison of scores: natural log-probabilities, or outputs of a reward head.

    Attributes:
        mean, maximum (`float`): Mean and largest absolute difference of a score, packed from padded.
        mean_tolerance, maximum_tolerance (`float`): Limits of these differences.
        gradient, gradient_tolerance (`float`, *optional*):
            Relative difference of the gradient and its limit; `None` if gradients were not compared.
        compared (`int`): Number of compared scores.
        padded_tokens, packed_tokens (`int`): Tokens that entered the decoder in the two forwards.
        dtype (`torch.dtype`): Precision that determines the tolerance.
        implementation (`str`): Attention implementation.
        prefix_sharing (`bool`): Whether prefixes were shared.
        finite (`bool`): Whether the padded forward itself gives finite scores, or each row alone does.
        rounding (`float`, *optional*):
            Mean difference of two padded forwards with different attention functions. The tolerance is a multiple of
            it.
        packed_from_alone, padded_from_alone ([`Distance`], *optional*):
            If packed and padded differ: their differences from each row alone, which decides which of them is wrong.
        alone_dtype (`torch.dtype`, *optional*): The precision of the rows alone.
        longest ([`Distance`], *optional*): The differences of the longest row, packed, from that row alone.
        not_compared (`str`): Why gradients were not compared although requested.
        caveat (`str`): Why results of transformers itself depend on the batch; empty if they do not.
        has_mask (`bool`): Whether the batch shows its padding; otherwise all of its tokens were computed.

    Example:

    ```python
    from trl_padfix import check_parity

    report = check_parity(model, batch)
    print(report.ok, report.maximum, report.maximum_tolerance)
    report.raise_if_failed()  # ParityError if it is not ok
    ```
    """

    compared: int
    padded_tokens: int
    packed_tokens: int
    dtype: torch.dtype
    implementation: str
    prefix_sharing: bool
    finite: bool = True
    rounding: float | None = None
    packed_from_alone: Distance | None = None
    padded_from_alone: Distance | None = None
    alone_dtype: torch.dtype | None = None
    longest: Distance | None = None
    not_compared: str = ""
    caveat: str = ""
    has_mask: bool = True

    @property
    def ok(self) -> bool:
        """Whether packed is right: it agrees with padded, or else with each row alone. A NaN never agrees."""
        return (self.packed_from_alone or super()).ok and (self.longest is None or self.longest.ok)

    @property
    def padded_is_right(self) -> bool:
        """Whether padded agrees with each row alone, as far as rows alone were computed."""
        return self.padded_from_alone is None or self.padded_from_alone.ok

    def __repr__(self) -> str:
        mode = "prefix sharing" if self.prefix_sharing else "padding-free"
        untested = f"not tested, because nothing was {'compared' if self.packed_tokens else 'packed'}"
        verdict = ("ok" if self.packed_tokens and self.compared else untested) if self.ok else "FAILED"
        yardstick = "" if self.rounding is None else f"; scores of two padded forwards differ by {self.rounding:.2e}"
        unmasked = "" if self.has_mask else "; no `attention_mask`: every token counts as real, padding too"
        obstacle = f"; gradients not compared: {self.not_compared}" if self.not_compared else ""
        alone = ""
        if self.packed_from_alone is not None:
            alone = (
                f". From each row alone ({self.alone_dtype}), packed differs by {self.packed_from_alone}; "
                f"padded differs by {self.padded_from_alone}"
            )
        return (
            f"parity {verdict} ({mode}, {self.implementation}, {self.dtype}): difference of "
            f"{self.compared} scores {super().__repr__()}{yardstick}{obstacle}{unmasked}; "
            f"{self.packed_tokens} packed against {self.padded_tokens} padded tokens{alone}"
            + ("" if self.longest is None else f"; the longest row, packed and alone: {self.longest}")
        )

    @property
    def fault(self) -> str:
        """Which forward is wrong, in words; empty if none is."""
        if self.ok and self.padded_is_right:
            return ""
        if self.ok:
            return "The padded forward of this model is wrong, and packed is right: padded differs from each row alone"
        if (self.packed_from_alone or super()).ok:
            return "The packed forward of this model is wrong for its longest row, and shorter rows pass"
        forward = "backward" if (self.packed_from_alone or super()).scores_agree else "forward"
        if self.padded_from_alone is None:
            return f"The packed {forward} of this model differs from the padded one"
        if self.padded_is_right:
            return f"The packed {forward} of this model is wrong: padded equals each row alone, and packed does not"
        return f"The packed {forward} of this model is wrong, as is the padded one: neither equals each row alone"

    def raise_if_failed(self) -> None:
        """
        Raise an error if the packed forward gives wrong numbers.

        Raises:
            ParityError: If a difference is outside tolerance, with the figures; or if scores of the padded forward
                itself are not finite.
        """
        if not self.finite:
            raise ParityError(
                f"The padded forward of this model gives scores that are NaN or infinite ({self.dtype}, "
                f"{self.implementation}), so there is nothing to compare the packed one with, and nothing to train: "
                "look at the weights (`[n for n, p in model.named_parameters() if not p.isfinite().all()]`) and at "
                "the precision. Padding removal is not the cause."
            )
        if not self.ok:
            raise ParityError(
                f"{self}. {self.fault}, so training on it would not be the training you asked for. "
                + (f"{self.caveat}. " if self.caveat else "")
                + ("Use `padding_free=False`" if self.padded_is_right else "Use another attention implementation")
                + (", or `prefix_sharing=False` if that alone passes" if self.prefix_sharing else "")
                + "; `parity_check=False` continues anyway. Please report the model and these figures."
            )
