"""The field `prefix_sharing`, as flags, YAML and Python give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from transformers.hf_argparser import string_to_bool


__all__ = ["Sharing", "check_prefix_sharing"]

if TYPE_CHECKING:
    Sharing = bool | Literal["auto"]
else:

    class Sharing:
        """What `--prefix_sharing` stands for on the command line and in YAML: `True`, `False` or `"auto"`."""

        def __new__(cls, value: str) -> bool | str:
            return "auto" if value.strip().lower() == "auto" else string_to_bool(value)


def check_prefix_sharing(config: Any) -> None:
    """
    Raises:
        ValueError: If `prefix_sharing` is set without `padding_free`, or is neither `True`, `False` nor `"auto"`.
    """
    value = getattr(config, "prefix_sharing", False)
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"`prefix_sharing` is True, False or 'auto', got {value!r}.")
    if value and not config.padding_free:
        raise ValueError(
            f"`prefix_sharing={value}` needs `padding_free=True`: prefixes are shared in the packed row, and without "
            "it there is none. Set both, or neither."
        )
