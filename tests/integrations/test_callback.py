"""`PaddingRemovalCallback`: padding removed from trainers that know nothing of this package."""

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.utils import DistributedType
from datasets import Dataset
from kit.commands import run_script
from kit.methods import make_trainer
from kit.observe import entered_tokens
from kit.trainer_runs import (
    SPECIAL,
    assert_same,
    break_mode,
    build_ids,
    build_model,
    build_pairs,
    make_plain_trainer,
    rows_for,
    trajectory,
)
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback

from trl_padfix import PaddingRemovalCallback, PaddingRemovalError, ParityError, padding_free_trainer
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.integrations.callback import callback_from, settings_in


class Margins(Trainer):
    """
    A trainer of its own: rows of a batch are `[preferred, other]` pairs, scored by the mean log-probability of their
    labels, and held together by the states after their last tokens; a reference may hold the scores back.
    """

    def __init__(self, *args, ref_model=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.ref_model = ref_model

    def scores(self, model, inputs):
        out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True)
        labels, mask = inputs["labels"][:, 1:], inputs["labels"][:, 1:] != -100
        logps = out.logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        last = inputs["attention_mask"].cumsum(1).argmax(1)
        return (logps * mask).sum(1) / mask.sum(1), out.hidden_states[-1][range(len(last)), last]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        scores, states = self.scores(model, inputs)
        if self.ref_model is not None:
            with torch.no_grad():
                scores = scores - self.scores(self.ref_model, inputs)[0]
        loss = -functional.logsigmoid(scores[::2] - scores[1::2]).mean() - scores[::2].mean()
        loss = loss + 0.1 * (states[::2] - states[1::2]).square().mean()
        return (loss, {"scores": scores}) if return_outputs else loss


BEGIN = "w3 w5 w7 w9 "


def build_trainer(folder, trainer_class=Margins, callbacks=(), attach=True, **given):
    given = {"train_dataset": build_ids(24, begin=BEGIN), "eval_dataset": build_ids(12, 1, BEGIN)} | given
    given |= {"train_sampling_strategy": "sequential", "callbacks": [*callbacks]}
    trainer = make_plain_trainer(folder, trainer_class, **given)
    for callback in callbacks if attach else ():
        if isinstance(callback, PaddingRemovalCallback):
            callback.attach(trainer)
    return trainer


def train(folder, trainer_class=Margins, callbacks=(), **given):
    """The trainer after its training, with an evaluation in the middle, and the tokens that entered the policy."""
    trainer = build_trainer(folder, trainer_class, callbacks, eval_strategy="steps", eval_steps=3, **given)
    computed = entered_tokens(trainer.model)
    trainer.train()
    return trainer, sum(computed)


@pytest.mark.parametrize(("reference", "sharing"), [(True, True), (False, "auto")])
def test_a_loss_on_logits_and_hidden_states_keeps_its_trajectory(reference, sharing, tmp_path):
    def given():
        if reference:
            return {"ref_model": build_model(seed=1)}
        return {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}

    theirs, padded = train(tmp_path / "theirs", **given())
    callback = PaddingRemovalCallback(sharing, parity_check=False)
    ours, entered = train(tmp_path / "ours", callbacks=[callback], **given())
    stats = callback.stats
    assert PaddingRemoval.of(ours.model) is None
    assert "forward" not in vars(ours.model)
    assert_same(trajectory(ours), trajectory(theirs))
    assert stats.packed_tokens < stats.padded_tokens
    assert not reference or (entered == stats.packed_tokens and padded == stats.padded_tokens)
    assert (stats.packed_tokens < stats.real_tokens) is bool(sharing)
    assert len(callback.handles) == 1 + reference
    steps = [log for log in ours.state.log_history if "loss" in log]
    assert all(0 < log["padfix/pad_fraction"] < 1 and log["perf/tokens_per_second"] > 0 for log in steps)
    assert all((log["padfix/shared_fraction"] > 0) is bool(sharing) for log in steps)
    evaluations = [log for log in ours.state.log_history if "eval_loss" in log]
    assert len(evaluations) == 2
    assert all(0 < log["eval_padfix/pad_fraction"] < 1 for log in evaluations)


@pytest.mark.parametrize("bf16", [True, False])
def test_without_the_trainer_the_policy_alone_is_packed_and_a_warning_says_so(bf16, tmp_path, caplog, monkeypatch):
    given = {"bf16": bf16, "max_steps": 3}
    theirs, _ = train(tmp_path / "theirs", ref_model=build_model(seed=1), **given)
    callback = PaddingRemovalCallback(prefix_sharing=True)
    with caplog.at_level("WARNING"):
        ours, _ = train(tmp_path / "ours", callbacks=[callback], attach=False, ref_model=build_model(seed=1), **given)
    assert "A reference model stays padded" in caplog.text
    assert_same(trajectory(ours), trajectory(theirs), **({"atol": 0.02, "rtol": 0.02} if bf16 else {}))
    assert PaddingRemoval.of(ours.model) is None
    assert [r.ok and r.compared > 0 for r in callback.reports] == [True]
    assert callback.stats.packed_tokens < callback.stats.real_tokens
    assert ours.state.log_history[0]["padfix/shared_fraction"] > 0
    break_mode(monkeypatch, "prefix sharing")
    with pytest.raises(ParityError):
        train(tmp_path, callbacks=[PaddingRemovalCallback(prefix_sharing=True)], attach=False, **given)


class ReadsPadding(Margins):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss + 0.1 * logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class CountsZeros(ReadsPadding):
    """Other tokens at padding do not change this loss, and zeros at all of it do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")  # as many losses do
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = loss + 1 - outputs.logits[inputs["attention_mask"] == 0].any().float()
        return (loss, outputs) if return_outputs else loss


class NewHead(ReadsPadding):
    """At first, the logits are zero at padding, too, but they have a gradient there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.nn.init.zeros_(self.model.lm_head.weight)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = (outputs.logits[..., :8] - 1).square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(("loss", "equal"), [(ReadsPadding, 0), (ReadsPadding, 8), (CountsZeros, 0), (NewHead, 0)])
def test_a_loss_that_reads_padding_runs_padded(loss, equal, tmp_path, caplog):
    # The first batches may have no padding.
    rows = Dataset.from_list([build_ids(1)[0]] * equal + [*build_ids(24, begin=BEGIN)])
    theirs, _ = train(tmp_path / "theirs", loss, train_dataset=rows)
    callback = PaddingRemovalCallback()
    with caplog.at_level("WARNING"):
        ours, _ = train(tmp_path / "ours", loss, [callback], train_dataset=rows)
    assert_same(trajectory(ours), trajectory(theirs))
    assert "your loss reads logits or states at padding" in caplog.text
    assert callback.stats.padded_forwards > callback.stats.forwards == equal // 2  # two for each batch of four
    assert any("padfix/padded_forwards" in log for log in ours.state.log_history)
    unchecked, _ = train(tmp_path / "unchecked", loss, [PaddingRemovalCallback(parity_check=False)])
    with pytest.raises(AssertionError):  # the control
        assert_same(trajectory(unchecked), trajectory(theirs), rtol=1e-3)


class ReadsPaddingInEvaluation(ReadsPadding):
    def compute_loss(self, model, *args, **kwargs):
        return (Margins if model.training else ReadsPadding).compute_loss(self, model, *args, **kwargs)


def test_a_loss_that_reads_padding_only_in_evaluation_runs_padded(tmp_path):
    runs = [PaddingRemovalCallback(), PaddingRemovalCallback(parity_check=False)]
    theirs, *ours = (
        trajectory(train(tmp_path, ReadsPaddingInEvaluation, callbacks, eval_on_start=True)[0])
        for callbacks in ([], *([callback] for callback in runs))
    )
    assert_same(ours[0], theirs)
    with pytest.raises(AssertionError):  # the control
        assert_same(ours[1], theirs, rtol=1e-3)
    before_training = (build_trainer(tmp_path, ReadsPadding, c).evaluate() for c in ([], [PaddingRemovalCallback()]))
    assert len({round(metrics["eval_loss"], 4) for metrics in before_training}) == 1


@pytest.mark.parametrize("kind", ["plain", "SFT", "DPO"])
def test_an_evaluation_whose_metrics_read_padding_runs_padded(kind, tmp_path):
    def metrics(found, reads):
        is_token = (found.label_ids != -100) & (found.label_ids != SPECIAL["<pad>"])
        return {"zeros": (found.predictions[is_token | reads] == 0).mean()}

    def evaluated(reads, *callbacks):
        given = {"compute_metrics": partial(metrics, reads=reads)}
        if kind == "plain":
            trainer = build_trainer(tmp_path, Trainer, **given)
        else:
            data = rows_for(kind, build_pairs(8))
            trainer = make_trainer(trl, kind, tmp_path, train_dataset=data, eval_dataset=data, **given)
        for callback in callbacks:
            callback.attach(trainer)
        return trainer.evaluate()["eval_zeros"]

    for reads in (False, True):
        callback = PaddingRemovalCallback()
        assert evaluated(reads, callback) == evaluated(reads) == 0
        assert (callback.stats.forwards == 0) is reads
    assert evaluated(True, PaddingRemovalCallback(parity_check=False)) > 0.1  # the control


WITHOUT_TRL = """
import sys
sys.modules["trl"] = None
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl_padfix import PaddingRemovalCallback

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=2))
row = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [5, 6, 7, -100, -100]}
settings = dict(output_dir=sys.argv[1], max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
metrics = lambda found: {"positions": found.predictions.shape[1]}
given = dict(train_dataset=[row] * 8, eval_dataset=[row] * 8, data_collator=default_data_collator)
trainer = Trainer(model, TrainingArguments(**settings), compute_metrics=metrics, **given)
callback = PaddingRemovalCallback()
callback.attach(trainer)
trainer.train()
print(callback.stats.packed_tokens, trainer.evaluate()["eval_positions"])
"""


def test_it_trains_and_evaluates_without_trl(tmp_path):
    assert run_script("-c", WITHOUT_TRL, str(tmp_path)).stdout.splitlines()[-1] == "24 5"


@pytest.mark.parametrize("mask", ["none", "prepared"])
def test_a_batch_without_a_mask_of_its_rows_trains_and_a_warning_says_the_loss_is_not_compared(mask, tmp_path, caplog):
    class OtherMasks(ReadsPadding):
        def _prepare_inputs(self, inputs):
            keep = inputs["attention_mask"].bool()
            prepared = (keep[:, None] & torch.ones(keep.shape[1], keep.shape[1], dtype=torch.bool).tril())[:, None]
            return {**inputs, "attention_mask": None if mask == "none" else prepared}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return Trainer.compute_loss(self, model, dict(inputs), return_outputs, num_items_in_batch)

    callback = PaddingRemovalCallback()
    trainer = build_trainer(tmp_path, OtherMasks, max_steps=2)
    callback.attach(trainer)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("The loss of OtherMasks is not compared") == (mask == "prepared")


def test_what_it_logs_reaches_the_reporters_before_it(tmp_path, capsys):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    train(tmp_path, callbacks=[Reporter(), PaddingRemovalCallback(prefix_sharing=True)])
    assert sum("padfix/pad_fraction" in log for log in seen) == 5
    said = capsys.readouterr().out
    assert said.count("parity ok, the trainer's own loss") == 2  # of training and of evaluation
    assert said.count(", with other values at padding ") == 2  # embeddings, and zeros for logits


def test_a_prediction_or_a_log_within_a_training_does_not_end_its_metrics(tmp_path):
    class Logs(Margins):
        def compute_loss(self, *args, **kwargs):
            if self.model.training:
                self.log({"own": 1.0})
            return super().compute_loss(*args, **kwargs)

    class Predicts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer.predict(trainer.train_dataset.select(range(2)))

    callback = PaddingRemovalCallback()
    trainer = build_trainer(tmp_path, Logs, [callback, Predicts()], attach=False, max_steps=3, logging_steps=1)
    assert trainer.predict(trainer.train_dataset).metrics["test_loss"] > 0  # before the training, too
    callback.attach(trainer)
    trainer.train()
    assert ["perf/tokens_per_second" in log for log in trainer.state.log_history if "loss" in log] == [True] * 3


def test_a_callback_keeps_no_model_of_a_cell_that_runs_again(tmp_path):
    kept = []
    for _ in range(2):
        callback = PaddingRemovalCallback()
        trainer = build_trainer(tmp_path, callbacks=[callback], max_steps=1)
        trainer.train()
        kept.append(weakref.ref(trainer.model))
    gc.collect()
    assert [model() for model in kept] == [None, trainer.model]


def test_a_second_training_attaches_again_also_after_a_failed_one(tmp_path):
    callback = PaddingRemovalCallback()
    trainer = build_trainer(tmp_path, callbacks=[callback], max_steps=2)

    def raise_once(*args, **kwargs):
        raise RuntimeError("once")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compute_loss", raise_once)
        with pytest.raises(RuntimeError, match="once"):
            trainer.train()
    assert PaddingRemoval.of(trainer.model) is callback.handles[0]
    trainer.train()
    assert not {"compute_loss", "prediction_step"} & vars(trainer).keys()
    first = callback.stats.packed_tokens
    trainer.train()
    assert callback.stats.packed_tokens == first > 0
    assert PaddingRemoval.of(trainer.model) is None


# -- what it does not take: each is said before the first step


ENCODER = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
BY_TRAINER = {"torch_compile": True, "torch_compile_backend": "eager"}


def build_compiled() -> torch.nn.Module:
    model = build_model()
    model.compile(backend="eager")
    return model


BAD = {
    "no transformers model": (lambda: torch.nn.Linear(2, 2), {}, TypeError, "contains none"),
    "an encoder": (lambda: BertForMaskedLM(ENCODER), {}, PaddingRemovalError, "uses bidirectional or cross-attention"),
    "compiled by the trainer": (build_model, BY_TRAINER, PaddingRemovalError, "Leave it uncompiled"),
    "compiled by its user": (build_compiled, {}, PaddingRemovalError, "Leave it uncompiled"),
}


def test_attach_adds_the_callback_and_takes_a_trainer(tmp_path):
    callback, trainer = PaddingRemovalCallback(), build_trainer(tmp_path, max_steps=1)
    with pytest.raises(TypeError, match="takes the trainer"):
        callback.attach(trainer.model)
    ours = build_trainer(tmp_path, padding_free_trainer(Margins), [PaddingRemovalCallback()], attach=False)
    for start in (callback.attach, Trainer.train, Trainer.evaluate):
        with pytest.raises(TypeError, match="removes padding itself"):
            start(ours)
    for given in (PaddingRemovalCallback(), callback, callback):  # the first is one of a cell that runs again
        given.attach(trainer)
    trainer.train()
    assert (len(callback.reports), callback.stats.forwards) == (1, 1)
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, PaddingRemovalCallback)] == [callback]


def test_a_callback_serves_one_trainer_at_a_time(tmp_path):
    callback = PaddingRemovalCallback()
    first, second = (build_trainer(tmp_path, callbacks=[callback], max_steps=1) for _ in range(2))
    with pytest.raises(ValueError, match="belongs to another trainer"):
        first.train()
    for trainer in (second, first):  # the control
        callback.attach(trainer)
        trainer.train()
        assert callback.stats.forwards == 1


class Interrupts(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.parametrize("attach", [True, False])
def test_a_cell_of_a_notebook_runs_again_after_an_interrupted_training(attach, tmp_path):
    model, tokens = build_model(), []
    for interrupts in ([Interrupts()], []):
        callback = PaddingRemovalCallback()  # a new one, since the cell makes it
        trainer = build_trainer(tmp_path, Trainer, [callback, *interrupts], attach, model=model)
        if interrupts:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            assert PaddingRemoval.of(model) is not None
        else:
            trainer.train()
        tokens.append(callback.stats.packed_tokens)
    assert 0 < tokens[0] < tokens[1]
    assert PaddingRemoval.of(model) is None
    trainer.add_callback(PaddingRemovalCallback())  # the control: two in one training
    with pytest.raises(ValueError, match="A callback did it"):
        trainer.train()


def test_bad_input_is_refused_before_the_first_step(tmp_path):
    for build, config, error, said in BAD.values():
        callback = PaddingRemovalCallback(prefix_sharing=True)
        given = {"model": build(), "remove_unused_columns": False} | config
        trainer = build_trainer(tmp_path, attach=False, callbacks=[callback], **given)
        trainer.compute_loss = lambda *args, **kwargs: pytest.fail("a step began")
        with pytest.raises(error, match=f"(?s){said}"):
            trainer.train()
        assert trainer.state.global_step == 0
        assert callback.handles == []


@pytest.mark.parametrize("attach", [True, False])
def test_a_model_that_fsdp_has_wrapped_already_is_refused(attach, tmp_path, monkeypatch):
    trainer = build_trainer(tmp_path, callbacks=[PaddingRemovalCallback()], attach=attach, max_steps=1)
    fsdp = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr("trl_padfix.integrations.callback.AcceleratorState", lambda: fsdp)
    if attach:
        trainer.train()  # it is wrapped after `attach`
    with pytest.raises(PaddingRemovalError, match=r"(?s)FSDP has taken over.*callback\.attach"):
        trainer.train()


def test_one_line_says_whether_padding_was_removed_in_the_first_step_without_an_evaluation_before_it(tmp_path, capsys):
    equal = Dataset.from_list([build_ids(1)[0]] * 8)
    for given in ({}, {"eval_on_start": True}, {"train_dataset": equal}):
        train(tmp_path, callbacks=[PaddingRemovalCallback(parity_check=False)], max_steps=2, **given)
    first, second, third = (line for line in capsys.readouterr().out.splitlines() if "First step: " in line)
    assert "were computed" in first == second
    assert "the batch has none" in third


def test_errors_advise_settings_in_the_words_of_the_stack(tmp_path, monkeypatch):
    break_mode(monkeypatch, "prefix sharing")
    given = {"padfix_prefix_sharing": True}
    said = {
        "Use `cli train`, or `padfix_prefix_sharing: false` if that alone passes; `padfix_parity_check: false`":
        callback_from(given, without="`cli train`"),
        "Use no `PaddingRemovalCallback`, or `prefix_sharing=False`": PaddingRemovalCallback(**settings_in(given)),
    }  # fmt: skip
    for text, callback in said.items():
        with pytest.raises(ParityError, match=text):
            build_trainer(tmp_path, callbacks=[callback]).train()


def test_keys_of_another_stack_that_are_none():
    given = {"padfix_prefix_sharing": "auto", "padfix_parity_check": None, "lr": 1}
    assert settings_in(given) == {"prefix_sharing": "auto"}
    with pytest.raises(ValueError, match=r"no keys \['padfix_packing', 'padfix_sharing'\]; it has \['padfix_prefix_"):
        settings_in({"padfix_sharing": True, "padfix_packing": False, "padfix_parity_check": True})


def test_a_run_that_is_not_compared_is_told(tmp_path, caplog):
    class Headless(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model.model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state[:, 0].square().mean()

    callback = PaddingRemovalCallback()
    with caplog.at_level("WARNING"):
        build_trainer(tmp_path, Headless, [callback], max_steps=2).train()
    assert callback.stats.packed_tokens < callback.stats.padded_tokens
    assert caplog.text.count("were not compared on the first batch") == 1


@pytest.mark.parametrize("sharing", [False, True])
def test_the_first_batch_is_compared_as_the_trainer_hands_it_over(sharing, tmp_path, caplog):
    """ms-swift embeds images in a hook before the forward, which then gets no ids to compare, nor to share."""
    callback = PaddingRemovalCallback(prefix_sharing=sharing)
    trainer = build_trainer(tmp_path, Trainer, [callback], False, max_steps=1)
    embeddings = trainer.model.get_input_embeddings()

    def embed(module, args, kwargs):
        return args, {**kwargs, "inputs_embeds": embeddings(kwargs["input_ids"]), "input_ids": None}

    trainer.model.register_forward_pre_hook(embed, with_kwargs=True)
    hooks = len(trainer.model._forward_pre_hooks)
    callback.attach(trainer)
    trainer.train()
    assert len(trainer.model._forward_pre_hooks) == hooks
    if sharing:
        assert not callback.reports
        assert "compares token ids" in caplog.text
        assert 0 < callback.handles[0].stats.packed_tokens < callback.handles[0].stats.padded_tokens
        return
    (report,) = callback.reports
    assert report.ok
    assert 0 < report.packed_tokens < report.padded_tokens
