"""Losses that are not TRL's, wherever they were put: under a token budget each has the figures that it has in TRL."""

import inspect
import re
from functools import cache, partial, wraps
from importlib.util import find_spec
from types import MethodType

import pytest
import torch
import trl
from kit.budget_runs import BUDGETS, STEPS, assert_same, build_branching, figures_of, make, subclass, train_split
from kit.methods import make_trainer
from kit.trainer_runs import build_model, our_warnings, trained
from transformers import Qwen2ForCausalLM, TrainerCallback
from zoo import models

import trl_padfix
from trl_padfix import ParityError
from trl_padfix.core.errors import UnpackableCallError
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.core.model.changes import ModuleChanges
from trl_padfix.experimental.tasks import EXPERIMENTS, classes_of
from trl_padfix.trainers.batching import token_budget
from trl_padfix.trainers.checks import user_code
from trl_padfix.trainers.checks.user_code import LOSS_METHODS, custom_loss_name
from trl_padfix.trainers.parts import padding_side


def longest_row_twice(compute_loss):
    """A decorator: rows are compared, because the loss of a batch is scaled by its longest row."""

    @wraps(compute_loss)
    def decorated(self, model, inputs, *args, **kwargs):
        scale = inputs["attention_mask"].sum(1).max()
        result = compute_loss(self, model, inputs, *args, **kwargs)
        return (result[0] * scale, *result[1:]) if isinstance(result, tuple) else result * scale

    return decorated


def on_object(trainer, patch):
    trainer.compute_loss = MethodType(longest_row_twice(type(trainer).compute_loss), trainer)


def run(name, place, ours, **config):
    """A training with a loss that was put `place`."""
    with pytest.MonkeyPatch.context() as patch:
        trainer = make(trl_padfix if ours else trl, name, "unused", budget=ours, **config)
        place(trainer, patch)
        return train_split(trainer)


def clamped(trainer, patch):
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def stepped(trainer, patch):
    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad / (1e-2 + parameter.grad.norm())
        parameter.grad = torch.zeros_like(parameter)

    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


theirs = cache(lambda name, place, **config: run(name, place, False, **config).figures)


class Cut:
    """Cuts the columns of a batch to the length of its shortest row."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        width = max(6, int(inputs["attention_mask"].sum(1).min()))
        return {k: v[:, :width] if v.dim() > 1 else v for k, v in inputs.items()}


def in_inputs(trainer, patch):
    subclass(trainer, Cut)


def over_accumulation(trainer, patch):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return logits.logsumexp(-1).mul(inputs["attention_mask"]).sum() / self.current_gradient_accumulation_steps

    subclass(trainer, compute_loss=compute_loss)


THREE = {"gradient_accumulation_steps": 3}
PLACES = [
    (on_object, True, {}),
    (in_inputs, False, THREE),
    (over_accumulation, False, THREE | {"max_grad_norm": 1e-3}),
]


@pytest.mark.parametrize(("place", "sharing", "given"), PLACES)
def test_a_loss_has_trls_figures_wherever_it_was_put(place, sharing, given):
    ours = run("SFT", place, True, prefix_sharing=sharing, **given)
    assert_same(ours.figures, theirs("SFT", place, **given))
    assert max(ours.forwards) <= BUDGETS["SFT"]
    assert (max(ours.chunks, default=1) > 1) == (place is in_inputs)


def mean_of_rows(logits, labels, vocab_size, **kwargs):
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


class Regularised(Qwen2ForCausalLM):
    """The forward adds a term of its own."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        normalizers = output["logits"].logsumexp(-1).where(attention_mask.bool(), 0.0)
        output["loss"] = output["loss"] + normalizers.square().sum(1).max() / 100
        return output


class Anchored(Qwen2ForCausalLM):
    """The forward adds a term that is zero until the weights change, and small then."""

    def forward(self, *args, **kwargs):
        output, weight = super().forward(*args, **kwargs), self.model.layers[0].mlp.down_proj.weight
        self.anchor = vars(self).get("anchor", weight.detach().clone())
        output["loss"] = output["loss"] + (weight - self.anchor).square().sum()
        return output


class Transposed(Qwen2ForCausalLM):
    """The forward returns logits that are not contiguous."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output["logits"] = output["logits"].transpose(0, 1).contiguous().transpose(0, 1)
        return output


def changed(**attributes):
    model = build_model()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


MODELS = {
    "rows": partial(changed, loss_function=mean_of_rows),
    "term": partial(changed, __class__=Regularised),
    "small term": partial(changed, __class__=Anchored),
    "not contiguous": partial(changed, __class__=Transposed),
    "classifier": partial(build_model, "reward"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_that_the_model_returns_has_trls_figures(name, caplog):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if name == "classifier":
            return model(input_ids=ids, attention_mask=mask, labels=mask.sum(1).float() / 8).loss
        given = {"labels": inputs["labels"], "num_items_in_batch": num_items_in_batch}
        return model(input_ids=ids, attention_mask=mask, **given).loss

    found = []
    for library in (trl, trl_padfix):
        given = {"model": MODELS[name]()}
        kind = "Reward" if name == "classifier" else "SFT"
        trainer = make(library, kind, "unused", budget=library is trl_padfix, **given)
        found.append(train_split(subclass(trainer, compute_loss=compute_loss)))
    theirs, ours = found
    assert_same(ours.figures, theirs.figures)
    is_unknown = "a loss that is not a known function of its logits" in caplog.text
    assert is_unknown == (name in ("term", "small term", "classifier"))
    # The first sub-batch of the first step shows it; from then on a step is one forward of all rows.
    assert (len(ours.forwards) == 1 + STEPS) == (name in ("term", "classifier"))
    assert max(ours.forwards[:1] if is_unknown else ours.forwards) <= BUDGETS[kind]


@pytest.mark.parametrize(
    ("owner", "place", "budget"),
    [("loss", "model.layers.0", False), ("loss", "model", True), ("step", "model.layers.0", True)],
)
def test_states_that_a_hook_keeps_for_a_loss_are_of_the_batch(owner, place, budget, tmp_path, monkeypatch, caplog):
    kept = {}

    def keep(module, args, output):
        kept["states"] = output if isinstance(output, torch.Tensor) else output[0]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = type(self).__mro__[1].compute_loss(self, model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + kept["states"][inputs["attention_mask"].bool()].square().mean()

    def around_step(self, model, inputs, num_items_in_batch=None):
        loss = type(self).__mro__[1].training_step(self, model, inputs, num_items_in_batch)
        return loss + kept["states"][inputs["attention_mask"].bool()].square().mean().detach()

    own = {"loss": {"compute_loss": compute_loss}, "step": {"training_step": around_step}}[owner]

    def figures(library, **given):
        given |= {"padding_free": True} if library is trl_padfix else {}
        trainer = make(library, "SFT", tmp_path, budget=budget and library is trl_padfix, **given)
        trainer.model.get_submodule(place).register_forward_hook(keep)
        return figures_of(subclass(trainer, **own))

    token_budget.logger.warning_once.cache_clear()
    assert_same(figures(trl_padfix), figures(trl))
    assert any("whose padded states your loss may read" in line for line in our_warnings(caplog))
    assert not any("gets packed states" in line or "for each sub-batch" in line for line in our_warnings(caplog))
    for module in (user_code, token_budget):
        monkeypatch.setattr(module, "hook_beside_loss", lambda *args, **kwargs: None)
    monkeypatch.setattr(ModuleChanges, "check", lambda changes: None)
    with pytest.raises(IndexError, match="does not match the shape of the indexed tensor"):
        figures(trl_padfix, parity_check=False)


def test_computed_in_chunks_it_has_others(monkeypatch):
    name = "DPO"
    monkeypatch.setattr(
        "trl_padfix.trainers.checks.user_code.TRUSTED", ("trl_padfix.", "trl", "transformers.", __name__)
    )
    ours = run(name, on_object, True)
    assert max(ours.chunks) > 1
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.figures, theirs(name, on_object), factor=10)


@pytest.mark.parametrize(("kind", "hook"), [("SFT", clamped), ("KTO", stepped)])
def test_hooks_act_on_the_gradient_of_a_batch(kind, hook):
    ours = run(kind, hook, True)
    assert_same(ours.figures, theirs(kind, hook))
    assert max(ours.forwards) <= BUDGETS[kind]


def test_once_for_each_chunk_hooks_give_other_weights(monkeypatch):
    trusted = user_code.TRUSTED_GRADIENT_HOOKS | {__name__.partition(".")[0]}
    monkeypatch.setattr(user_code, "TRUSTED_GRADIENT_HOOKS", trusted)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("SFT", clamped, True).figures, theirs("SFT", clamped), factor=10)


def test_a_layerwise_optimizer_acts_in_the_backward_pass(tmp_path):
    trainer = make(trl_padfix, "SFT", tmp_path, budget=True)
    trainer.args.optim = type(trainer.args.optim)("apollo_adamw_layerwise")
    assert user_code.gradient_hook_name(trainer) == "optim='apollo_adamw_layerwise'"


def test_a_loss_that_a_trainer_of_trl_borrows_runs_there(tmp_path):
    class Mine(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return model(**{name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}).loss

    class Theirs(trl.SFTTrainer):
        compute_loss = Mine.compute_loss

    trainer = make_trainer(trl, "SFT", tmp_path, Theirs, max_steps=1)
    assert trainer.train().training_loss > 0
    vars(Mine.compute_loss)["__wrapped__"] = lambda *_, **__: 1 / 0  # as `%autoreload` does
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def test_trls_own_trainers_have_none():
    classes = [getattr(trl_padfix, f"{name}Trainer") for name in ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO")]
    classes += [[*classes_of(m).values()][-1] for m in EXPERIMENTS if find_spec(f"trl.experimental.{m}")]
    assert {c: custom_loss_name(object.__new__(c)) for c in classes} == dict.fromkeys(classes)


def test_a_step_that_is_skipped_moves_no_weight(tmp_path):
    """A user's step skips a batch that does not fit into memory; it fails after a chunk has had its backward."""
    trainer = make(trl_padfix, "SFT", tmp_path, budget=True, max_steps=1)
    train, calls, skipped = trainer.training_step, [], []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def step(*args, **kwargs):
        try:
            return train(*args, **kwargs)
        except torch.OutOfMemoryError:
            skipped.append(1)
            return torch.zeros(())

    trainer.training_step = step
    trainer.model.model.layers[0].register_forward_pre_hook(fail)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert skipped
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert all(map(torch.equal, before, trainer.model.parameters()))


def called_in(trainer_class, method, known=()):
    """Names of the methods of TRL's class that `method` calls on `self`, and those that these call."""
    owner = next((c for c in trainer_class.__mro__ if method in vars(c) and c.__module__.startswith("trl.")), None)
    if owner is None or method in known:
        return set()
    names = set(re.findall(r"self\.(\w+)", inspect.getsource(inspect.unwrap(vars(owner)[method]))))
    return {method}.union(*(called_in(trainer_class, name, {method, *known}) for name in names))


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation"])
def test_the_methods_of_trls_loss_are_known(name):
    trainer_class = getattr(trl_padfix, f"{name}Trainer")
    found = called_in(trainer_class, "compute_loss") - {"compute_loss", "get_tp_size"}
    named = {method for method in LOSS_METHODS - {"compute_loss"} if called_in(trainer_class, method)}
    assert found == named


# -- hooks that are registered in the middle of a training: its steps go on padded, with TRL's figures


class Hooking(TrainerCallback):
    """Registers a hook on the embedding after the first step: `change` of its output."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.get_input_embeddings().register_forward_hook(lambda module, args, output: self.change(output))


def by_column(states):
    return states * (1 + 0.02 * torch.arange(states.shape[-2]))[:, None]


@pytest.fixture
def train_hooked(tmp_path, every_shared_prefix_pays):
    def train(name, change, ours, **given):
        given = {"max_steps": 3} | given
        data = build_branching(name)
        given = {"train_dataset": data, "eval_dataset": data.select(range(4))} | given
        trainer = make(trl_padfix if ours else trl, name, tmp_path, budget=ours, callbacks=[Hooking(change)], **given)
        return trained(trainer), trainer

    return train


@pytest.mark.parametrize("name", ["SFT", "KTO"])
def test_chunks_that_share_prefixes_go_on_padded_and_so_does_the_evaluation(name, train_hooked, monkeypatch, caplog):
    expected, _ = train_hooked(name, by_column, False)
    figures, trainer = train_hooked(name, by_column, True, prefix_sharing=True)
    assert_same(figures, expected)
    assert trainer.padding.stats.packed_tokens > 0  # those of the first step
    assert trainer.padding.stats.padded_forwards > 0
    assert any("was registered as a hook of a Embedding" in text for text in our_warnings(caplog))
    monkeypatch.setattr(PaddingRemoval, "has_changed", False)
    with pytest.raises((UnpackableCallError, ParityError), match=r"was registered as a hook|parity FAILED"):
        train_hooked(name, by_column, True, prefix_sharing=True, parity_check=True)


def test_padded_on_the_left_they_are_numbered_as_packed_ones(train_hooked, monkeypatch):
    """GPT-2 itself takes the column of a token as its position."""
    build = lambda: {"model": models.build("gpt2").train(), "ref_model": models.build("gpt2", seed=1)}  # noqa: E731
    expected, _ = train_hooked("DPO", lambda states: states * 1.1, False, **build())
    mode = {"padding_side": "left", "max_tokens_per_batch": None}
    figures, trainer = train_hooked("DPO", lambda states: states * 1.1, True, **mode, **build())
    assert_same(figures, expected)
    assert trainer.padding.stats.padded_forwards > 0
    monkeypatch.setattr(padding_side, "number_padded_rows", lambda model: None)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(train_hooked("DPO", lambda states: states * 1.1, True, **mode, **build())[0], expected)
