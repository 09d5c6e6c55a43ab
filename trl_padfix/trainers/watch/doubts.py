"""What steps have relied on, read where the host waits for the device anyway."""

from __future__ import annotations

from ...core.call.step import Doubt, check_doubts


__all__ = ["Doubts"]


class Doubts:
    """
    Collects the doubts of steps.

    On a CPU they are read after each forward; on another device before something is logged or saved.
    """

    most = 64
    """Steps whose doubts are not read yet, at most."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[Doubt], str]] = []

    def add(self, doubts: list[Doubt], of: str) -> None:
        """
        Keep what a step relied on.

        Args:
            doubts (`list` of [`Doubt`]):
                What it noted.
            of (`str`):
                Which step it is, for the message.

        Raises:
            PaddingRemovalError: If something did not hold, where that can be seen without a wait.
        """
        if doubts:
            self._steps.append((doubts, of))
        if len(self._steps) >= self.most or all(doubt.wrong.device.type == "cpu" for doubt in doubts):
            self.read()

    def read(self) -> None:
        """
        Read all of them; waits for the device.

        Raises:
            PaddingRemovalError: If something did not hold, so that numbers of a step are wrong.
        """
        steps, self._steps = self._steps, []
        for doubts, of in steps:
            check_doubts(doubts, of)
