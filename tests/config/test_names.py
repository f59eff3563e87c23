"""What names of models mean."""

import pytest

from octavo.base.errors import LoadError
from octavo.config.names import EMBEDDED_FILE, EMBEDDED_NAME, HubName, hub_name, is_embedded


@pytest.mark.parametrize("name", [EMBEDDED_NAME, EMBEDDED_NAME.lower(), "smollm2", "SmolLM2", EMBEDDED_FILE])
def test_f01_bare_names_mean_the_built_in_model(name: str) -> None:
    """F01."""
    assert is_embedded(name)


@pytest.mark.parametrize(
    "name",
    ["my-org/smollm2", f"my-org/{EMBEDDED_NAME}", f"HuggingFaceTB/{EMBEDDED_NAME}", f"x/{EMBEDDED_FILE}", "/smollm2"],
)
def test_f01_a_name_with_an_owner_never_means_the_built_in_model(name: str) -> None:
    """F01."""
    assert not is_embedded(name)


@pytest.mark.parametrize(
    ("text", "name", "folder"),
    [
        ("me/a", HubName(repo="me/a"), "me--a"),
        ("me/a@main", HubName(repo="me/a", revision="main"), "me--a--@main"),
        ("me/a@refs/pr/1", HubName(repo="me/a", revision="refs/pr/1"), "me--a--@refs%2Fpr%2F1"),
        ("me/a:q4_k_m", HubName(repo="me/a", tag="q4_k_m"), "me--a--Q4_K_M"),
        ("me/a.b_c-1@v1.0:Q8_0", HubName(repo="me/a.b_c-1", revision="v1.0", tag="Q8_0"), "me--a.b_c-1--@v1.0--Q8_0"),
        ("https://huggingface.co/me/a", HubName(repo="me/a"), "me--a"),
        ("me/a:dir/x.gguf", HubName(repo="me/a", tag="dir/x.gguf"), "me--a--DIR%2FX.GGUF"),
    ],
)
def test_f54_a_name_has_a_revision_and_a_tag(text: str, name: HubName, folder: str) -> None:
    """F54."""
    assert hub_name(text) == name
    assert name.folder == folder


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "gpt2", "a/b/c", "/a", "a/", "../a", "a/..", "a/b@", "a/b:", "a/b@:Q4", "a/b:Q4@v1", "a//b", "a/b--c",
        "-a/b", "a/b c", "a/\u00fc", "a/b\n", "a/b@v 1", "a/" + "b" * 200, "a/b@" + "1" * 500, "\0/x", "a/b@-x",
    ],
)  # fmt: skip
def test_f54_what_cannot_be_a_name_is_one_sentence_with_its_shape(text: str) -> None:
    """F54."""
    with pytest.raises(LoadError, match=r"owner/name@revision") as caught:
        hub_name(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
