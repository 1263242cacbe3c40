"""A small OpenAI-compatible server on loopback that samples with LocalPolicy: what EndpointPolicy is tested against without vLLM."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from turnwise.errors import ContextOverflowError
from turnwise.policies.local import LocalPolicy
from turnwise.policy import Request
from turnwise.types import Completion, SamplingParams


class TinyServer:
    """Serves /v1/completions (token ids in and out, streamed or not) and /v1/chat/completions (text)."""

    def __init__(self, network: Any, tokenizer: Any, *, gives_token_ids: bool = True) -> None:
        self.network, self.tokenizer = network, tokenizer
        self.gives_token_ids = gives_token_ids
        self.has_processed_logprobs = True
        self.failures: list[int] = []
        """Statuses to answer with before answering properly."""
        self.delay_s = 0.0
        self.requests: list[dict[str, Any]] = []
        self.num_tokens_sent = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._policy = LocalPolicy(network, tokenizer, schedule="eager", kv_budget_mb=16)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.answer(self)

            def do_GET(self) -> None:
                send(self, 404, {"detail": "Not Found"})

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._policy.close(), self._loop).result(30)
        self._http.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.requests.append({"path": handler.path, **body})
        if self.failures:
            status = self.failures.pop(0)
            send(handler, status, {"error": {"message": f"out of sorts, come back later ({status})"}})
            return
        threading.Event().wait(self.delay_s)
        try:
            if handler.path == "/v1/completions":
                self.complete(handler, body)
            else:
                self.chat(handler, body)
        except ContextOverflowError as error:
            send(handler, 400, {"error": {"message": f"maximum context length exceeded: {error}"}})
        except BrokenPipeError:
            pass

    def sample(self, prompt: list[int], body: dict[str, Any]) -> tuple[Completion, SamplingParams]:
        banned = len(body.get("logit_bias", {}))
        assert banned in (0, len(self._policy._vocabulary.banned_ids[:5]))
        sampling = SamplingParams(
            max_new_tokens=body["max_tokens"], stop_at_action=False,
            **{name: body[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in body},
        )  # fmt: skip
        request = Request(
            stream_id=f"{len(self.requests)}", group_id="", prompt_ids=np.array(prompt, dtype=np.int32),
            sampling=sampling, seed=(body.get("seed", 0),),
        )  # fmt: skip
        future = asyncio.run_coroutine_threadsafe(self._policy.complete(request), self._loop)
        return future.result(60), sampling

    def complete(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        completion, sampling = self.sample(body["prompt"], body)
        ids = completion.completion_ids.tolist()
        tops = self.top_logprobs(body["prompt"], completion, sampling, body.get("logprobs") or 0)
        reason = "length" if completion.finish_reason == "length" else "stop"
        choices = []
        for i, token_id in enumerate(ids):
            logprobs = {"token_logprobs": [float(completion.logprobs[i])], "top_logprobs": [tops[i]]}
            choices.append(
                {"text": "", "token_ids": [token_id], "logprobs": logprobs, "finish_reason": reason if i == len(ids) - 1 else None}
            )  # fmt: skip
        if not self.gives_token_ids:
            choices = [{"text": completion.text, "finish_reason": reason}]
        if not body.get("stream"):
            joined = {**choices[0], "token_ids": ids} if self.gives_token_ids else choices[0]
            send(handler, 200, {"choices": [joined]})
            return
        handler.send_response(200)
        handler.end_headers()
        for choice in choices:
            handler.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.num_tokens_sent += 1
        handler.wfile.write(b"data: [DONE]\n\n")

    def top_logprobs(
        self, prompt: list[int], completion: Completion, sampling: SamplingParams, count: int
    ) -> list[dict[str, float]]:
        """The best log-probs of each step, from a plain forward pass."""
        ids = torch.tensor([[*prompt, *completion.completion_ids.tolist()]])
        with torch.no_grad():
            logits = self.network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        if self.has_processed_logprobs and sampling.temperature > 0:
            logits = logits / sampling.temperature
            logits[:, torch.from_numpy(completion.banned_ids.astype(np.int64))] = float("-inf")
            for i, row in enumerate(logits):
                if completion.kept is not None:
                    cut = torch.ones(len(row), dtype=torch.bool)
                    cut[torch.from_numpy(completion.kept.row(i).astype(np.int64))] = False
                    row[cut] = float("-inf")
        best = logits.log_softmax(dim=-1).clamp(min=-9999.0).topk(max(count, 1))
        return [
            {f"token_id:{i}": value for i, value in zip(ids_, values, strict=True)}
            for ids_, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def chat(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        text = "".join(message["content"] for message in body["messages"])
        completion, _ = self.sample(self.tokenizer.encode(text), body)
        message = {"role": "assistant", "content": completion.text}
        send(handler, 200, {"choices": [{"message": message, "finish_reason": "stop"}]})


def send(handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    handler.send_response(status)
    if status == 429:
        handler.send_header("Retry-After", "0")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
