"""A stand-in for an engine's server, run as a script: OpenAI completions by the letter, no model.

Usage: fake_engine.py --port PORT [--token-s S] [--start-s S] [--short] [--refuse] [--die] [--child]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers as the options say."""

    protocol_version = "HTTP/1.1"
    options: argparse.Namespace

    def do_GET(self):
        self._whole(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.options.die:
            os._exit(3)
        if self.options.refuse:
            self._whole(400, {"error": {"message": "no such prompt here"}})
            return
        num = body["max_tokens"] - self.options.short
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for _ in range(num):
            time.sleep(self.options.token_s)
            self._event({"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value):
        self.wfile.write(f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode())

    def _whole(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Quiet."""


class Server(ThreadingHTTPServer):
    """Takes many connections at once."""

    request_queue_size = 128


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--start-s", type=float, default=0.0)
    for flag in ("--short", "--refuse", "--die", "--child"):
        parser.add_argument(flag, action="store_true")
    Handler.options = parser.parse_args()
    if Handler.options.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
    time.sleep(Handler.options.start_s)
    Server(("127.0.0.1", Handler.options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
