"""The description of the server's addresses is complete, and schemathesis finds nothing that contradicts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.served import LOGIN, Served, client_of, copy_run, declaration, packed, running
from hybrid.bridge.server.hub import Hub
from hybrid.plan.profile import DEFAULT_LIMITS
from hybrid.resources import resource
from training import micro

ERRORS = {"401", "403", "413", "422", "500"}
CONFIG = """
[generation]
max-examples = 8
deterministic = true

[auth.openapi.header]
api_key = "{token}"

# Settings, files and uploads may be refused for what no schema says.
[checks.positive_data_acceptance]
expected-statuses = [200, 204, 206, 404, 409, 413, 416, 422, 507]

{dictionaries}
[parameters]
{parameters}
"""


def test_every_operation_says_what_it_may_answer(asked: Served) -> None:
    document = asked.json("/api/openapi.json")
    operations = {
        f"{method} {path}": operation for path, item in document["paths"].items() for method, operation in item.items()
    }
    assert len(operations) == 22 and len({one["operationId"] for one in operations.values()}) == 22
    for name, operation in operations.items():
        responses = operation["responses"]
        assert responses.keys() >= ERRORS and operation["summary"], name
        for status, response in responses.items():
            if int(status) >= 400:
                content = response["content"]["application/json"]["schema"]
                assert content == {"$ref": "#/components/schemas/Error"}, (name, status)
        assert "{" not in name or "404" in responses, name
    assert set(document["components"]["securitySchemes"]) == {"cookie", "header"} and document["security"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_committed_description_is_the_servers(asked: Served) -> None:
    """Written anew with: hybrid serve, and GET /api/openapi.json (indented by one, with a line end)."""
    committed = resource("bridge/schemas/server.openapi.json").read_text(encoding="utf-8")
    assert committed == json.dumps(asked.json("/api/openapi.json"), indent=1) + "\n"


def test_schemathesis_finds_nothing(
    tmp_path: Path, built: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation with data that fits its description, with data that does not, and in sequences; against runs,
    checkpoints, plans and token stores that are there."""

    def ended() -> Hub:
        hub = Hub()
        hub.close()  # streams of events would never end
        return hub

    monkeypatch.setattr("hybrid.bridge.server.serve.Hub", ended)
    monkeypatch.setattr("os.fsync", lambda handle: None)
    runs, stores = tmp_path / "runs", tmp_path / "stores"
    runs.mkdir()
    copy_run(recording, runs, "micro")
    shutil.copytree(next((recording.parent / "cache").iterdir()), stores / "tokens")
    config = {**micro.SETTINGS, "model": {**micro.SETTINGS["model"], "vocabularySize": 256}}
    profile = {"limits": DEFAULT_LIMITS, "features": [], "subgroup_size": 0, "cpu": None}
    with running(tmp_path) as place, client_of(place) as client:
        plan = client.post("/api/plans", json={"config": config, "profile": profile}).json()["plan"].split("/")[2]
        upload = client.post("/api/uploads", json=declaration(packed(recording, tmp_path))).json()["id"]
        known: dict[str, list[str]] = {
            "run": ["micro"], "checkpoint": ["step-00000010"], "plan": [plan], "store": ["tokens"], "upload": [upload],
            "file": ["config.json", "plan.json", "tokens.bin", "model.safetensors"],
        }  # fmt: skip
        found = schemathesis(tmp_path, f"http://127.0.0.1:{place.port}", known)
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr
    assert "Tested: 22" in found.stdout


def schemathesis(folder: Path, url: str, known: dict[str, list[str]]) -> Any:
    """Its command, with values of path parameters that mean something, most of the time."""
    settings = folder / "schemathesis.toml"
    settings.write_text(
        CONFIG.format(
            token=LOGIN["authorization"],
            dictionaries="".join(f"[dictionaries.{name}]\nvalues = {json.dumps(known[name])}\n" for name in known),
            parameters="".join(f'"path.{name}" = {{ dictionary = "{name}", probability = 0.7 }}\n' for name in known),
        )
    )
    description = folder / "openapi.json"
    shutil.copy(resource("bridge/schemas/server.openapi.json"), description)
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    return subprocess.run(
        [sys.executable, "-c", program, "--config-file", str(settings), "run", str(description), "--url", url,
         "--no-color", "--warnings", "off"],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
