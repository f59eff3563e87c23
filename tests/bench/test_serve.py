"""A server that is started for a measurement is the real command, and is gone after it."""

import http.server
import os
import threading

import pytest

from octavo.base.errors import ServerError
from octavo.bench.load import LoadTarget
from octavo.bench.serve import first_model, measure, started
from octavo.bench.workloads import Workload, random_prompts
from tests.bench.scripted import scripted
from tests.support import checkpoints

OPTIONS = ["--dtype", "float32", "--num-threads", "1", "--max-model-len", "128", "--no-multiprocessing"]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_started_server_answers_and_is_stopped_by_its_id():
    items = random_prompts(4, input_len=6, output_len=3, ids=(10, 500))
    with started([str(checkpoints.tiny_llama()), *OPTIONS]) as server:
        assert first_model(server.url) == server.model
        assert server.ready_s > 0
        assert [at for at, _ in server.lines] == sorted(at for at, _ in server.lines)
        work = Workload(name="w", items=items[:2], concurrency=2)
        result = measure(LoadTarget(base_url=server.url, model=server.model), work, items[2:])
        assert [s.error for s in result.samples] == [None, None]
        assert server.ended() is None
        assert not gone(server.pid)
    assert gone(server.pid)
    assert server.ended() is not None


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(ServerError, match=r"ended before it was ready: .*absent"), started([str(tmp_path / "absent")]):
        pass


def test_warm_up_requests_are_sent_first_one_at_a_time_and_not_counted():
    items = random_prompts(7, input_len=3, output_len=2)
    with scripted() as server:
        work = Workload(name="w", items=items[:4], concurrency=4)
        result = measure(LoadTarget(base_url=server.url, model="m"), work, items[4:])
    assert len(result.samples) == 4
    assert [tuple(r.body["prompt"]) for r in server.requests[:3]] == [i.prompt for i in items[4:]]


class Models(http.server.BaseHTTPRequestHandler):
    """Answers /v1/models by the path's first part."""

    def do_GET(self):
        kind = self.path.split("/")[1]
        body = {"good": b'{"data": [{"id": "m1"}, {"id": "m2"}]}', "none": b'{"data": []}', "html": b"<html>"}
        self.send_response(401 if kind == "key" and self.headers.get("Authorization") != "Bearer k" else 200)
        self.end_headers()
        self.wfile.write(body.get(kind, b'{"data": [{"id": "m"}], "error": {"message": "no key"}}'))

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_first_model_that_a_server_lists_is_taken(url):
    assert first_model(url + "/good") == "m1"
    assert first_model(url + "/key/v1", "k") == "m"


@pytest.mark.parametrize(
    ("path", "words"),
    [("/none", "does not list a model"), ("/html", "does not list a model"), ("/key", "answers HTTP 401: no key")],
)
def test_a_server_that_lists_none_is_told(url, path, words):
    with pytest.raises(ServerError, match=words):
        first_model(url + path)


def test_a_server_that_is_not_there_is_told():
    with pytest.raises(ServerError, match="Connection refused; is the server running"):
        first_model("http://127.0.0.1:9")
