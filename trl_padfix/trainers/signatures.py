"""
Methods that show the parameters of TRL's.

Scripts that serve several versions of TRL ask which arguments this one has: `inspect.signature(SFTTrainer.__init__)`,
`inspect.getfullargspec`, `__code__.co_varnames`. The mixin's methods take `*args, **kwargs`, because TRL's parameters
differ between versions. [`as_declared`] gives them a front with those of the installed one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..core.model.inspection import package_of


__all__ = ["as_declared", "show_parameters"]

PACKAGE = __name__.partition(".")[0]


def as_declared(method: Callable[..., Any], declared: Callable[..., Any]) -> FunctionType:
    """
    A function with the parameters of `declared` that calls `method`.

    Example:

    ```python
    >>> import inspect

    >>> def declared(self, model, args=None, *, data=None): ...
    >>> def method(self, *args, **kwargs):
    ...     return args, kwargs

    >>> front = as_declared(method, declared)
    >>> inspect.getfullargspec(front).args, front(None, 1, data=2)
    (['self', 'model', 'args'], ((1, None), {'data': 2}))

    ```
    """
    declared = inspect.unwrap(declared)
    parameters = inspect.signature(declared).parameters.values()
    prefixes = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [prefixes.get(p.kind, "") + p.name for p in parameters]
    given = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else n for p, n in zip(parameters, names, strict=True)]
    keyword_only = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if keyword_only and not any(name.startswith("*") and not name.startswith("**") for name in names):
        names.insert(keyword_only[0], "*")
    namespace: dict[str, Any] = {}
    # As `dataclasses` makes an `__init__`: only a function compiled with these names has them in its `__code__`.
    exec(
        f"def front(method):\n def shown({', '.join(names)}):\n  return method({', '.join(given)})\n return shown",
        namespace,
    )
    made = namespace["front"](method)
    code = made.__code__.replace(co_name=declared.__name__)  # which may be `<lambda>`
    # Annotations that are strings are looked up where `declared` was written.
    front = FunctionType(code, declared.__globals__, declared.__name__, declared.__defaults__, made.__closure__)
    front.__kwdefaults__ = declared.__kwdefaults__
    front.__annotations__ = dict(declared.__annotations__)
    front.__doc__, front.__qualname__, front.__module__ = method.__doc__, method.__qualname__, __name__
    vars(front).update({k: v for k, v in vars(method).items() if k != "__wrapped__"}, method=method, declared=declared)
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
        # A front is inherited, not made anew: what a user later sets on its class holds for subclasses, too.
        if vars(current).get("declared") is not inspect.unwrap(declared):
            setattr(cls, name, as_declared(vars(current).get("method", current), declared))


def _is_foreign(method: Any) -> bool:
    return package_of(method) not in ("", PACKAGE)
