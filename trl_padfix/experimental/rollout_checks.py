"""Checks for asynchronous GRPO: of the server, of the tokenizer, and of the rollout worker."""

from __future__ import annotations

import copy
import multiprocessing
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from trl.chat_template_utils import add_response_schema
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

from ..trainers.temporary_attributes import temporarily_set


if TYPE_CHECKING:
    from ..trainers.parts import PaddingFreeTrainer


__all__ = ["RolloutQueue", "check_server", "check_tokenizer", "stop_without_waiting"]

logger = get_logger(__name__)

MAX_DROPPED_SAMPLES = 64
"""Samples in a row that exceed the token budget, after which no sample is expected to fit."""

POLL_SECONDS = 1.0
"""How long the queue is waited for before the worker's health is checked."""

SERVER_SECONDS = 15.0
"""How long a server may refuse connections, before or during training, if no `vllm_server_timeout` is set."""

IDLE_SECONDS = 15.0
"""How long a worker that runs nothing in this process may yield no sample, if no `request_timeout` is set."""

_OTHER_THREADS = set(threading.enumerate())
"""Threads that run when this module is imported: none is a rollout worker."""


def check_server(trainer: PaddingFreeTrainer) -> None:
    """
    Wait for the server, as TRL does, and check that it serves the model of the trainer.

    Raises:
        TimeoutError: If no server answers in time.
        ValueError: If it serves another model: TRL's worker would fail in its first request.
    """
    import requests  # only here: TRL does not require it, and `from trl_padfix import *` imports this module

    client, timeout = trainer.vllm_client, _server_timeout(trainer)
    if obstacle := _obstacle_to_server(trainer):
        logger.warning(f"No server answers at {client.server_url} ({obstacle}). Waiting for one, {timeout:g} seconds.")
    with temporarily_set(client, "server_timeout", timeout):
        try:
            client.wait_for_server_ready(poll_interval_s=min(POLL_SECONDS, timeout))
        except TimeoutError as error:
            raise TimeoutError(
                f"No server answers at `vllm_server_base_url={client.server_url!r}` for {timeout:g} seconds. Start it "
                f"(`vllm serve {trainer.rollout_worker._loop_kwargs['model_name']}`) before the training, or set the "
                "seconds to wait for one that is loading its model: `vllm_server_timeout=600`."
            ) from error
    answer = requests.get(f"{client.server_url}/v1/models", timeout=5)
    served = [model["id"] for model in answer.json().get("data", [])] if answer.ok else []
    requested = trainer.rollout_worker._loop_kwargs["model_name"]
    # With adapter sync the worker asks for adapters, which the trainer loads by names of its own.
    if served and requested not in served and not trainer._lora_sync:
        raise ValueError(
            f"The server at {client.server_url} serves {served}, and the trainer asks it for {requested!r}. Serve the "
            f"model that is trained (`vllm serve {requested}`), or give it that name (`--served-model-name "
            f"{requested}`)."
        )


def _server_timeout(trainer: PaddingFreeTrainer) -> float:
    """Seconds that a server is waited for: `vllm_server_timeout`, if it is not TRL's default of four minutes."""
    return SERVER_SECONDS if _is_default(trainer, "vllm_server_timeout") else trainer.args.vllm_server_timeout


def _is_default(trainer: PaddingFreeTrainer, field: str) -> bool:
    return getattr(trainer.args, field) == type(trainer.args).__dataclass_fields__[field].default


def _obstacle_to_server(trainer: PaddingFreeTrainer) -> str:
    """Why the server cannot be connected to; empty if it can, also if it is slow."""
    import requests

    try:
        requests.get(f"{trainer.vllm_client.server_url}/health", timeout=5)
    except requests.ConnectionError as error:
        return type(error).__name__
    except requests.RequestException:
        pass
    return ""


def check_tokenizer(tokenizer: Any) -> None:
    """
    Raise a `ValueError` if TRL's worker could not parse answers: its process would end in the first turn.

    TRL has response templates for some chat templates; for others the tokenizer must have a `response_template`.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "The tokenizer has no chat template, and TRL's rollout worker formats prompts as conversations. Use the "
            "tokenizer of a chat model, or set `tokenizer.chat_template`."
        )
    if getattr(tokenizer, "response_template", None) is not None:
        return
    try:
        template = getattr(add_response_schema(copy.deepcopy(tokenizer)), "response_template", None)
    except ValueError:
        template = None
    if template is None:
        raise ValueError(
            "The tokenizer has no `response_template`, and its chat template is none of those for which TRL has one: "
            "the rollout worker could not parse the first answer. Set `tokenizer.response_template`, which says where "
            "the content of an answer begins and ends (transformers: 'Response parsing')."
        )


def stop_without_waiting(worker: Any) -> None:
    """Let `worker.stop()` return even if the worker's process ends: TRL's method would then wait forever."""
    worker.stop = partial(_stop, worker)


def _stop(worker: Any) -> None:
    # `set` waits for an answer of the process, which never comes if the process has failed or was killed. So a thread
    # runs it, which nothing waits for.
    setting = threading.Thread(target=worker._stop_event_mp.set, daemon=True)
    with temporarily_set(worker, "_stop_event_mp", SimpleNamespace(set=setting.start)):
        type(worker).stop(worker)


class RolloutQueue(RolloutQueueDataset):
    """
    TRL's queue of samples, which ends a run that will never get another sample.

    Args:
        trainer (`AsyncGRPOTrainer`):
            The trainer.
        check_health_fn (`Callable`):
            The worker's own check of its health.
        **kwargs:
            Further arguments of TRL's class.
    """

    def __init__(self, trainer: PaddingFreeTrainer, *, check_health_fn: Any, **kwargs: Any) -> None:
        self._trainer, self._check_worker = trainer, check_health_fn
        self._waits_since, self._has_warned = time.monotonic(), False
        self._server_answered = time.monotonic()
        super().__init__(check_health_fn=self._check, poll_interval_s=POLL_SECONDS, **kwargs)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        too_long = 0
        self._waits_since = time.monotonic()
        for sample in super().__iter__():
            budget, length = self._trainer.args.token_budget or 0, len(sample["input_ids"])
            too_long = too_long + 1 if 0 < budget < length else 0
            if too_long == MAX_DROPPED_SAMPLES:
                raise ValueError(
                    f"{too_long} samples one after the other have more tokens than `token_budget={budget}` (the last "
                    f"one {length}), so TRL drops them all and no step is made. Raise the budget, or lower "
                    "`max_completion_length`."
                )
            yield sample
            self._waits_since = time.monotonic()  # without the time that the step took

    def _check(self, stale_after_s: float) -> None:
        """Raise an error if an empty queue will stay empty; TRL calls this when no sample came for `POLL_SECONDS`."""
        self._check_worker(stale_after_s)
        process = getattr(self._trainer.rollout_worker, "_process", None)
        if process is not None and not process.is_alive():  # killed: it could not report an error
            raise RuntimeError(
                f"The rollout worker's process has ended (exit code {process.exitcode}; -9: killed, by the kernel if "
                "memory ran out), so no sample will come. Its last lines in the log may say more."
            )
        if process is not None:
            self._check_server()
        waited = time.monotonic() - self._waits_since
        # A request may take `request_timeout` seconds, so a worker that works has no sample for that long.
        limit = self._trainer.args.request_timeout + stale_after_s
        if not _has_possible_workers() and _is_default(self._trainer, "request_timeout"):
            limit = min(limit, IDLE_SECONDS)
        if waited > limit:
            raise RuntimeError(
                f"The rollout worker ({type(self._trainer.rollout_worker).__name__}) has yielded no sample for "
                f"{waited:.0f} seconds; the limit is {limit:g} (`request_timeout` and `heartbeat_stale_after_s`, or "
                f"{IDLE_SECONDS:g} if this process runs no thread and no process besides the training, and no "
                "`request_timeout` is set). Look at the log of the worker and of the server; set `request_timeout` "
                "if completions take that long."
            )
        if waited > limit / 10 and not self._has_warned:
            self._has_warned = True
            logger.warning(f"No sample has come from the rollout worker for {waited:.0f} seconds. Said once.")

    def _check_server(self) -> None:
        """Raise an error if the server has gone: TRL's worker repeats a request for minutes before it fails."""
        if not (obstacle := _obstacle_to_server(self._trainer)):
            self._server_answered = time.monotonic()
            return
        gone = time.monotonic() - max(self._server_answered, self._waits_since)
        if gone > _server_timeout(self._trainer):
            raise RuntimeError(
                f"The server at {self._trainer.vllm_client.server_url} has refused connections for {gone:.0f} seconds "
                f"({obstacle}), so no sample will come. Its log may say why it ended. Weights of the run are in its "
                "checkpoints: start a server, and resume."
            )


def _has_possible_workers() -> bool:
    """Whether a thread or a child of this process could still put samples into the queue."""
    if multiprocessing.active_children():
        return True
    others = set(threading.enumerate()) - _OTHER_THREADS
    # Progress bars have a thread, and so has TRL's queue: it logs samples.
    return any(not type(t).__module__.startswith("tqdm") and t.name != "rollout-trace-logger" for t in others)
