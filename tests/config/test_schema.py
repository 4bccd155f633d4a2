"""The JSON Schema is current, and agrees with the presets."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from hybrid.config.loading import load_config, preset_names, read_preset, to_settings
from hybrid.config.problems import known_keys
from hybrid.config.reference import with_tables
from hybrid.config.schema import config_schema, schema_text
from hybrid.resources import resource


def test_the_committed_schema_is_what_the_tree_says() -> None:
    committed = resource("bridge/schemas/config.schema.json").read_text(encoding="utf-8")
    assert committed == schema_text(), "run: python -m hybrid.config.schema"


@pytest.mark.parametrize("name", preset_names())
def test_the_schema_accepts_every_preset_as_written_and_as_completed(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())
    jsonschema.validate(read_preset(name), config_schema())
    jsonschema.validate(json.loads(json.dumps(to_settings(load_config(preset=name)))), config_schema())


def test_the_schema_refuses_an_unknown_key() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"widht": 3}}, config_schema())


def test_every_setting_has_a_description_or_a_name_that_says_it() -> None:
    undescribed = [
        f"{section}.{key}"
        for section, schema in config_schema()["$defs"].items()
        for key, value in schema["properties"].items()
        if "description" not in value and "$ref" not in value
    ]
    assert len(undescribed) < 20, undescribed


def test_the_documented_reference_is_current() -> None:
    document = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert document == with_tables(document), "run: python -m hybrid.config.reference"
    for path in known_keys():
        assert f"| `{'.'.join(path[1:])}` |" in document


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    example = document.split("```toml\n")[1].split("```")[0]
    (tmp_path / "small.toml").write_text(example)
    config = load_config(tmp_path / "small.toml")
    assert (config.model.kv_heads, config.data.tokenizer.type, config.run.name) == (2, "bpe", "small")
