"""Random models, called in random ways: log-probabilities and gradients against the padded computation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from campaign import HELD, REFUSED
from kit.tolerance import assert_close
from zoo.model_numbers import assert_same_gradients, gradients, weighted_sum
from zoo.models import CONFIGS, PAD, build, padded_positions, real_logps

from trl_padfix import PaddingRemovalError, remove_padding


MODELS = {
    "qwen2": [{}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                       "original_max_position_embeddings": 8}},
              {"tie_word_embeddings": True}, {"num_key_value_heads": 1}],
    "llama": [{}, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                       "high_freq_factor": 4.0, "rope_theta": 1e4,
                                       "original_max_position_embeddings": 8}},
              {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
              {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
               "max_position_embeddings": 8}, {"attention_bias": True}],
    "mistral": [{}, {"sliding_window": 2}, {"sliding_window": None}],
    "gpt2": [{}],
    "gemma2": [{}, {"attn_logit_softcapping": None}],
    "qwen3_moe": [{}],
    "gpt_oss": [{}],
    "llama4": [{}],
}  # fmt: skip
EAGER = ("gemma2", "gpt_oss")

CALLS = ["plain", "labels", "positions", "embeds", "logits_to_keep", "checkpointing", "hidden"]


def draw(chance: random.Random) -> dict[str, Any]:
    name = chance.choice(list(MODELS))
    rows, columns = chance.randint(1, 5), chance.randint(2, 14)
    side, lengths = chance.choice(["left", "right", "both", "holes"]), []
    ids = [[chance.randrange(2, 12) for _ in range(columns)] for _ in range(rows)]
    for i in range(1, rows):
        if chance.random() < 0.6:
            keep = chance.randint(0, columns)
            ids[i] = ids[0][:keep] + ids[i][keep:]
    for _ in range(rows):
        length = chance.randint(1, columns)
        begin = {"left": columns - length, "right": 0}.get(side, chance.randint(0, columns - length))
        mask = [int(begin <= c < begin + length) for c in range(columns)]
        if side == "holes":
            mask = [x and int(chance.random() < 0.8) for x in mask]
        lengths.append(mask if any(mask) else [1] * columns)
    attention = ["eager"] if name in EAGER else ["sdpa", "eager"]
    return {"model": name, "config": chance.choice(MODELS[name]), "attention": chance.choice(attention), "ids": ids,
            "mask": lengths, "sharing": chance.random() < 0.5, "call": chance.choice(CALLS),
            "seed": chance.randrange(1000)}  # fmt: skip


def attempt(case: dict[str, Any], folder: Path) -> str:
    assert case["model"] in CONFIGS
    model = build(case["model"], case["attention"], seed=case["seed"], **case["config"])
    ids, mask = torch.tensor(case["ids"]), torch.tensor(case["mask"])
    ids = ids.masked_fill(mask == 0, PAD)
    call, kwargs = case["call"], {}
    absolute = case["model"] == "gpt2"
    given = {"position_ids": padded_positions(mask)} if absolute or call == "positions" else {}
    if call == "checkpointing":
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": False})
    if call == "hidden":
        kwargs["output_hidden_states"] = True
    expected = numbers(model, ids, mask, call, **kwargs, **given)
    try:
        handle = remove_padding(model, prefix_sharing=case["sharing"])
    except (PaddingRemovalError, NotImplementedError):
        return REFUSED
    kwargs |= {"position_ids": given["position_ids"]} if call == "positions" else {}
    try:
        with handle:
            same(numbers(model, ids, mask, call, **kwargs), expected)
    except (PaddingRemovalError, NotImplementedError):
        return REFUSED
    again = numbers(model, ids, mask, call, **kwargs | given)
    assert torch.equal(again[0], expected[0]), "removing does not restore the model to the bit"
    return HELD


def logps_of(model: Any, ids: torch.Tensor, mask: torch.Tensor, call: str, **kwargs: Any) -> torch.Tensor:
    inputs = {"input_ids": ids}
    if call == "embeds":
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids)}
    if call == "labels":
        behind_real = torch.nn.functional.pad(mask[:, :-1], (1, 0)) * mask  # others are computed padded
        kwargs["labels"] = ids.masked_fill(behind_real == 0, -100)
    if call == "logits_to_keep":
        kwargs["logits_to_keep"] = torch.arange(ids.shape[1])
    output = model(**inputs, attention_mask=mask, use_cache=False, **kwargs)
    logps = real_logps(output.logits, ids, mask)
    if call == "hidden":
        logps = torch.cat([logps, *(h[mask.bool()].flatten() for h in output.hidden_states[-1:])])
    return logps


def numbers(model: Any, ids: torch.Tensor, mask: torch.Tensor, call: str, **kwargs: Any) -> tuple[Any, Any]:
    model.zero_grad()
    logps = logps_of(model, ids, mask, call, **kwargs)
    if logps.numel():
        weighted_sum(logps).backward()
    return logps.detach(), gradients(model)


def same(got: tuple, expected: tuple) -> None:
    if got[0].numel():  # no row of one token
        assert_close(got[0], expected[0], terms=64, depth=24)
    if expected[1]:
        assert_same_gradients(got[1], expected[1])
