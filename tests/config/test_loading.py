"""How a configuration is put together, and how it refuses what it does not know."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hybrid.config.loading import load_config, parse_assignment, preset_names, to_settings
from hybrid.config.problems import parse_config
from hybrid.errors import ConfigError


def refusal(*assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(assignments=assignments)
    return str(caught.value)


def test_a_later_layer_wins_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('preset = "llama-tiny"\n[model]\nwidth = 32\nlayers = 1\n[optimizer]\nlr = 0.5\n')
    config = load_config(file, assignments=["model.layers=3", "run.steps=9"], flags={"run.steps": 7})
    assert config.model.heads == 4 and config.model.kv_heads == 2, "from the preset"
    assert config.model.width == 32 and config.optimizer.lr == 0.5, "from the file"
    assert config.model.layers == 3, "--set over the file"
    assert config.run.steps == 7, "a flag over --set"


def test_the_preset_option_wins_over_the_file_and_the_default_is_stdlib_tiny(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"preset": "llama-tiny"}))
    assert load_config(file).model.width == 64
    assert load_config(file, preset="shakespeare-char").model.norm == "layer_norm"
    assert load_config().run.name == "stdlib-tiny"


def test_a_file_names_its_run_unless_it_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "my run (2).toml"
    file.write_text("[model]\nwidth = 64\n")
    assert load_config(file).run.name == "my-run-2-"
    file.write_text('[run]\nname = "other"\n')
    assert load_config(file).run.name == "other"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_survives_a_round_trip(name: str) -> None:
    config = load_config(preset=name)
    assert parse_config(json.loads(json.dumps(to_settings(config)))) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1e-3", 1e-3),
        ("a.b=true", True),
        ("a.b=llama", "llama"),
        ("a.b=./some/file.txt", "./some/file.txt"),
        ('a.b="1"', "1"),
        ("a.b=[0, 1, 1]", [0, 1, 1]),
        ("a.b=null", None),
        ("a.b=", ""),
        ("a.b=x = 1", "x = 1"),
        ("a.b = {c = 2}", {"c": 2}),
    ],
)
def test_values_of_set_are_toml_and_bare_words_are_strings(text: str, value: object) -> None:
    assert parse_assignment(text) == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["model.width", "=3", "model.=3", "a.b=[1,", 'a.b="x'])
def test_a_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_assignment(text)


def test_an_unknown_key_names_itself_its_value_its_origin_and_the_nearest_key() -> None:
    assert refusal("model.widht=3") == (
        "unknown configuration key model.widht = 3 (--set model.widht=3): did you mean model.width?"
    )
    assert "did you mean model.kvHeads?" in refusal("model.kv_heads=1"), "another spelling"
    assert "did you mean model.dropout?" in refusal("run.dropout=0.1"), "right name, wrong section"
    assert "did you mean optimizer.lr?" in refusal("optimizer.learningRate=1"), "another trainer's name"
    assert "did you mean data.tokenizer?" in refusal("data.tokenizr.type=bytes"), "a section inside a section"
    assert "did you mean telemetry.alerts.thresholds.maxNaNCount?" in refusal(
        "telemetry.alerts.thresholds.maxNanCount=1"
    )
    assert "known keys of the top level: model, data" in refusal("zzz=1")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("model.width=wide", 'model.width = "wide" (--set model.width=wide): expected a whole number'),
        ("model.width=1.5", "expected a whole number"),
        ("model.width=0", "expected at least 1"),
        ("run.seed=true", "expected a whole number"),
        ("model.bias=1", "expected true or false"),
        ("optimizer.lr=nan", "expected a finite number"),
        ("optimizer.lr=inf", "expected a finite number"),
        ("model=3", "model = 3 (--set model=3): expected a table of settings"),
        ("data.source=3", "expected a string or a list"),
        ("model.schedule=[0, -1]", "model.schedule"),
        ("model.norm=rmsnorm", "expected 'rms_norm' or 'layer_norm'; did you mean 'rms_norm'?"),
        ("backend.name=cuda", "; for that, backend.name = 'torch' and backend.device = 'cuda'"),
        ("sampling.prompt=a\udcff", "sampling.prompt = "),
        ("data.source=a\udcff", "expected a text of whole characters, in UTF-8"),
        ("data.field=a\udcff", "expected a text of whole characters, in UTF-8"),
        ("data.cacheDir=a\udcff", "expected a text of whole characters, in UTF-8"),
        ("backend.adapter=a\udcff", "expected a text of whole characters, in UTF-8"),
        ("run.name=a\udcff", "run.name = "),
        (
            "telemetry.windowSize=100000",
            "telemetry.windowSize = 100000 (--set telemetry.windowSize=100000): expected at",
        ),
        ("model.layers=100000", "model.layers = 100000 (--set model.layers=100000): expected at most 1,024"),
        ("model.contextLength=100000000", "expected at most 1,048,576"),
        ("data.sequenceLength=100000000", "expected at most 1,048,576"),
        (f"model.schedule={[0] * 100_000}", "expected a list of at most 1,024 entries, not 100,000"),
        ("run.name=a/b", "expected letters, digits, '.', '_' and '-', and one of the first two in front"),
        ('run.name=""', "expected letters, digits,"),
        ("data.source=[]", "data.source = [] (--set data.source=[]): expected a list of at least one entry"),
        ("data.source=[1]", "data.source[0] = 1 (--set data.source=[1]): expected a string"),
        (
            'data.source=["a", ""]',
            'data.source[1] = "" (--set data.source=["a", ""]): expected a text that is not empty',
        ),
        ('data.source=""', "expected a text that is not empty or a list"),
        ("data.source={a = 1}", 'data.source = {"a": 1} (--set data.source={a = 1}): expected a string or a list'),
        ("data.source=1979-05-27", 'data.source = "1979-05-27" (--set data.source=1979-05-27): expected a string or'),
        ("model.schedule=[]", "model.schedule = [] (--set model.schedule=[]): expected a list of at least one entry"),
        ("model.schedule=[0, -1, x]", "the value is not valid TOML"),
        (
            "model.schedule=[0, -1, 2.5]",
            "model.schedule[1] = -1 (--set model.schedule=[0, -1, 2.5]): expected at least 0",
        ),
        ("model.schedule=[[1]]", "model.schedule[0] = [1] (--set model.schedule=[[1]]): expected a whole number"),
        ("run.steps=9007199254740992", "a whole number of at most 2^53 - 1"),
        ("data.maxBytes=9223372036854775807", "a whole number of at most 2^53 - 1"),
        ("lossScaling.growthInterval=4294967296", "a whole number that 32 bits hold"),
        ("optimizer.lr=1e300", "a number that float32 can hold"),
        ("optimizer.eps=1e-300", "a number that float32 can hold"),
        ("sampling.temperature=5e-324", "a number that float32 can hold"),
        ('data.source=[""]', "data.source[0] = "),
        ('data.cacheDir="a\\u0000b"', "a path without NUL characters"),
        ("model.width=" + "9" * 5000, "--set"),
        ("model.width=" + "[" * 5000, "not valid TOML"),
        ("a" + ".a" * 3000 + "=1", "nested more than 32 levels deep"),
    ],
)
def test_a_value_of_another_kind_names_key_value_and_expectation(assignment: str, expected: str) -> None:
    message = refusal(assignment)
    assert expected in message
    assert not re.search("Tuple|Value should|String should|after validation", message), "the words of pydantic"


def test_all_problems_are_reported_at_once() -> None:
    assert len(refusal("model.widht=3", "model.width=a", "lossScaling.x=1").splitlines()) == 3


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama-tiny'"):
        load_config(preset="lama-tiny")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[model\n", "not valid TOML"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[]", "expected an object"),
        ("a.yaml", "", "expected a name ending in .toml or .json"),
        ("missing.toml", None, "there is no such file"),
        ("a.json", '{"run": {"steps": 1, "steps": 7}}', "the key 'steps' appears twice"),
        ("a.json", '{"run": {"steps": ' + "9" * 5000 + "}}", "not valid JSON"),
        ("a.toml", "[run]\nsteps = " + "9" * 5000, "not valid TOML"),
        ("a.json", '{"a":' * 5000 + "1" + "}" * 5000, "not valid JSON"),
        ("a.json", '{"a":' * 500 + "1" + "}" * 500, "nested more than 32 levels deep"),
        ("a.toml", "a = " + "[" * 5000, "not valid TOML"),
        ("a.toml", "a." * 5000 + "a = 1", "nested more than 32 levels deep"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / name)
    assert name in str(caught.value)


def test_an_empty_preset_is_not_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('preset = ""')
    with pytest.raises(ConfigError, match="unknown preset ''"):
        load_config(tmp_path / "a.toml")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name, text in (("a.toml", "[run]\nsteps = 7\n"), ("a.json", '{"run": {"steps": 7}}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert load_config(tmp_path / name).run.steps == 7


def test_a_message_does_not_repeat_a_megabyte(tmp_path: Path) -> None:
    assert len(refusal("run.name=" + "x/" * 500_000)) < 1000
    (tmp_path / "a.toml").write_text("k" * 1_000_000 + " = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "a.toml")
    assert len(str(caught.value)) < 1000


def test_a_saved_run_is_the_base_of_its_continuation() -> None:
    saved = to_settings(load_config(preset="llama-tiny", assignments=["model.width=32"]))
    config = load_config(base=saved, flags={"run.steps": 11})
    assert config.model.width == 32 and config.run.steps == 11
