"""Models, probes, version, figures and the cache reset."""

import re

import octavo
from tests.entrypoints.http.events import check_error
from tests.entrypoints.http.toy_server import MODEL, Served


def test_models_are_listed_with_their_limits(served: Served) -> None:
    listing = served.http.get("/v1/models").json()
    assert listing["object"] == "list" and [m["id"] for m in listing["data"]] == [MODEL, "alias"]
    card = listing["data"][0]
    assert card["object"] == "model" and card["created"] == 1_700_000_000 and card["owned_by"] == "octavo"
    assert card["max_model_len"] == 256 and card["root"] == MODEL
    assert served.http.get(f"/v1/models/{MODEL}").json() == card
    assert check_error(served.http.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


def test_probes_and_version(served: Served) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert served.http.get(path).status_code == 200
        assert served.http.head(path).status_code == 200
    assert served.http.get("/version").json() == {"version": octavo.__version__}


def test_figures_add_up(served: Served) -> None:
    """MET-01's kind: totals equal what the requests used."""
    before = served.engine.num_tokens
    usages = [served.complete(prompt="a", max_tokens=3).json()["usage"]["completion_tokens"] for _ in range(4)]
    response = served.http.get("/metrics")
    (about,) = [line for line in response.text.splitlines() if line.startswith("octavo_info{")]
    assert 'usage="api_server"' in about and f'version="{octavo.__version__}"' in about, (
        "INP-2: through which door it was opened"
    )
    assert response.headers["content-type"].startswith("text/plain")
    total = re.search(r"^octavo_output_tokens_total\{.*\} (\S+)$", response.text, re.M)
    assert total is not None and float(total[1]) == before + sum(usages) == served.engine.num_tokens
    assert served.http.get("/load").json() == {"requests": 0, "running": 0, "waiting": 0, "kv_usage": 0.0}


def test_the_prefix_cache_can_be_reset(served: Served) -> None:
    assert served.http.post("/reset_prefix_cache").json() == {"success": True}
    check_error(served.http.get("/reset_prefix_cache"), 405)
