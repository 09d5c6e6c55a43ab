"""A custom loss may call the model in other ways than TRL: the budget holds, or the log says that it does not."""

import pytest
import torch
from kit.budget_runs import BUDGET, assert_same, build_branching, make
from kit.cells import every_pair
from kit.observe import entered_tokens
from kit.trainer_runs import our_warnings, trained

from trl_padfix.core.call.runner_patch import RunnerPatch
from trl_padfix.trainers.batching.prefix_schedule import MicroBatchRunner
from trl_padfix.trainers.batching.sub_batches import SubBatches


def of_decoder(model, ids, mask):
    return model.lm_head(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)


def of_embeddings(model, ids, mask):
    return model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits


def of_embeddings_in_the_decoder(model, ids, mask):
    embeddings = model.get_input_embeddings()(ids)
    return model.lm_head(model.model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state)


def by_position(model, ids, mask):
    return model(ids, mask).logits


def without_mask(model, ids, mask):
    return model(input_ids=ids).logits


def with_hidden_states(model, ids, mask):
    output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return output.logits * (1 + output.hidden_states[1].detach()[..., :1])


def with_cache(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, use_cache=True).logits


CALLS = (of_decoder, of_embeddings, of_embeddings_in_the_decoder, by_position, without_mask, with_hidden_states)
CALLS = {f.__name__: f for f in CALLS}


def calling(call):
    """A loss that takes its logits from `call`, a mean over rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        labels = inputs["labels"] if "labels" in inputs else ids.masked_fill(inputs["completion_mask"] == 0, -100)
        logits = call(model, ids, mask)[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()

    return compute_loss


@pytest.fixture
def run(tmp_path, monkeypatch):
    def train(name, call, ours, **config):
        config = {"max_steps": 3} | ({"parity_check": False} if ours else {}) | config
        trainer = make(name, tmp_path, ours=ours, **config)
        own = type("Own", (type(trainer),), {"compute_loss": calling(call)})
        monkeypatch.setattr(trainer, "__class__", own)
        forwards = entered_tokens(trainer.model)
        return trained(trainer), forwards, trainer

    return train


@pytest.mark.parametrize(
    ("name", "call", "mode"),
    every_pair(
        ["sft", "dpo"], CALLS, [{}, {"prefix_sharing": True}, {"loss_reduction": "rows", "prefix_sharing": True}]
    ),
)
def test_the_budget_holds_for_every_way_to_call_the_model(name, call, mode, run):
    if call == "without_mask" and "loss_reduction" in mode:
        pytest.skip("its loss depends on padding, so it is no mean over rows")
    theirs, *_ = run(name, CALLS[call], False)
    figures, forwards, _ = run(name, CALLS[call], True, **mode)
    assert_same(figures, theirs)
    assert max(forwards) <= BUDGET[name]


def test_it_does_not_where_the_decoder_has_no_patch(run, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.call.runner_patch._modules_of", lambda model: [model])
    _, forwards, _ = run("sft", of_decoder, True)
    assert max(forwards) > BUDGET["sft"]


def test_it_does_not_where_embeddings_run_as_planned(run, monkeypatch):
    """A micro-batch is planned with shared prefixes, and embeddings share none."""
    monkeypatch.setattr(
        MicroBatchRunner, "embeddings", property(lambda runner: None, lambda runner, value: None), False
    )
    mode = {"loss_reduction": "rows", "prefix_sharing": True, "train_dataset": build_branching("sft")}
    _, forwards, _ = run("sft", of_embeddings, True, **mode)
    assert max(forwards) > BUDGET["sft"]
    monkeypatch.undo()
    theirs, *_ = run("sft", of_embeddings, False, train_dataset=mode["train_dataset"])
    figures, forwards, _ = run("sft", of_embeddings, True, **mode)
    assert_same(figures, theirs)
    assert max(forwards) <= BUDGET["sft"]


def test_a_call_that_cannot_be_split_is_named_once(run, caplog):
    theirs, *_ = run("sft", with_cache, False)
    with caplog.at_level("WARNING"):
        figures, forwards, _ = run("sft", with_cache, True)
    assert_same(figures, theirs)
    assert max(forwards) > BUDGET["sft"]
    said = [message for message in our_warnings(caplog) if "was not applied" in message]
    assert len(said) == 1
    assert "Qwen2ForCausalLM" in said[0]
    assert "`use_cache=True`" in said[0]


def test_patches_of_an_earlier_trainer_go(tmp_path):
    first = make("sft", tmp_path, ours=True)
    second = make("sft", tmp_path, ours=True, model=first.model)
    for module in (second.model, second.model.model):
        patches, patch = [], vars(module).get("forward")
        while patch is not None:
            patches.append(patch)
            patch = getattr(patch, "below", None)
        assert sum(isinstance(patch, RunnerPatch) for patch in patches) == 1
    second.restore_padding()
    first.restore_padding()
    assert not any(isinstance(vars(module).get("forward"), RunnerPatch) for module in second.model.modules())


def test_arguments_without_a_row_for_each_row_are_not_cut():
    """Three rows, and three axes of M-RoPE, three columns to score, three positions in a cache."""
    ids, mask = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.int64)
    axes = torch.arange(36).view(3, 3, 4)
    columns = torch.arange(3)
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids, "position_ids": axes}
    call |= {"logits_to_keep": columns, "cache_position": columns}
    batch = SubBatches(8, sharing=False).split(ids, mask)
    assert len(batch.rows) == 2
    for rows, of_rows in zip(batch.rows, batch.calls(call), strict=True):
        assert torch.equal(of_rows["labels"], ids[rows])
        assert torch.equal(of_rows["position_ids"], axes[:, rows])
        assert of_rows["logits_to_keep"] is of_rows["cache_position"] is columns
