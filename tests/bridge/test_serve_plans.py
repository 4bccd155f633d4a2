"""Plans that `hybrid serve` compiles for the settings and the device that a page sends."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from bridge.served import LOGIN, Served
from hybrid.bridge.server import plans
from hybrid.bridge.server.planning import plan_settings_of
from hybrid.bridge.server.plans import PlanShelf, compiler_version
from hybrid.config.loading import to_settings
from hybrid.config.problems import parse_config
from hybrid.config.resolve import resolve
from hybrid.plan.compiler import compile_plan
from hybrid.plan.folder import read_plan
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile
from training import micro

PROFILE = {"limits": DEFAULT_LIMITS, "features": [], "subgroup_size": 0, "cpu": None}


def settings(**model: Any) -> dict[str, Any]:
    return {**micro.SETTINGS, "model": {**micro.SETTINGS["model"], "vocabularySize": 256, **model}}


def test_a_plan_is_the_one_that_is_compiled_here(asked: Served, tmp_path: Path) -> None:
    place = asked.ask("POST", "/api/plans", json={"config": settings(), "profile": PROFILE}).json()["plan"]
    assert place.startswith("api/plans/") and place.endswith("/")
    resolved = to_settings(resolve(parse_config(settings()), 256, 1))
    again = asked.ask("POST", "/api/plans", json={"config": resolved, "profile": PROFILE}).json()["plan"]
    assert again == place, "settings that are resolved already mean the same"
    copy = tmp_path / "plan"
    copy.mkdir()
    document = asked.json(f"/{place}plan.json")
    (copy / "plan.json").write_text(json.dumps(document))
    for sha256 in {constant["sha256"] for constant in document["constants"].values()}:
        (copy / f"{sha256}.bin").write_bytes(asked.ask("GET", f"/{place}{sha256}.bin").content)
    here = compile_plan(plan_settings_of(settings()), DeviceProfile())
    assert read_plan(copy).to_json() == here.to_json()
    part = asked.ask("GET", f"/{place}plan.json", 206, headers={"range": "bytes=0-0"})
    assert part.content == b"{"
    asked.ask("GET", f"/{place}plan.json", 416, headers={"range": "bytes=99999999-"})
    assert asked.ask("HEAD", f"/{place}plan.json").headers["accept-ranges"] == "bytes"


def test_the_address_of_a_plan_means_the_same_bytes_forever(asked: Served) -> None:
    places = [
        asked.ask("POST", "/api/plans", json={"config": config, "profile": profile}).json()["plan"]
        for config in (settings(), settings(vocabularySize=300))
        for profile in (PROFILE, {**PROFILE, "limits": {**DEFAULT_LIMITS, "maxBufferSize": 2**27}})
    ]
    assert len(set(places)) == 4
    answer = asked.ask("GET", f"/{places[0]}plan.json")
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    part = asked.ask("GET", f"/{places[0]}plan.json", 206, headers={"range": "bytes=0-0"})
    assert part.headers["cache-control"] == answer.headers["cache-control"]


def test_plans_that_a_server_has_compiled_are_there_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []

    def counted(*arguments: Any) -> Any:
        compiled.append(arguments)
        return compile_plan(*arguments)

    monkeypatch.setattr(plans, "compile_plan", counted)
    kept, wanted, device = tmp_path / "plans", plan_settings_of(settings()), DeviceProfile()
    for _ in range(2):
        shelf = PlanShelf(2, kept)
        name = shelf.compile(wanted, device)
        shelf.close()
    assert len(compiled) == 1 and read_plan(kept / name).to_json() == compile_plan(wanted, device).to_json()

    (kept / name / "plan.json").write_text('{"arenas": {')
    assert PlanShelf(2, kept).compile(wanted, device) == name
    assert len(compiled) == 2 and read_plan(kept / name), "a damaged one is compiled again"

    with monkeypatch.context() as other:
        other.setattr(plans, "compiler_version", lambda: "another")
        assert PlanShelf(2, kept).compile(wanted, device) != name, "another compiler makes other plans"

    shelf = PlanShelf(2, kept)
    os.utime(kept / name, (1, 1))
    left = kept / ".half-of-a-process-that-was-killed"
    left.mkdir()
    os.utime(left, (1, 1))
    (kept / ".half-of-one-that-lives").mkdir()
    newest = shelf.compile(plan_settings_of(settings(vocabularySize=300)), device)
    assert len([path for path in kept.iterdir() if not path.name.startswith(".")]) == 2, "the newest stay"
    assert (kept / newest).is_dir() and not (kept / name).exists() and not left.exists()
    assert (kept / ".half-of-one-that-lives").is_dir()


def test_a_place_for_plans_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("no folder")
    shelf = PlanShelf(2, tmp_path / "plans")
    assert (shelf.folder / shelf.compile(plan_settings_of(settings()), DeviceProfile())).is_dir()
    shelf.close()
    assert not shelf.folder.exists()


def test_a_full_disk_is_said(asked: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plans, "write_plan", full)
    body = {"config": settings(width=24), "profile": PROFILE}
    error = asked.ask("POST", "/api/plans", 507, json=body).json()["error"]
    assert error["message"].endswith("the plan could not be written there: No space left on device")


def test_the_version_of_the_compiler_is_a_hash_of_its_sources() -> None:
    version = compiler_version()
    assert re.fullmatch("[0-9a-f]{64}", version)
    compiler_version.cache_clear()
    assert compiler_version() == version


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"config": {}}, "ConfigError", "vocabularySize"),
        ({"config": settings(vocabularySize=None)}, "ConfigError", "model.vocabularySize is null"),
        ({"config": settings(width=15)}, "ConfigError", "model.width"),
        ({"config": settings(wdith=15)}, "ConfigError", "did you mean model.width"),
        ({"config": settings(layers=100_000_000)}, "ConfigError", "model.layers"),
        ({"config": settings(layers=1000)}, "LimitExceeded", "1000 layers"),
        ({"config": settings(width=2**20, heads=1)}, "LimitExceeded", ""),
        ({"config": settings(vocabularySize=2**31)}, "LimitExceeded", ""),
        ({"config": {"model": {"layers": "\ud800"}}}, "ConfigError", "model.layers"),
        ({"config": {"\ud800": 1}}, "ConfigError", "configuration key"),
        ({"config": [1]}, "ConfigError", "config"),
        ({"profile": {}}, "ConfigError", "profile"),
        ({"profile": {**PROFILE, "limits": {"maxBufferSize": 1}}}, "ConfigError", "limits."),
        ({"profile": {**PROFILE, "limits": {**DEFAULT_LIMITS, "maxBufferSize": 0}}}, "ConfigError", "maxBufferSize"),
        (
            {"profile": {**PROFILE, "limits": {**DEFAULT_LIMITS, "maxStorageBufferBindingSize": 4096}}},
            "LimitExceeded",
            "",
        ),
        ({"profile": {**PROFILE, "subgroup_size": -1}}, "ConfigError", "subgroup_size"),
        ({"profile": {**PROFILE, "more": 1}}, "ConfigError", "more"),
        ({"more": 1}, "ConfigError", "more"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(asked: Served, change: Any, name: str, says: str) -> None:
    body = json.dumps({"config": settings(), "profile": PROFILE, **change})
    error = asked.error("POST", "/api/plans", 422, content=body, headers={"content-type": "application/json"})
    assert error["name"] == name and says in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"config": ' * 50_000])
def test_a_body_that_is_none_is_refused(asked: Served, body: bytes) -> None:
    answer = asked.client.post(
        "/api/plans", content=body,
        headers={**LOGIN, "content-type": "application/json"},
    )  # fmt: skip
    assert answer.status_code in (400, 422) and answer.json()["error"]["name"]


def test_a_body_that_is_too_long_is_refused(asked: Served) -> None:
    over = b'{"config": "' + b"x" * (8 * 2**20)
    headers = {"content-type": "application/json"}
    assert asked.error("POST", "/api/plans", 413, content=over, headers=headers)["name"] == "LimitExceeded"
    pieces = (over[at : at + 2**20] for at in range(0, len(over), 2**20))
    assert asked.error("POST", "/api/plans", 413, content=pieces, headers=headers)["name"] == "LimitExceeded"


@pytest.mark.parametrize("path", ["x/plan.json", "0" * 64 + "/plan.json", "%2e%2e/plan.json", "0" * 64 + "/%2e%2e"])
def test_there_are_no_other_plans(asked: Served, path: str) -> None:
    answer = asked.client.get(f"/api/plans/{path}", headers=LOGIN)
    assert answer.status_code in (404, 422)
