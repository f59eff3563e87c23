"""A server around Transformers' `generate()`, so that it is measured through the same HTTP as every other engine.

Promises: `POST /v1/completions` with token ids, streamed or whole, one request after the other; `GET /health`.
Does not know: text prompts, batching, or anything but greedy decoding.

Usage: transformers_server.py FOLDER --port PORT --name NAME
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Tokens:
    """A streamer for `generate()`: the prompt comes first and is dropped, then each token goes to `send`."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with one token at a time."""
        if self._prompt_seen:
            self._send(int(value.reshape(-1)[0]))
        self._prompt_seen = True

    def end(self) -> None:
        """Called at the end."""


class Engine:
    """The model and its tokenizer; one request at a time."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.lock = threading.Lock()

    def generate(self, ids: list[int], max_tokens: int, send: Any) -> None:
        """Greedy, exactly `max_tokens` tokens."""
        prompt = torch.tensor([ids])
        with self.lock, torch.inference_mode():
            self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, streamer=Tokens(send),
                max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            )  # fmt: skip


def handler(engine: Engine, name: str) -> type[BaseHTTPRequestHandler]:
    """The request handler over this engine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._json(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids, max_tokens = body["prompt"], int(body["max_tokens"])
            if not body.get("stream"):
                tokens: list[int] = []
                engine.generate(ids, max_tokens, tokens.append)
                self._json(200, self._chunk(engine.tokenizer.decode(tokens), len(ids), len(tokens)))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            sent = 0

            def send(token: int) -> None:
                nonlocal sent
                sent += 1
                self._event(self._chunk(engine.tokenizer.decode([token])))

            engine.generate(ids, max_tokens, send)
            self._event({**self._chunk("", len(ids), sent), "choices": []})
            self.wfile.write(b"data: [DONE]\n\n")

        def _chunk(self, text: str, num_prompt: int | None = None, num_output: int = 0) -> dict[str, Any]:
            chunk: dict[str, Any] = {
                "id": "cmpl-0", "object": "text_completion", "created": int(time.time()), "model": name,
                "choices": [{"index": 0, "text": text, "finish_reason": None if num_prompt is None else "length"}],
            }  # fmt: skip
            if num_prompt is not None:
                chunk["usage"] = {
                    "prompt_tokens": num_prompt, "completion_tokens": num_output,
                    "total_tokens": num_prompt + num_output,
                }  # fmt: skip
            return chunk

        def _event(self, chunk: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

        def _json(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """No access log."""

    return Handler


def main() -> None:
    """Load, then serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    engine = Engine(args.folder)
    ThreadingHTTPServer(("127.0.0.1", args.port), handler(engine, args.name)).serve_forever()


if __name__ == "__main__":
    main()
