"""What our trainers override of TRL's can be called as TRL calls it."""

import inspect
import pydoc
import typing
from dataclasses import fields

import trl

import trl_padfix
from trl_padfix.trainers.base import PaddingFreeMixin


ONLINE = ["GRPOTrainer", "RLOOTrainer", *(["DistillationTrainer"] if hasattr(trl, "DistillationTrainer") else [])]
TRAINERS = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "SFTTrainer", *ONLINE]


def test_a_configuration_has_the_fields_of_trls_and_ours():
    for name in TRAINERS:
        config = name.replace("Trainer", "Config")
        ours, theirs = getattr(trl_padfix, config), getattr(trl, config)
        assert issubclass(ours, theirs)
        defaults = [{f.name: f.default for f in fields(config)} for config in (ours, theirs)]
        assert defaults[0].items() >= defaults[1].items()
        for names in (
            lambda c: {*inspect.signature(c.__init__).parameters},
            lambda c: {*inspect.getfullargspec(c.__init__).args},
        ):
            assert names(theirs) | {"padding_free", "attn_implementation"} <= names(ours)


def answers(function) -> dict:
    """What a script can ask a function for its parameters."""
    spec = inspect.getfullargspec(function)
    arguments = [*spec.args, *filter(None, [spec.varargs, spec.varkw]), *spec.kwonlyargs]
    return {
        "signature": inspect.signature(function),
        "getfullargspec": (arguments, spec.defaults, spec.kwonlydefaults, spec.annotations),
    }


def public(trl_class) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(trl_class, inspect.isfunction)
        # A method that TRL decorates answers for its decorator.
        if (name == "__init__" or not name.startswith("_")) and not hasattr(value, "__wrapped__")
    ]


def test_every_introspection_answers_as_trls():
    for name in TRAINERS:
        ours, theirs = getattr(trl_padfix, name), getattr(trl, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert f" |  {name}(model: " in pydoc.render_doc(ours, renderer=pydoc.plaintext)
        assert typing.get_type_hints(ours.__init__) == typing.get_type_hints(theirs.__init__)
        assert {"__init__", "evaluate", "train", "log"} <= {*public(theirs)}
        for method in public(theirs):
            assert answers(getattr(ours, method)) == answers(getattr(theirs, method)), method
        control = {
            m
            for m in public(theirs)
            if answers(vars(PaddingFreeMixin).get(m, ours.__init__)) != answers(getattr(theirs, m))
        }
        assert {"__init__", "evaluate", "train", "log"} <= control  # as the mixin writes them
