"""
A server of a policy on this machine's loopback, with the routes of vLLM that TRL's asynchronous GRPO calls.

It lives in threads of the test and ends with its block. NCCL reaches no CPU, so weights travel as the path of a file,
by [`FileTransfer`]; all other routes, and all that is said about them, are those of vLLM.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


MAX_LENGTH = 128
"""Tokens of prompt and completion: `max_model_len`."""


class Server(ThreadingHTTPServer):
    """Completes prompts with a model of its own, of which it gets new weights."""

    daemon_threads = True

    def __init__(self, policy: str, name: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        self.name, self.updates, self.completions = name or policy, 0, 0
        self.lock, self.is_running, self.is_closed = threading.Lock(), threading.Event(), False
        self.is_running.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no error of the test."""

    @torch.no_grad()
    def complete(self, prompt: list[int], max_tokens: int, temperature: float, seed: int) -> tuple[list, list]:
        """New tokens, and the log-probabilities with which they were drawn."""
        assert temperature == 1.0
        generator = torch.Generator().manual_seed(seed % 2**63)
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < min(max_tokens, MAX_LENGTH - len(prompt)):
            self.is_running.wait(timeout=10)
            with self.lock:
                logits = self.model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            scores = logits.log_softmax(-1)
            tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            log_probs.append(float(scores[tokens[-1]]))
            if tokens[-1] == self.model.generation_config.eos_token_id:
                break
        self.completions += 1
        return tokens, log_probs

    def get(self, route: str) -> dict[str, Any] | None:
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": self.name, "max_model_len": MAX_LENGTH}]},
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
            if body["model"] != self.name:
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
    """A block with a running server of the policy in a folder, by the name of the folder or another one."""
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
    """A weight transfer by a file, whose path the server is told between the routes of TRL's transfer."""

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


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'w2 ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "w3 ",
    "fields": {"content": {"close_pattern": r"<eos>\s*", "content": "text"}},
}


def reward_by_length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that a spawned process can import."""
    return [len(ids) / 10 for ids in completion_ids]
