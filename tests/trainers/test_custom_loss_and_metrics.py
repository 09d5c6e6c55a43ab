"""Metrics and losses that users define: the labels and inputs that they get, and what they may compute."""

import pytest
import torch
import trl
from datasets import Dataset
from kit.methods import make_trainer
from kit.trainer_runs import assert_same, trained

import trl_padfix


TEXTS = Dataset.from_list([{"text": "w3 " * (1 + 3 * i % 11)} for i in range(7)])
"""Of which every token is trained, the first of a row too."""


def shifted_metrics(prediction) -> dict[str, float]:
    """Tokens that are predicted and their mean negative log-likelihood, as examples of TRL compute it."""
    logits, labels = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
    each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return {
        "nats": each.sum().item() / int((labels[:, 1:] != -100).sum()),
        "tokens": int((labels[:, 1:] != -100).sum()),
    }


def evaluate(library, folder, compute_metrics=shifted_metrics, **config):
    given = {"train_dataset": TEXTS, "eval_dataset": TEXTS, "per_device_eval_batch_size": 3, "loss_type": "nll"}
    return make_trainer(library, "SFT", folder, compute_metrics=compute_metrics, **given | config).evaluate()


def test_compute_metrics_is_given_trls_labels_on_either_side(tmp_path):
    theirs = evaluate(trl, tmp_path)
    for side, padding_free in (("left", False), ("left", True), ("right", True)):
        ours = evaluate(trl_padfix, tmp_path, padding_side=side, padding_free=padding_free)
        assert ours["eval_tokens"] == theirs["eval_tokens"] > 0
        assert ours["eval_nats"] == pytest.approx(theirs["eval_nats"], abs=1e-5)
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)


def test_compute_metrics_is_given_inputs_that_fit_the_labels(tmp_path):
    def fit(prediction) -> dict[str, float]:
        inputs, labels = (torch.as_tensor(values) for values in (prediction.inputs, prediction.label_ids))
        return {"fit": bool((labels[labels != -100] == inputs[labels != -100]).all())}

    given = {"include_for_metrics": ["inputs"], "padding_side": "left", "padding_free": True}
    assert evaluate(trl_padfix, tmp_path, fit, **given)["eval_fit"]


@pytest.mark.parametrize("config", [{}, {"padding_free": True, "max_tokens_per_batch": 40}])
def test_a_loss_of_a_subclass_scores_no_token_from_padding(config, tmp_path):
    """Labels of first tokens, which a left-padded batch is collated with, are gone before any `compute_loss`."""
    logs = {}
    for library, given in ((trl, {}), (trl_padfix, config | {"padding_side": "left"})):

        class Own(library.SFTTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
                return (outputs.loss, outputs) if return_outputs else outputs.loss

        given = {"max_steps": 2, "per_device_train_batch_size": 3, "max_length": 16} | given
        data = {"train_dataset": TEXTS, "eval_dataset": TEXTS}
        logs[library] = trained(make_trainer(library, "SFT", tmp_path, Own, **data, **given))
    assert_same(logs[trl_padfix], logs[trl])
