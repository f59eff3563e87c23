"""One definition per option: flag, variable, key and keyword agree, and misspellings get the nearest name (OPS-2)."""

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.config.args import (  # fmt: skip
    SERVER_SECTIONS,
    engine_config,
    given_from_flags,
    given_from_keywords,
    options,
    parse_count,
    parse_size,
    server_config,
)
from octavo.config.env import read_env
from octavo.config.flags import Parser, add_options
from octavo.plugins.features import all_sections, engine_sections, server_sections


def parse(*argv, environ=None):
    parser = Parser(prog="octavo serve")
    add_options(parser, server_sections(), positional_model=True)
    return given_from_flags(parser.parse_args(list(argv)), server_sections(), read_env(environ or {}))


@pytest.mark.parametrize("name", list(options({**SERVER_SECTIONS, **all_sections()})))
def test_every_option_has_help_and_one_name_everywhere(name):
    option = options({**SERVER_SECTIONS, **all_sections()})[name]
    assert option.help.endswith(".")
    assert option.flag == "--" + name.replace("_", "-")
    assert option.variable == "OCTAVO_" + name.upper()


def test_flag_beats_environment_beats_file(tmp_path):
    file = tmp_path / "o.yaml"
    file.write_text("max-num-seqs: 1\nmax_model_len: 100\nseed: 5\n")
    env = {"OCTAVO_MAX_NUM_SEQS": "2", "OCTAVO_MAX_MODEL_LEN": "200"}
    given = parse("--config", str(file), "--max-num-seqs", "3", environ=env)
    config = engine_config(given)
    assert (config.scheduler.max_num_seqs, config.model.max_model_len, config.model.seed) == (3, 200, 5)
    assert given.sources == {"max_num_seqs": "flag", "max_model_len": "environment", "seed": "file"}


def test_the_model_may_stand_first_but_not_twice():
    assert engine_config(parse("some/model")).model.model == "some/model"
    with pytest.raises(ConfigError, match="given twice"):
        parse("a", "--model", "b")


def test_a_misspelled_option_suggests_the_right_one(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--max-modellen", "5")
    assert left.value.code == 2
    assert "--max-model-len" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keyword", "near"), [("max_modellen", "max_model_len"), ("kv_cache_mem", "kv_cache_memory"), ("zzz", None)]
)
def test_a_misspelled_keyword_suggests_the_right_one(keyword, near):
    with pytest.raises(ConfigError) as caught:
        given_from_keywords({keyword: 1}, engine_sections(), read_env({}))
    assert keyword in str(caught.value)
    assert near is None or f"did you mean '{near}'" in str(caught.value)


def test_a_misspelled_variable_or_key_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="OCTAVO_MAX_MODEL_LEN"):
        parse(environ={"OCTAVO_MAX_MODELLEN": "5"})
    file = tmp_path / "o.yaml"
    file.write_text("max_modellen: 5\n")
    with pytest.raises(ConfigError, match="max_model_len"):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("OCTAVO_MAX_MODELLEN", "OCTAVO_MAX_MODEL_LEN"),
        ("OCTAVO_PORTS", "OCTAVO_PORT"),
        ("OCTAVO_CASHE", "OCTAVO_CACHE"),
        ("OCTAVO_PREFIL", "OCTAVO_PREFILL"),
    ],
)
@pytest.mark.parametrize("sections", [engine_sections(), server_sections(), {}], ids=["LLM", "serve", "pull"])
def test_f65_a_variable_close_to_one_of_ours_is_an_error_at_every_door(variable, near, sections):
    with pytest.raises(ConfigError, match=f"{variable} is not an option of Octavo; did you mean {near}[?]"):
        given_from_keywords({}, sections, read_env({variable: "5"}), others=all_sections)


@pytest.mark.parametrize("sections", [engine_sections(), server_sections(), {}], ids=["LLM", "serve", "pull"])
def test_f65_a_variable_of_another_command_is_no_mistake(sections):
    """F65: one environment serves every command; what features bring counts too."""
    env = {"OCTAVO_PORT": "81", "OCTAVO_KV_TIER": "host", "OCTAVO_PREFILL": "http://h:1", "OCTAVO_MAX_MODEL_LEN": "9"}
    given = given_from_keywords({}, sections, read_env(env), others=all_sections)
    assert given.notices == () and "prefill" not in given.values


@pytest.mark.parametrize("sections", [engine_sections(), server_sections(), {}], ids=["LLM", "serve", "pull"])
def test_f65_foreign_variables_are_told_in_one_sentence_and_ignored(sections):
    """F65: a program of the same name, or Kubernetes, which sets OCTAVO_PORT=tcp://... for a service called octavo."""
    env = {
        "OCTAVO_HOME": "/x", "OCTAVO_SERVICE_HOST": "10.0.0.1", "OCTAVO_SERVICE_PORT": "80", "OCTAVO_TEAM": "red",
        "OCTAVO_PORT": "tcp://10.0.0.1:80", "OCTAVO_PORT_80_TCP_ADDR": "10.0.0.1", "OCTAVO_SEED": "5",
    }  # fmt: skip
    given = given_from_keywords({}, sections, read_env(env))
    (notice,) = given.notices
    assert notice == (
        "OCTAVO_HOME, OCTAVO_PORT, OCTAVO_PORT_80_TCP_ADDR, OCTAVO_SERVICE_HOST, OCTAVO_SERVICE_PORT, OCTAVO_TEAM in "
        "the environment are no options of Octavo, and ignored"
    )
    assert dict(given.values) == ({"seed": 5} if sections else {})
    assert given_from_keywords({}, sections, read_env({"OCTAVO_SEED": "5"})).notices == ()


@pytest.mark.parametrize(
    "content", ["seed: 1\nport: 80\nseed: 2", "max-num-seqs: 4\nmax_num_seqs: 5", "seed: 1\nseed: 1"]
)
def test_an_option_given_twice_in_a_file_is_refused(tmp_path, content):
    """F58's kind: of two values one would be dropped in silence."""
    file = tmp_path / "o.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"o\.yaml .*twice"):
        parse("--config", str(file))


def test_a_wrong_value_is_named_where_it_was_given(tmp_path):
    """F58, F65: who sets a variable or writes a file has no flag to look at."""
    with pytest.raises(ConfigError, match=r"^OCTAVO_MAX_NUM_SEQS must be a whole number, got 'many'"):
        given_from_keywords({}, server_sections(), read_env({"OCTAVO_MAX_NUM_SEQS": "many"}))
    file = tmp_path / "o.yaml"
    file.write_text("max-num-seqs: many")
    with pytest.raises(ConfigError, match=r"^max_num_seqs in the configuration file .*o\.yaml must be a whole number"):
        parse("--config", str(file))


def test_a_whole_float_in_a_file_is_a_whole_number(tmp_path):
    """F91, in YAML."""
    file = tmp_path / "o.yaml"
    file.write_text("max-num-seqs: 4.0")
    assert parse("--config", str(file)).values["max_num_seqs"] == 4
    file.write_text("max-num-seqs: 4.5")
    with pytest.raises(ConfigError, match=r"must be a whole number, got 4\.5"):
        parse("--config", str(file))


@pytest.mark.parametrize("content", ["- 1", "a: [", "3"])
def test_a_broken_configuration_file_is_named(tmp_path, content):
    file = tmp_path / "o.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"o\.yaml"):
        parse("--config", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("--config", str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seqs", "many"], "--max-num-seqs must be a whole number"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory must be a size"),
        (["--scheduling-policy", "fcsf"], "Did you mean fcfs"),
        (["--gpu-memory-utilization", "x"], "--gpu-memory-utilization must be a number"),
        (["--max-model-len", "1.5.2"], "--max-model-len must be a whole number"),
        (["--max-model-len", "2.5"], "--max-model-len must be a whole number"),
        (["--max-model-len", "9" * 400], "--max-model-len must be a whole number"),
        (["--kv-cache-memory", "9" * 400], "--kv-cache-memory must be a size"),
        (["--num-kv-blocks", "9" * 5000], "--num-kv-blocks must be a whole number"),
        (["--kv-watermark", "nan"], "--kv-watermark must be a number"),
        (["--priority-aging-s", "inf"], "--priority-aging-s must be a number"),
        (["--model", ""], "--model must not be empty"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", "a", ""], "--served-model-name must not be empty"),
    ],
)
def test_a_wrong_value_names_the_flag(argv, words):
    with pytest.raises(ConfigError, match=words):
        parse(*argv)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", ["a"]), ("host", {"a": 1}), ("api_key", {"a": 1}), ("api_key", 5), ("api_key", []), ("port", True)],
)
def test_a_file_may_not_give_lists_and_mappings_where_text_is_due(tmp_path, name, value):
    file = tmp_path / "o.yaml"
    file.write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=f"^{name} in the configuration file .* must"):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--port", "-1"), ("--port", "65536"), ("--max-request-bytes", "0"), ("--drain-timeout-s", "-1"),
     ("--drain-timeout-s", "1e30"), ("--stream-keep-alive-s", "0"), ("--stream-keep-alive-s", "-1")],
)  # fmt: skip
def test_the_server_s_numbers_have_ranges(flag, value):
    with pytest.raises(ConfigError, match=f"{flag} must be"):
        server_config(parse(flag, value))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- " * 10000, b"{" * 5000, b"host: 2024-01-32"], ids=range(4))
def test_a_file_that_no_reader_takes_is_named(tmp_path, content):
    file = tmp_path / "o.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"o\.yaml"):
        parse("--config", str(file))


def test_booleans_have_a_negative_flag():
    assert engine_config(parse("--no-enable-prefix-caching")).cache.enable_prefix_caching is False
    assert engine_config(parse("--enable-prefix-caching")).cache.enable_prefix_caching is True
    env = {"OCTAVO_ENABLE_PREFIX_CACHING": "off"}
    assert engine_config(parse(environ=env)).cache.enable_prefix_caching is False


def test_lists_take_several_values():
    given = parse("--served-model-name", "a", "b", "--api-key", "k")
    assert engine_config(given).model.served_model_name == ("a", "b")
    assert server_config(given).api_key == ("k",)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512M", 512 << 20), ("1.5g", 3 << 29), ("77", 77), ("1 KiB", 1024), (5, 5)]
)
def test_sizes_are_powers_of_1024(text, size):
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize(("text", "count"), [("8k", 8000), ("8Ki", 8192), ("1.5k", 1500), (7, 7)])
def test_counts_may_be_thousands(text, count):
    assert parse_count(text, "--x") == count


def test_the_model_may_follow_a_flag_that_may_be_repeated():
    given = parse("--api-key", "a", "--api-key", "b", "some/model")
    assert server_config(given).api_key == ("a", "b")
    assert engine_config(given).model.model == "some/model"
