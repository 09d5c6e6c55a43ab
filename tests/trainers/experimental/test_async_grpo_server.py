"""Asynchronous GRPO with TRL's own rollout worker and a server on the loopback; and what goes wrong with them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import trl
from accelerate import PartialState
from datasets import Dataset
from kit.trainer_runs import build_tokenizer
from packaging.version import Version


if not Version("1.16") <= Version(trl.__version__) < Version("1.18"):
    pytest.skip("another asynchronous GRPO than that of TRL 1.16", allow_module_level=True)

import requests
from kit.async_runs import SHARED, CountedTransfer, build_steps, make, train
from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from zoo.models import build

from trl_padfix.experimental import rollout_checks
from trl_padfix.experimental.async_grpo import AsyncGRPOConfig
from trl_padfix.tools.rollout_server import FileTransfer, kill, letters, serve


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'w2 ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "w3 ",
    "fields": {"content": {"close_pattern": r"<eos>\s*", "content": "text"}},
}


SECONDS = 60
"""Bound of an error that is expected within seconds: spawning a process on a busy machine is most of it."""

PROMPTS = [{"prompt": [{"role": "user", "content": f"w{i} w{i + 1} w9 w8 w5 w6 w4 w11"}]} for i in range(10, 30)]


@pytest.fixture
def policy(tmp_path):
    build("qwen2").save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    for name, seconds in {"POLL": 0.05, "SERVER": 0.1, "IDLE": 0.1}.items():
        monkeypatch.setattr(rollout_checks, f"{name}_SECONDS", seconds)


@pytest.fixture(autouse=True)
def no_process_is_left():
    before, begin = set(multiprocessing.active_children()), time.monotonic()
    yield
    assert set(multiprocessing.active_children()) <= before
    assert time.monotonic() - begin < 3 * SECONDS


@pytest.fixture
def make_online(policy, tmp_path, monkeypatch):
    """A trainer with TRL's own worker."""
    pytest.importorskip("aiohttp")
    # The worker asks whether vLLM is installed, and never imports it.
    monkeypatch.setattr("trl.experimental.async_grpo.async_rollout_worker.is_vllm_available", lambda: True)
    tokenizer = build_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.response_template = RESPONSE_TEMPLATE
    settings = {
        "token_budget": None, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 10,
        "max_inflight_tasks": 4, "max_steps": 3, "max_staleness": 2, "request_timeout": 10,
        "heartbeat_stale_after_s": 20, "vllm_server_timeout": 2,
    }  # fmt: skip
    given = {
        "rollout_worker": None,
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list(PROMPTS),
        "reward_funcs": letters,
    }
    return partial(make, policy, tmp_path / "run", [], **settings | given | SHARED)


@pytest.mark.slow
def test_trl_worker_and_a_server(policy, tmp_path, make_online):
    with serve(policy) as server:
        trainer = make_online(vllm_server_base_url=server.url, weight_transfer=FileTransfer(server.url, tmp_path))
        run = train(trainer)
    logs = [log for log in run.logs if "loss" in log]
    assert len(logs) == 3
    # Before the first update the probabilities of the server are those of the tree.
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert server.updates == 4  # at the begin, and after each step
    assert server.completions >= 24
    assert trainer.args.token_budget == server.max_length == 128
    assert 0 < run.entered < sum(log["batch/forwarded_tokens_per_step"] for log in logs)


class AfterFirstStep(TrainerCallback):
    """Calls a function at the end of the first step."""

    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.function()


@pytest.mark.matrix
@pytest.mark.slow
def test_a_server_that_is_killed_ends_the_run(policy, tmp_path, make_online):
    with serve(policy) as server:
        trainer = make_online(
            vllm_server_base_url=server.url, weight_transfer=FileTransfer(server.url, tmp_path), max_steps=1000
        )
        trainer.add_callback(AfterFirstStep(lambda: kill(server)))
        with pytest.raises((RuntimeError, requests.ConnectionError)):
            train(trainer)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_server_that_is_killed_while_its_answers_are_waited_for_ends_the_run(policy, make_online, monkeypatch):
    monkeypatch.setattr(rollout_checks, "SERVER_SECONDS", 1)
    with serve(policy) as server:
        trainer = make_online(
            vllm_server_base_url=server.url, weight_transfer=CountedTransfer(), max_steps=1000, vllm_server_timeout=240
        )
        # No weights are sent, so nothing but the queue finds out. TRL's worker would ask for minutes.
        trainer.add_callback(AfterFirstStep(lambda: kill(server)))
        with pytest.raises(RuntimeError, match="has refused connections for"):
            train(trainer)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_worker_that_fails_ends_the_run(policy, make_online, monkeypatch):
    with serve(policy) as server:
        monkeypatch.setattr(server, "complete", lambda **kwargs: ([], []))  # TRL's worker cannot parse this
        trainer = make_online(vllm_server_base_url=server.url, weight_transfer=CountedTransfer())
        with pytest.raises(RuntimeError, match=r"Rollout worker child has failed|process has ended"):
            train(trainer)
    assert trainer.rollout_worker._process is None


def test_stopping_a_worker_that_ends_meanwhile_does_not_wait():
    PartialState()  # without it the worker cannot log
    worker = object.__new__(AsyncRolloutWorker)
    ended = threading.Event()
    worker._process = SimpleNamespace(
        is_alive=lambda: not ended.is_set(), join=lambda timeout: ended.set(), _popen=object()
    )
    worker._stop_event_mp = SimpleNamespace(set=threading.Event().wait)  # as one that waits for the process
    rollout_checks.stop_without_waiting(worker)
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    stopping.join(timeout=SECONDS)
    assert not stopping.is_alive()
    assert worker._process is None


@pytest.mark.matrix
@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run(policy, tmp_path, make_online):
    with serve(policy) as server:
        trainer = make_online(
            vllm_server_base_url=server.url, weight_transfer=FileTransfer(server.url, tmp_path), max_steps=1000,
            heartbeat_stale_after_s=300,
        )  # fmt: skip
        trainer.add_callback(AfterFirstStep(lambda: trainer.rollout_worker._process.kill()))
        with pytest.raises(RuntimeError, match=r"rollout worker's process has ended \(exit code -9"):
            train(trainer)


@pytest.mark.parametrize(
    ("given", "seconds"), [({"vllm_server_timeout": 0.2}, 0.2), ({"vllm_server_timeout": 240}, 0.1)]
)
def test_no_server_is_an_error_before_any_process_starts(make_online, given, seconds):
    trainer = make_online(vllm_server_base_url="http://127.0.0.1:9", weight_transfer=CountedTransfer(), **given)
    with pytest.raises(TimeoutError, match=rf"No server answers at .*127\.0\.0\.1:9'` for {seconds} seconds"):
        train(trainer)
    assert trainer.rollout_worker._process is None


def test_a_server_of_another_model_is_an_error(policy, make_online):
    with serve(policy, name="another/model") as server:
        trainer = make_online(vllm_server_base_url=server.url, weight_transfer=CountedTransfer())
        with pytest.raises(ValueError, match=r"serves \['another/model'\], and the trainer asks it for .*policy"):
            train(trainer)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (build_tokenizer(), "The tokenizer has no chat template"),
        (build_tokenizer(chat_template=CHAT_TEMPLATE), "The tokenizer has no `response_template`"),
    ],
)
def test_a_tokenizer_whose_answers_cannot_be_parsed_is_an_error(make_online, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        make_online(processing_class=tokenizer, weight_transfer=CountedTransfer())


def test_a_token_budget_that_no_sample_fits_in_is_an_error(policy, tmp_path):
    with pytest.raises(ValueError, match=r"max_completion_length=2048.*token_budget=100"):
        make(policy, tmp_path / "run", [], token_budget=100, **SHARED)
    samples = build_steps(build("qwen2"), 9)
    with pytest.raises(ValueError, match="64 samples one after the other have more tokens than `token_budget=20`"):
        train(make(policy, tmp_path / "run", samples, token_budget=20, max_completion_length=10, **SHARED))


def test_a_worker_without_samples_is_an_error(policy, tmp_path):
    limits = {"request_timeout": 0.2, "heartbeat_stale_after_s": 0.1}
    trainer = make(policy, tmp_path / "run", [], **limits, **SHARED)
    with pytest.raises(RuntimeError, match=r"rollout worker \(RecordedWorker\) has yielded no sample for"):
        train(trainer)
    assert trainer.rollout_worker.is_stopped


@pytest.mark.parametrize(
    ("runs", "timeout", "seconds"),
    [(False, 0.2, 0.1), (False, 0.3, 0.4), (True, 0.2, 0.3)],
    ids=["nothing runs", "a time of the user", "a thread"],
)
def test_a_worker_that_runs_nothing_is_not_waited_for(policy, tmp_path, monkeypatch, runs, timeout, seconds):
    monkeypatch.setattr(AsyncGRPOConfig.__dataclass_fields__["request_timeout"], "default", 0.2)  # it is 10 minutes
    monkeypatch.setattr(rollout_checks, "_OTHER_THREADS", set(threading.enumerate()))
    trainer = make(policy, tmp_path / "run", [], heartbeat_stale_after_s=0.1, request_timeout=timeout, **SHARED)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    if runs:
        thread.start()
    try:
        with pytest.raises(RuntimeError, match=rf"no sample for \d+ seconds; the limit is {seconds:g} "):
            train(trainer)
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"eval_strategy": "steps"}, ValueError, "has no evaluation"),
        ({"train_dataset": Dataset.from_list([{"text": "w3"}])}, ValueError, "no column 'prompt'"),
    ],
)
def test_arguments_that_cannot_be_are_errors(policy, tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        make(policy, tmp_path / "run", [], **SHARED | given)


def test_evaluation_is_an_error(policy, tmp_path):
    with pytest.raises(NotImplementedError, match="has no evaluation"):
        make(policy, tmp_path / "run", [], **SHARED).evaluate()
