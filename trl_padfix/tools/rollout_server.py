"""
A server of a policy on this machine's loopback, with the routes of vLLM that TRL's asynchronous GRPO calls.

For trying out a training without a GPU: it answers from a model of transformers, token by token. It lives in threads
of this process and ends with its block. NCCL reaches no CPU, so weights travel as the path of a file, by
[`FileTransfer`]; all other routes, and all that is said about them, are those of vLLM.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import requests
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


if TYPE_CHECKING:
    from ..experimental.async_grpo import AsyncGRPOConfig


__all__ = ["FileTransfer", "Server", "kill", "letters", "serve", "serve_policy"]

_UNSUPPORTED = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Fields of the configuration that the server does not sample by, and the values that change nothing."""


class Server(ThreadingHTTPServer):
    """Completes prompts with a model of its own, of which it gets new weights."""

    daemon_threads = True

    def __init__(self, policy: str, name: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        self.max_length = self.model.config.get_text_config().max_position_embeddings
        self.name, self.updates, self.completions = name or policy, 0, 0
        self.lock, self.is_running, self.is_closed = threading.Lock(), threading.Event(), False
        self.is_running.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no error of the server."""

    @torch.no_grad()
    def complete(self, prompt: list[int], max_tokens: int, temperature: float, seed: int) -> tuple[list, list]:
        """New tokens, and the log-probabilities with which they were drawn."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < min(max_tokens, self.max_length - len(prompt)):
            self.is_running.wait(timeout=10)
            with self.lock:
                logits = self.model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            scores = (logits / temperature).log_softmax(-1)
            tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            log_probs.append(float(scores[tokens[-1]]))
            if tokens[-1] == self.model.generation_config.eos_token_id:
                break
        self.completions += 1
        return tokens, log_probs

    def get(self, route: str) -> dict[str, Any] | None:
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": self.name, "max_model_len": self.max_length}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {
                "vllm_config": {
                    "model_config": {"dtype": "torch.float32"},
                    "lora_config": None,
                    "parallel_config": {"data_parallel_size": 1},
                }
            },
        }.get(route)

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if route == "/v1/completions":
            # As vLLM: an error for a name that it does not serve, and for a prompt that leaves no room for an answer.
            if body["model"] != self.name or len(body["prompt"]) >= self.max_length:
                return None
            names = ("prompt", "max_tokens", "temperature", "seed")
            tokens, log_probs = self.complete(**{name: body[name] for name in names})
            return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": log_probs}}]}
        if route == "/pause":
            self.is_running.clear()
        elif route == "/resume":
            self.is_running.set()
        elif route == "/update_weights":
            with self.lock:
                found = self.model.load_state_dict(load_file(body["update_info"]["path"]), strict=False)
            assert not found.unexpected_keys
            self.updates += 1
        elif route not in ("/start_weight_update", "/finish_weight_update"):
            return None
        return {"ok": True}


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.0"  # one request per connection: a server that is closed leaves none open

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, value: dict[str, Any] | None) -> None:
        if self.server.is_closed:  # killed in the middle of a request
            return
        body = json.dumps(value or {"error": self.path}).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(self.server.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(self.server.post(self.path.partition("?")[0], json.loads(body or b"{}")))


@contextlib.contextmanager
def serve(policy: str, name: str | None = None) -> Iterator[Server]:
    """
    A block with a running server of a policy.

    Args:
        policy (`str`):
            Folder of the model.
        name (`str`, *optional*):
            Name that it is served by; by default its folder.
    """
    server = Server(policy, name)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        kill(server)
        thread.join()


def kill(server: Server) -> None:
    """End a server in the middle of its requests: connections are refused from now on."""
    server.is_closed = True
    server.shutdown()
    server.server_close()
    server.is_running.set()


class FileTransfer:
    """A weight transfer by a file: the server gets its path between the routes of TRL's transfer."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.path = url, folder / "weights.safetensors"

    def _post(self, route: str, **body: Any) -> None:
        requests.post(f"{self.url}{route}", json=body, timeout=30).raise_for_status()

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Any) -> None:
        self._post("/start_weight_update")
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in iterator}, self.path)
        self._post("/update_weights", update_info={"path": str(self.path)})
        self._post("/finish_weight_update")

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None: ...


@contextlib.contextmanager
def serve_policy(policy: str, config: AsyncGRPOConfig) -> Iterator[dict[str, Any]]:
    """
    A block in which the policy is served for the training of this process, without vLLM.

    Args:
        policy (`str`):
            Folder of the model.
        config ([`~trl_padfix.AsyncGRPOConfig`]):
            Configuration of the training; its `vllm_server_base_url` is set. Other processes ask no server.

    Yields:
        `dict`: Arguments of [`~trl_padfix.AsyncGRPOTrainer`].

    Raises:
        ValueError: If the configuration has settings of the sampling that the server does not know.
    """
    from trl.experimental.async_grpo import async_rollout_worker

    if found := {name: getattr(config, name) for name, off in _UNSUPPORTED.items() if getattr(config, name) != off}:
        raise ValueError(
            f"{found}: the server that this training starts on the CPU samples by `temperature` alone. Leave them "
            "out, or serve the model with vLLM."
        )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if PartialState().is_main_process:
            config.vllm_server_base_url = stack.enter_context(serve(policy)).url
        # The worker asks whether vLLM is installed, and never imports it.
        stack.enter_context(patch.object(async_rollout_worker, "is_vllm_available", lambda: True))
        yield {"weight_transfer": FileTransfer(config.vllm_server_base_url, folder)}


def letters(completions: Iterable[list[dict[str, str]]], **columns: Any) -> list[float]:
    """A reward that a spawned process can import: the fraction of the characters of an answer that are letters."""
    answers = ["".join(message["content"] for message in completion) for completion in completions]
    return [sum(map(str.isalpha, answer)) / max(len(answer), 1) for answer in answers]
