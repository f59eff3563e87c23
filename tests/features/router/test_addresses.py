"""Which servers there are: said once, and wrong ones refused before anything starts."""

import pytest

from octavo.base.errors import ConfigError
from octavo.features.router.addresses import InstanceRole, read_addresses


def test_a_server_named_for_two_purposes_is_one_server():
    both = "http://10.0.0.1:8000"
    one, two = read_addresses([both], [both + "/", "http://10.0.0.2:8000/v1"], None)
    assert (one.name, one.url, one.roles) == ("10.0.0.1:8000", both, {InstanceRole.PREFILL, InstanceRole.DECODE})
    assert (two.name, two.url, two.roles) == ("10.0.0.2:8000", "http://10.0.0.2:8000", {InstanceRole.DECODE})


def test_a_path_and_https_are_kept():
    (one,) = read_addresses(None, None, ["https://host/models/a/v1/"])
    assert (one.name, one.url) == ("host/models/a", "https://host/models/a")


@pytest.mark.parametrize(
    "text", ["10.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://[::1", "", "http://a:0"]
)
def test_what_is_no_address_is_refused_by_its_option(text):
    with pytest.raises(ConfigError, match="--plain must be an address such as"):
        read_addresses(None, None, [text])


@pytest.mark.parametrize("text", ["http://me:secret@a", "http://a?x=1", "http://a#f"])
def test_an_address_holds_nothing_else(text):
    with pytest.raises(ConfigError, match="and nothing else") as error:
        read_addresses(None, None, [text])
    assert "secret" not in str(error.value)


def test_no_server_at_all_and_half_a_pair_are_refused():
    with pytest.raises(ConfigError, match="no server to route to"):
        read_addresses(None, None, None)
    with pytest.raises(ConfigError, match="--prefill needs --decode"):
        read_addresses(["http://a"], None, ["http://b"])
    with pytest.raises(ConfigError, match="--decode needs --prefill"):
        read_addresses(None, ["http://a"], None)
