"""The parity check of a step: it sees what depends on padding in TRL's default precision, too, and leaves nothing."""

import contextlib
import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import MethodType

import pytest
import torch
import trl
from datasets import Dataset
from kit.budget_runs import BUDGETS
from kit.methods import make_trainer
from kit.process_errors import PLACES
from kit.processes import launched
from kit.rows import build_rows
from kit.trainer_runs import (
    assert_other,
    assert_same,
    build_model,
    build_tokenizer,
    figures,
    lora,
    our_warnings,
    to_the_bit,
)
from peft import PromptTuningConfig, TaskType
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from transformers import Qwen2ForCausalLM
from transformers.trainer_utils import EvalLoopOutput

import trl_padfix
from trl_padfix.core.context import context
from trl_padfix.core.errors import UnpackableCallError
from trl_padfix.core.parity.forwards import with_gradient
from trl_padfix.trainers.batching.balancing_loss import record_router_logits
from trl_padfix.trainers.parts import parity, parity_schedule, step_parity


DEFAULTS = {"bf16": True, "gradient_checkpointing": True}  # TRL's
PRECISIONS = [DEFAULTS, {}]
MODES = {
    "padding-free": {"padding_free": True},
    "sharing": {"padding_free": True, "prefix_sharing": True},
    "budget": {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": BUDGETS["SFT"]},
}
CAUSES = ["reads logits or states at padding", "a module takes statistics", "the model mixes rows"]
KINDS = ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation"]


def make(library, kind, folder, **given):
    given = {"max_steps": 2, "eval_dataset": None, **given}
    return make_trainer(library, kind, folder, **given)


def of_model(inputs):
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def mask_of(inputs):
    return inputs["attention_mask"]


def norms(trainer):
    return [log["grad_norm"] for log in trained(trainer)]


def reading_padding(trainer_class, model):
    """A trainer whose loss compares all positions with those of a frozen model, padding included."""

    class Regularized(trainer_class):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            goal = frozen(**of_model(inputs)).logits.detach().softmax(-1)
            found = model(**of_model(inputs)).logits.log_softmax(-1)
            return loss + 0.05 * nn.functional.kl_div(found, goal, reduction="batchmean")

    frozen = copy.deepcopy(model).requires_grad_(False)
    nn.init.normal_(frozen.lm_head.weight, generator=torch.Generator().manual_seed(0))
    return Regularized


class Centred(nn.Module):
    """A projection that subtracts the mean of its batch in training."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x - 0.5 * x.detach().flatten(0, -2).mean(0) if self.training else x)


def quantized(inner):
    observed = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=-8, quant_max=7, dtype=torch.qint8)
    return nn.Sequential(observed, inner)


def trained(trainer):
    trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def assert_sees(monkeypatch, caplog, build, cause):
    """`build(library, **fields)` trains what depends on padding: with TRL's figures, said, and only by the check."""
    theirs = to_the_bit(trained(build(trl)))
    for mode, fields in MODES.items():
        caplog.clear()
        trainer = build(trl_padfix, **fields)
        assert to_the_bit(trained(trainer)) == theirs, mode
        assert [text for text in CAUSES if text in trainer.padding.why_padded] == [cause]
        assert trainer.padding.stats.padded_forwards == len(theirs)
        assert sum("depends on padding" in line for line in our_warnings(caplog)) == 1
        with pytest.raises(trl_padfix.PaddingRemovalError, match="depends on padding"):
            build(trl_padfix, strict=True, **fields).train()
    monkeypatch.setattr(parity, "check_step", lambda *args, **kwargs: "")
    wrong = trained(build(trl_padfix, **MODES["budget"]))
    assert abs(wrong[0]["grad_norm"] - theirs[0]["grad_norm"]) > 1e-3


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_loss_that_reads_padding_is_computed_padded(kind, precision, tmp_path, monkeypatch, caplog):
    def build(library, **fields):
        model = build_model()
        reads = reading_padding(getattr(library, f"{kind}Trainer"), model)
        return make(library, kind, tmp_path, trainer_class=reads, model=model, **precision, **fields)

    assert_sees(monkeypatch, caplog, build, CAUSES[0])


def test_what_half_precision_hides_shows_with_other_tokens_at_padding(tmp_path):
    class ReadsLittle(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + 2e-3 * model(**of_model(inputs)).logits[..., 0].float().mean()

    trainer = make(trl_padfix, "SFT", tmp_path, trainer_class=ReadsLittle, padding_free=True, **DEFAULTS)
    trainer.train()
    assert "with other tokens at padding off by" in trainer.padding.why_padded


def test_a_loss_that_changes_for_another_reason_than_padding_is_not_said_to_read_it(tmp_path):
    class CountsRows(Qwen2ForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            self.rows = len(input_ids)
            return super().forward(input_ids=input_ids, **kwargs)

    class Counted(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**of_model(inputs), labels=inputs["labels"]).loss + self.model.rows / 10

    def why_padded(**fields):
        model = build_model()
        model.__class__ = CountsRows
        trainer = make(trl_padfix, "SFT", tmp_path, trainer_class=Counted, model=model, **fields)
        trainer.train()
        return trainer.padding.why_padded

    assert why_padded(**MODES["sharing"]) is None
    reason = why_padded(**MODES["budget"])
    assert [text for text in CAUSES if text in reason] == [CAUSES[2]]


def test_a_loss_is_compared_on_the_first_batch_with_padding(tmp_path, monkeypatch):
    ragged = [*build_rows(16)]
    rows = Dataset.from_list([ragged[0]] * 16 + ragged)

    def build(library, **fields):
        model = build_model()
        reads = reading_padding(library.SFTTrainer, model)
        given = {"train_dataset": rows, "train_sampling_strategy": "sequential", "max_steps": 4} | fields
        return make(library, "SFT", tmp_path, trainer_class=reads, model=model, **given)

    theirs, trainer = norms(build(trl)), build(trl_padfix, padding_free=True)
    assert norms(trainer) == pytest.approx(theirs, rel=1e-4)
    assert "at padding" in trainer.padding.why_padded
    assert trainer.padding.handle.stats.forwards > 0, "the first two steps have no padding"
    with pytest.raises(trl_padfix.PaddingRemovalError, match="depends on padding"):
        build(trl_padfix, padding_free=True, strict=True).train()
    monkeypatch.setattr(parity_schedule, "has_padding", lambda batches: False)  # the control
    assert norms(build(trl_padfix, padding_free=True)) != pytest.approx(theirs, rel=1e-3)


def test_a_loss_may_take_tuples_from_the_model(tmp_path):
    def build(library, **fields):
        class Tuples(library.SFTTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                logits = model(**of_model(inputs), return_dict=False)[0][:, :-1]
                return nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"][:, 1:])

        return make(library, "SFT", tmp_path, trainer_class=Tuples, **fields)

    assert norms(build(trl_padfix, strict=True, **MODES["budget"])) == pytest.approx(norms(build(trl)), rel=1e-4)


CAUSES_NOT_COMPARED = [
    ("SFT", {}, "`Whole.compute_loss` was not compared with its padded value: on a few rows it raises AssertionErr"),
    ("SFT", {"packing": True}, "the loss was not compared with its padded value: its batch is packed"),
    ("Reward", {"pool_last_token": True}, "`Whole.compute_loss` was not compared with its padded value: `pool_last_t"),
]


@pytest.mark.parametrize(("kind", "given", "said"), CAUSES_NOT_COMPARED)
def test_a_loss_that_was_not_compared_is_named_with_the_cause(kind, given, said, tmp_path, caplog):
    class Whole(getattr(trl_padfix, f"{kind}Trainer")):
        def compute_loss(self, model, inputs, *args, **kwargs):
            assert given or len(inputs["input_ids"]) == self.args.per_device_train_batch_size
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = make(trl_padfix, kind, tmp_path, trainer_class=Whole, padding_free=True, **given)
    trainer.train()
    assert trainer.padding.loss_parity["train"].startswith(said)
    assert any("was not compared" in line for line in our_warnings(caplog)) is ("packing" not in given)


def test_the_verdict_of_a_training_outlives_an_evaluation(tmp_path):
    model, given = build_model(), {"max_steps": 1, "padding_free": True, "eval_dataset": build_rows(8, seed=1)}
    kind = reading_padding(trl_padfix.SFTTrainer, model)
    trainer = make(trl_padfix, "SFT", tmp_path, trainer_class=kind, model=model, **given)
    trainer.train()
    reason = trainer.padding.why_padded
    trainer.evaluate()
    assert trainer.padding.why_padded == reason
    assert CAUSES[0] in reason
    assert CAUSES[0] in trainer.padding.why_eval_padded
    assert trainer.padding.stats.forwards == 0


def test_under_left_padding_a_loss_that_passes_no_mask_is_told_so(tmp_path, caplog):
    def losses(library, **fields):
        class WithoutMask(library.SFTTrainer):
            def compute_loss(self, model, inputs, *args, **kwargs):
                logits = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
                return nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())

        tokenizer = build_tokenizer(padding_side="left")
        trainer = make(library, "SFT", tmp_path, trainer_class=WithoutMask, processing_class=tokenizer, **fields)
        return [log["loss"] for log in trained(trainer)], trainer

    ours, trainer = losses(trl_padfix, padding_free=True)
    assert "calls the model without `attention_mask`" in trainer.padding.why_padded
    assert any("Rows are padded left" in line for line in our_warnings(caplog))
    caplog.clear()
    right, _ = losses(trl_padfix, padding_free=True, padding_side="right")
    assert right == pytest.approx(losses(trl)[0], rel=1e-4)
    assert right != pytest.approx(ours, rel=1e-4)
    assert not any("Rows are padded left" in line for line in our_warnings(caplog))


def test_a_loss_is_compared_in_each_training(tmp_path, monkeypatch):
    """
    Between two trainings a cell may replace it, its closure, its code (`%autoreload`), or what it reads: a function, a
    module, a number.
    """

    def mean(model, inputs, weights):
        return (model(**of_model(inputs)).logits.logsumexp(-1) * weights).mean()

    def losses(at_padding):
        def of_all(self, model, inputs, *_, **__):
            return mean(model, inputs, inputs["attention_mask"] + at_padding)

        def of_tokens(self, model, inputs, *_, **__):
            return mean(model, inputs, inputs["attention_mask"] * at_padding)

        return of_all, of_tokens

    def is_packed():
        before, _ = trainer.padding.stats.padded_forwards, trainer.padding.loss_parity.clear()
        trainer.train()
        packed = trainer.padding.why_padded is None
        assert (trainer.padding.stats.padded_forwards == before) is packed
        assert trainer.padding.loss_parity.get("train", "").startswith("parity ok") is packed
        return packed

    class Mine(trl.DPOTrainer):
        _compute_loss, _ = losses(0)

    trainer_class = trl_padfix.padding_free_trainer(Mine)
    trainer = make(trl_padfix, "DPO", tmp_path, trainer_class=trainer_class, padding_free=True)
    assert is_packed()
    Mine._compute_loss, masked = losses(1)
    assert not is_packed()
    Mine._compute_loss.__code__ = masked.__code__
    assert is_packed()
    for owner, loss in ((trainer, MethodType(losses(1)[0], trainer)), (trainer_class, losses(1)[0])):
        owner.compute_loss = loss
        assert not is_packed()
        del owner.compute_loss
        assert is_packed()
    trainer.compute_loss = lambda model, inputs, **_: mean(model, inputs, mask_of(inputs))
    assert is_packed()
    monkeypatch.setitem(globals(), "mask_of", lambda inputs: inputs["attention_mask"] + 1)
    assert not is_packed()
    del trainer.compute_loss
    assert is_packed()
    batch = next(iter(trainer.get_train_dataloader()))
    with contextlib.suppress(ZeroDivisionError), trainer.observe_step(trainer.model, batch):
        raise ZeroDivisionError  # an error of a step, after its checks
    assert is_packed()


@pytest.mark.parametrize("check", ["check_parity", "check_step"])
def test_a_check_that_an_interrupt_ends_runs_in_the_next_training(check, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    given = {"model": (model := build_model()), "trainer_class": reading_padding(trl_padfix.SFTTrainer, model)}
    trainer = make(trl_padfix, "SFT", tmp_path, padding_free=True, max_steps=1, **given)
    with monkeypatch.context() as context:
        context.setattr(parity, check, interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer.train()
    assert "reads logits or states at padding" in trainer.padding.why_padded


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_trainer_is_freed_with_the_last_reference_to_it(kind, tmp_path):
    trainer = make(trl_padfix, kind, tmp_path, padding_free=True, max_steps=1, max_tokens_per_batch=100)
    trainer.train()
    kept = weakref.ref(trainer)
    gc.collect()
    gc.disable()
    del trainer
    gc.enable()
    assert kept() is None


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "place"), [*product(("multi_gpu", "fsdp2"), PLACES)])
def test_a_loss_that_raises_on_few_rows_of_one_process_is_not_compared_and_no_process_waits(strategy, place, tmp_path):
    done = launched(strategy, tmp_path, "kit.process_errors", tmp_path, place, timeout=90)
    if (strategy, place) == ("fsdp2", PLACES[0]):  # the other process is in its forward
        assert "A compared step raised an error" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    said = {"without padding": "raises an error without padding", "nowhere": ""}.get(place, "was not compared")
    assert said in done.stderr
    assert ("was not compared" in done.stderr) == (said == "was not compared")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_loss_that_needs_an_even_number_of_rows_is_compared(precision, tmp_path):
    class OfPairs(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(**of_model(inputs)).logits
            scores = (logits.logsumexp(-1) * inputs["attention_mask"]).sum(1)
            return scores.view(-1, 2).diff().square().mean()

    trainer = make(trl_padfix, "SFT", tmp_path, trainer_class=OfPairs, padding_free=True, strict=True, **precision)
    trainer.train()


@pytest.mark.parametrize("kind", ["counter", "random", "attribute"])
def test_a_loss_that_changes_from_call_to_call_is_said(kind, tmp_path, caplog):
    counted = []

    class Changing(trl_padfix.SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            counted.append(1)
            mine = counted if kind == "counter" else self.__dict__.setdefault("mine", [])
            mine.append(1)
            scale = 1 + torch.rand(()) if kind == "random" else len(mine)
            return super().compute_loss(*args, **kwargs) * scale

    trainer = make(trl_padfix, "SFT", tmp_path, trainer_class=Changing, padding_free=True)
    trainer.train()
    said = any("a loss that changes from call to call" in line for line in our_warnings(caplog))
    assert said is (trainer.padding.why_padded is not None) is (kind == "counter")
    assert kind == "counter" or len(trainer.mine) == trainer.state.global_step


def test_a_model_may_have_an_empty_parameter_and_a_loss_of_trls_that_raises_is_named(tmp_path, caplog, monkeypatch):
    trainer = make(trl_padfix, "SFT", tmp_path, padding_free=True)
    trainer.model.empty = torch.nn.Parameter(torch.zeros(0))
    trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))  # as in a loop of your own
    trainer.train()
    assert not any("was not compared" in line for line in our_warnings(caplog))
    monkeypatch.setattr(step_parity._Comparison, "_gradient", lambda self: 1 / 0)
    make(trl_padfix, "SFT", tmp_path, padding_free=True).train()
    assert any("on a few rows it raises ZeroDivisionError" in line for line in our_warnings(caplog))


def test_a_loss_is_compared_until_a_batch_has_a_gradient(tmp_path, monkeypatch, capsys):
    """Where all rewards are equal, a loss that reads padding multiplies it by zero."""

    def build(library, **fields):
        class Unmasked(library.GRPOTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
                logps = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[..., 0]
                return -(inputs["advantages"][:, None] * logps).mean()

        steps, given = iter([0, 0, 1, 1]), {"trainer_class": Unmasked, "max_steps": 4, **fields}
        given["reward_funcs"] = lambda completions, **_: (torch.arange(len(completions)) * next(steps)).tolist()
        return make(library, "GRPO", tmp_path, **given)

    theirs = norms(build(trl))
    assert theirs[1] == 0 < theirs[2]
    assert norms(build(trl_padfix, padding_free=True)) == pytest.approx(theirs, rel=1e-4)
    monkeypatch.setattr(parity_schedule, "MOST_ZEROS", 2)  # the control
    assert norms(build(trl_padfix, padding_free=True)) != pytest.approx(theirs, rel=1e-3)
    said = [line.split("; ")[-1] for line in capsys.readouterr().out.splitlines() if "no gradient" in line]
    assert said == ["the next batch is compared"] * 2 + ["none is compared after 2"]


@pytest.mark.parametrize("side", ["prompt", "completion"])
def test_among_the_few_rows_is_padding_at_each_end_that_the_batch_has(side, tmp_path):
    """A loss that reads the padding of completions may read none of prompts."""
    trainer = make(trl_padfix, "GRPO", tmp_path, padding_free=True)
    shorter = {"prompt": torch.arange(6) + 3, "completion": torch.arange(6) + 3}
    shorter[side] = torch.tensor([8] * 5 + [6])  # the row with padding is the longest one
    masks = {name: (torch.arange(8) < length[:, None]).long() for name, length in shorter.items()}
    masks["prompt"] = masks["prompt"].flip(1)
    inputs = {f"{name}_mask": mask for name, mask in masks.items()} | {"advantages": torch.ones(6)}
    inputs |= {f"{name}_ids": torch.full((6, 8), 5) for name in masks}
    (few, *_), _ = step_parity.few_items(trainer, inputs)
    assert len(few["prompt_ids"]) == step_parity.ITEMS < 6
    assert not any(few[f"{name}_mask"].all() for name in masks)


@pytest.mark.parametrize(("wrap", "precision"), [(Centred, DEFAULTS), (Centred, {}), (quantized, {})])
def test_a_module_with_statistics_of_the_batch_is_computed_padded(wrap, precision, tmp_path, monkeypatch, caplog):
    def build(library, **fields):
        model = build_model(initializer_range=0.25)
        for layer in model.model.layers:
            layer.mlp.down_proj = wrap(layer.mlp.down_proj)
        return make(library, "SFT", tmp_path, model=model, **precision, **fields)

    assert_sees(monkeypatch, caplog, build, CAUSES[1])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind, tmp_path):
    """Metrics, random states and weights of a training are those without a check; all trainers are checked."""

    class Logging(getattr(trl_padfix, f"{kind}Trainer")):
        def compute_loss(self, *args, **kwargs):
            self.log({"own": 1.0})
            return super().compute_loss(*args, **kwargs)

    def logs(**fields):
        noisy = {"model_init_kwargs": {"attention_dropout": 0.1}} if kind in KINDS[4:] else {}
        of_kind = "reward" if kind == "Reward" else "causal"
        model = {} if noisy else {"model": build_model(of_kind, attention_dropout=0.1)}
        given = DEFAULTS | {"max_tokens_per_batch": BUDGETS[kind], "disable_dropout": False} | fields
        given = given if "disable_dropout" in getattr(trl, f"{kind}Config").__dataclass_fields__ else given | noisy
        given = {k: v for k, v in given.items() if k in getattr(trl_padfix, f"{kind}Config").__dataclass_fields__}
        given |= {"trainer_class": Logging} if kind in ("SFT", "GRPO") else {}
        trainer = make(trl_padfix, kind, tmp_path, padding_free=True, prefix_sharing=True, **model, **given)
        trainer.train()
        assert trainer.padding.why_padded is None
        return trainer, to_the_bit(trainer.state.log_history)

    (checked, ours), (unchecked, theirs) = logs(), logs(parity_check=False)
    assert checked.padding.parity
    assert not unchecked.padding.parity
    assert ours == theirs
    assert all("perf/tokens_per_second" in log for log in checked.state.log_history if "loss" in log)


TRUNCATED = {"mask_truncated_completions": True, "max_completion_length": 3}
VIRTUAL = {"peft_config": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)}


@pytest.mark.parametrize(("kind", "given"), [("GRPO", TRUNCATED), ("RLOO", TRUNCATED), ("GRPO", VIRTUAL)])
def test_steps_whose_rows_alone_differ_are_packed(kind, given, tmp_path):
    """TRL masks rows whole, or the padding between virtual tokens and a prompt moves positions."""
    trainer = make_trainer(trl_padfix, kind, tmp_path, padding_free=True, prefix_sharing=True, max_steps=1, **given)
    trainer.train()
    assert trainer.padding.stats.forwards


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_what_is_frozen_in_an_adapter_stays_frozen_in_a_step(kind, tmp_path):
    """PEFT trains all of an adapter again once TRL's reference has switched it off: in TRL, after the first policy."""

    def train(library, trains_a=False, **given):
        trainer = make(library, kind, tmp_path, peft_config=lora(task_type="CAUSAL_LM"), **given)
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad_("lora_B" in name or (trains_a and "lora_A" in name))
        trainer.train()
        assert library is trl or not trainer.padding.stats.padded_forwards
        return figures(trainer.state.log_history, but=("num_tokens",))

    theirs = train(trl)
    assert_same(train(trl_padfix, padding_free=True), theirs)
    assert_same(train(trl_padfix, padding_free=True, max_tokens_per_batch=BUDGETS[kind]), theirs)
    assert_other(train(trl, trains_a=True), theirs)


def test_calls_of_another_thread_are_not_part_of_a_comparison():
    model, rows = build_model(), {name: torch.ones(2, 4, dtype=torch.long) for name in ("input_ids", "attention_mask")}

    def beside(*_):
        ThreadPoolExecutor().submit(model, **rows).result()

    model.lm_head.register_full_backward_pre_hook(beside)
    with_gradient(model, rows["input_ids"], lambda: model(**rows).logits)
    handle = trl_padfix.remove_padding(model)
    recording = parity.first_call(model, handle), record_router_logits(model)
    with recording[0] as call, recording[1] as routed, step_parity.without_packing([handle], lambda *_: 1 / 0):
        beside()
    assert [call, routed] == [{}, []]


@pytest.mark.parametrize("bf16", [True, False])
def test_rounding_is_measured_once_or_in_half_precision_five_times(bf16, tmp_path, monkeypatch):
    """RLOO's old log-probabilities are those of packed rows: its padded loss differs by rounding."""
    attentions = []

    def padded(self, batches, on_embeddings=None, at_padding=None):
        if on_embeddings is not None and on_embeddings.func.__name__ == "_one_rounding_away":
            attentions.append(context().attention)
        return compute(self, batches, on_embeddings, at_padding)

    compute = step_parity._Comparison._padded
    monkeypatch.setattr(step_parity._Comparison, "_padded", padded)
    monkeypatch.setattr(step_parity.Limits, "allow", lambda *_: False)
    make(trl_padfix, "SFT", tmp_path, padding_free=True, bf16=bf16, max_steps=1).train()
    assert attentions == ([None, "eager", None, None, None] if bf16 else [None])


@pytest.mark.parametrize("alpha", [5, 5.0])
def test_the_noise_of_neftune_is_off_in_the_comparison(alpha, tmp_path):
    trainer = make(trl_padfix, "SFT", tmp_path, padding_free=True, neftune_noise_alpha=alpha)
    trainer.train()
    assert trainer.padding.why_padded is None
    assert trainer.padding.stats.packed_tokens < trainer.padding.stats.padded_tokens


def test_under_strict_a_call_that_cannot_be_packed_says_so_itself(tmp_path):
    class WithWeights(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            extra = model(**of_model(inputs), output_attentions=True).logits.mean()
            return extra + super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    model = build_model(attn_implementation="eager")
    trainer = make(trl_padfix, "SFT", tmp_path, trainer_class=WithWeights, model=model, padding_free=True, strict=True)
    with pytest.raises(UnpackableCallError, match=r"^`output_attentions=.*`with trainer\.padding\.handles\[0\]\.d"):
        trainer.train()


def test_a_rope_of_the_length_of_the_batch_is_that_of_its_columns_on_either_side(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

    def losses(library, **given):
        model = build_model(rope_parameters=rope, max_position_embeddings=8)
        return [log["loss"] for log in trained(make(library, "SFT", tmp_path, model=model, **given))]

    expected = losses(trl)
    assert losses(trl_padfix, padding_free=True, padding_side="left", strict=True) == pytest.approx(expected, rel=1e-4)
    assert losses(trl_padfix, padding_side="left") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("is_own", "reads"), [*product([True, False], repeat=2)])
def test_an_evaluation_whose_metrics_read_padding_runs_padded(is_own, reads, tmp_path, capsys):
    def metrics(found, reads=reads):
        return {"zeros": (found.predictions[(found.label_ids != -100) | reads] == 0).mean()}

    def predict(self, model, inputs, *args, **kwargs):
        logits = model(**of_model(inputs := self._prepare_inputs(inputs))).logits.detach()
        return logits[inputs["attention_mask"].bool() | reads].square().mean(), None, None

    def evaluated(library, **fields):
        kind = type("Own", (library.SFTTrainer,), {"prediction_step": predict} if is_own else {})
        given = {"trainer_class": kind, "eval_dataset": build_rows(8, seed=1), "compute_metrics": metrics} | fields
        trainer = make(library, "SFT", tmp_path, **given)
        return {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_zeros")}, trainer

    (theirs, _), (ours, trainer) = evaluated(trl), evaluated(trl_padfix, padding_free=True)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert (trainer.padding.stats.forwards == 0) is reads
    assert ("parity ok, the metrics" in capsys.readouterr().out) is not reads
    assert ("eval_padfix/padded_forwards" in trainer.state.log_history[0]) is reads
    assert set(trainer.padding.parity) == {"eval"}
    trainer.compute_metrics = partial(metrics, reads=not reads)  # ours gives no logits to it
    trainer.evaluate()
    assert (trainer.padding.why_eval_padded is None) is (reads != is_own)
    with pytest.raises(trl_padfix.PaddingRemovalError) if reads else contextlib.nullcontext():
        evaluated(trl_padfix, padding_free=True, strict=True)


def test_a_loop_of_the_user_gets_padded_logits(tmp_path, caplog):
    def loop(self, dataloader, *args, **kwargs):
        logits = [self.prediction_step(self.model, batch, False)[1] for batch in dataloader]
        return EvalLoopOutput(None, None, {"eval_square": sum(x.square().mean().item() for x in logits)}, 8)

    def evaluated(library, **fields):
        kind = type("Own", (library.SFTTrainer,), {"evaluation_loop": loop})
        given = {"trainer_class": kind, "eval_dataset": build_rows(8, seed=1)} | fields
        return make(library, "SFT", tmp_path, **given).evaluate()["eval_square"]

    assert evaluated(trl_padfix, padding_free=True) == pytest.approx(theirs := evaluated(trl), rel=1e-5)
    assert "logits that `Own.evaluation_loop` may read at padding" in caplog.text
    assert evaluated(trl_padfix, padding_free=True, parity_check=False) != pytest.approx(theirs, rel=1e-3)


def test_each_batch_of_an_evaluation_whose_loss_reads_padding_runs_padded(tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**of_model(inputs))
        loss = (outputs.logits.logsumexp(-1) * (mask_of(inputs).bool() | (not model.training))).mean()
        return (loss, outputs) if return_outputs else loss

    def losses(library, **fields):
        kind = type("Own", (library.SFTTrainer,), {"compute_loss": compute_loss})
        given = {"trainer_class": kind, "eval_dataset": build_rows(12, seed=1), "eval_strategy": "epoch"} | fields
        trainer = make(library, "SFT", tmp_path, per_device_eval_batch_size=4, num_train_epochs=1, **given)
        before, log = trainer.evaluate(), trained(trainer)
        found = [metrics[name] for metrics in (before, *log) for name in ("loss", "eval_loss") if name in metrics]
        return found, trainer.padding if library is trl_padfix else None

    (theirs, _), (ours, padding) = losses(trl), losses(trl_padfix, padding_free=True)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert padding.stats.padded_forwards == 2 * 3
    assert padding.stats.forwards > 0
    assert padding.why_padded is None
    assert "reads logits" in padding.why_eval_padded
    with pytest.raises(AssertionError):  # the control
        assert losses(trl_padfix, padding_free=True, parity_check=False)[0] == pytest.approx(theirs, rel=1e-4)
