"""
The hooks of our trainers: methods that TRL's classes have, too, with their parameters.

Scripts that serve several versions of TRL ask which arguments this one has: `inspect.signature(SFTTrainer.__init__)`,
`inspect.getfullargspec`. The mixin's methods take `*args, **kwargs`, because TRL's parameters differ between versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..core.model.inspection import package_of


__all__ = ["as_declared", "hook", "show_parameters"]

PACKAGE = __name__.partition(".")[0]


class hook:  # noqa: N801
    """
    A decorator of a method that TRL's class has, too: TRL's runs alone where none of our fields is set.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from trl_padfix.trainers.signatures import hook

    >>> class Theirs:
    ...     def step(self):
    ...         return "theirs"
    >>> class Ours(Theirs):
    ...     padding = SimpleNamespace(parts=())
    ...
    ...     @hook
    ...     def step(self):
    ...         return "ours, around " + super().step()
    >>> trainer = Ours()
    >>> before, trainer.padding.parts = trainer.step(), ("a part",)
    >>> before, trainer.step()
    ('theirs', 'ours, around theirs')

    ```
    """

    def __init__(self, method: Callable[..., Any]):
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:
        method = self.method

        @wraps(method)
        def passing(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            run = method.__get__(trainer) if trainer.padding.parts else getattr(super(owner, trainer), name)
            return run(*args, **kwargs)

        setattr(owner, name, passing)


def as_declared(method: Callable[..., Any], declared: Callable[..., Any]) -> Callable[..., Any]:
    """
    A function that calls `method` and shows the parameters of `declared`.

    Example:

    ```python
    >>> import inspect

    >>> def declared(self, model, args=None, *, data=None): ...
    >>> def method(self, *args, **kwargs):
    ...     return args, kwargs

    >>> front = as_declared(method, declared)
    >>> inspect.getfullargspec(front).args, front(None, 1, data=2)
    (['self', 'model', 'args'], ((1,), {'data': 2}))

    ```
    """

    @wraps(method)
    def front(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    declared = inspect.unwrap(declared)
    # `typing.get_type_hints` looks up annotations that are strings where `__wrapped__` was written.
    of_declared = {"__signature__": inspect.signature(declared), "__wrapped__": declared, "declared": declared}
    vars(front).update(of_declared, method=method)
    front.__annotations__ = dict(declared.__annotations__)
    return front


def show_parameters(cls: type) -> None:
    """Give the public methods that `cls` has of this package, and its `__init__`, the parameters of the next class."""
    ours = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == PACKAGE]
    names = {name for c in ours for name, value in vars(c).items() if inspect.isfunction(value)}
    for name in (name for name in names if name == "__init__" or not name.startswith("_")):
        current = inspect.getattr_static(cls, name)
        declared = next((vars(c)[name] for c in cls.__mro__ if name in vars(c) and _is_foreign(vars(c)[name])), None)
        if not inspect.isfunction(declared) or _is_foreign(current):
            continue
        # A front is inherited, not made again: what a user later sets on its class holds for subclasses, too.
        if vars(current).get("declared") is not inspect.unwrap(declared):
            setattr(cls, name, as_declared(vars(current).get("method", current), declared))


def _is_foreign(method: Any) -> bool:
    return package_of(method) not in ("", PACKAGE)
