"""The server of a launched run, request by request: what it serves, what it takes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from bridge.replay import Tab, config_here
from checkpoint.examples import Unsynced
from hybrid.bridge.launch.app import MOST_BYTES, launch_app
from hybrid.bridge.launch.desk import Desk
from hybrid.bridge.launch.run import TabRun
from hybrid.bridge.server.guard import Guard
from hybrid.bridge.server.plans import PlanShelf
from hybrid.checkpoint import finding
from hybrid.checkpoint.manifest import Lineage, Progress
from hybrid.plan.folder import read_plan
from hybrid.plan.profile import DEFAULT_LIMITS
from hybrid.training.run_files import RunFile
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services, prepare_run
from training.micro import Recorder
from training.sessions import FakeClock

TOKEN = "t0ken"
HOST = "127.0.0.1:4711"
BASE = f"http://{HOST}/{TOKEN}/"


@dataclass
class Here:
    """A launched run without a network."""

    run: TabRun
    desk: Desk
    tab: Tab
    clock: FakeClock
    stop: StopFlag
    view: Recorder

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        return self.tab.ask(method, path, status, **options)

    def error(self, method: str, path: str, status: int, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(method, path, status, **options).json()
        return answer["error"]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.run.store.folder.iterdir())


@pytest.fixture
def here(tmp_path: Path, recording: Path, site: Path) -> Iterator[Here]:
    clock, stop, view = FakeClock(), StopFlag(), Recorder()
    services = Services(view=view, stop=stop, clock=clock, filesystem=Unsynced())
    request = Request(config_here(tmp_path), tmp_path / "run")
    request.run_dir.mkdir()
    prepared, store = prepare_run(request, services)
    shelf = PlanShelf()
    with TabRun(request, services, prepared, store, RunFile(request.run_dir)) as run:
        desk = Desk(run.apply, stop, clock)
        guarded = Guard(launch_app(desk, run, site, shelf), TOKEN, [HOST, "localhost:4711"], MOST_BYTES)
        client = TestClient(guarded, base_url=f"http://{HOST}", raise_server_exceptions=False)
        yield Here(run, desk, Tab(BASE, recording, client=client), clock, stop, view)
    shelf.close()


# --- who may ask


@pytest.mark.parametrize("path", ["", "t0ke", "t0ken2/", "T0KEN/", "t0ken", "x/t0ken/", "%74%30x/", "../t0ken/x"])
def test_without_the_token_there_is_nothing_here(here: Here, path: str) -> None:
    answer = here.tab.client.get(f"http://{HOST}/{path}")
    assert answer.status_code == 404 and answer.json()["error"]["name"] == "HybridError"
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:4711"},
        {"host": "127.0.0.1"},
        {"host": "127.0.0.1:80"},
        {"host": "127.0.0.1:4711.evil.example"},
        {"host": "[::1]:4711"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8888"},
        {"origin": "https://127.0.0.1:4711"},
        {"origin": "http://localhost:4711"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=lambda headers: "=".join(*headers.items()),
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_stranger_is_turned_away(here: Here, headers: dict[str, str], method: str) -> None:
    path = "job.json" if method == "GET" else "events"
    answer = here.tab.client.request(method, BASE + path, headers={**here.tab.headers, **headers})
    assert answer.status_code == 403 and not here.desk.claimed
    assert "only this server's own page may ask" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"},
        {"host": "localhost:4711", "origin": "http://localhost:4711"},
        {"host": "LOCALHOST:4711"},
    ],
    ids=["the page", "by its other name", "in capitals"],
)
def test_the_page_itself_may_ask(here: Here, headers: dict[str, str]) -> None:
    here.ask("GET", "job.json", headers=headers)


def test_every_answer_isolates_the_page_and_is_kept_by_nobody(here: Here) -> None:
    for answer in (here.ask("GET", ""), here.ask("GET", "nothing", 404), here.ask("POST", "events", 422, content="{")):
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-embedder-policy"] == "require-corp"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy


# --- files


def test_the_page_and_its_parts_come_with_their_types(here: Here) -> None:
    assert here.ask("GET", "").headers["content-type"] == "text/html; charset=utf-8"
    assert here.ask("GET", "launch.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert here.ask("GET", "parts/worker.js").text == "// worker"
    head = here.ask("HEAD", "launch.js")
    assert head.content == b"" and head.headers["content-length"] == "9"


@pytest.mark.parametrize(
    "path",
    [
        "..%2fcorpus.txt", "parts/..%2f..%2fcorpus.txt", "..%5ccorpus.txt", "%2e%2e/corpus.txt", ".hidden", "parts",
        "parts/", "parts//worker.js", "launch.js/", "launch.js%00", "link.txt", "data/..%2f..%2fmicro.json",
        "data/.%2e/micro.json", "plans/..%2f..%2fx/plan.json", "plans/x/plan.json", "checkpoints/../x",
        "checkpoints/step-00000005/model.safetensors", "checkpoints/%2e%2e/run.json", "%2fetc/passwd", "//etc/passwd",
    ],
)  # fmt: skip
def test_nothing_outside_is_reached(here: Here, tmp_path: Path, site: Path, path: str) -> None:
    (site / ".hidden").write_text("secret")
    (site / "link.txt").symlink_to(tmp_path / "corpus.txt")
    assert here.error("GET", path, 404)["name"] == "HybridError"


RANGES = [
    ("bytes=0-3", 206, (0, 4)),
    ("bytes=4-", 206, (4, None)),
    ("bytes=-6", 206, (-6, None)),
    ("bytes=10-999999999", 206, (10, None)),
    ("bytes=-999999999", 206, (0, None)),
    ("bytes=5-5", 206, (5, 6)),
    ("bytes=999999999-", 416, None),
    ("bytes=-0", 416, None),
    ("bytes=7-3", 200, (0, None)),
    ("bytes=a-b", 200, (0, None)),
    ("bytes=0-1,3-4", 200, (0, None)),
    ("bytes=-", 200, (0, None)),
    ("bytes=99999999999999999999-", 200, (0, None)),
    ("lines=0-3", 200, (0, None)),
]


@pytest.mark.parametrize(("header", "status", "expected"), RANGES, ids=[row[0] for row in RANGES])
def test_ranges(here: Here, header: str, status: int, expected: tuple[int, int | None] | None) -> None:
    whole = (here.run.data_folder / "tokens.bin").read_bytes()
    answer = here.ask("GET", "data/tokens.bin", status, headers={"range": header})
    if expected is None:
        assert answer.headers["content-range"] == f"bytes */{len(whole)}"
        assert "beyond the end" in answer.json()["error"]["message"]
        return
    part = whole[slice(*expected)]
    assert answer.content == part and answer.headers["content-length"] == str(len(part))
    assert answer.headers["accept-ranges"] == "bytes"
    if status == 206:
        begin = range(len(whole))[slice(*expected)].start
        assert answer.headers["content-range"] == f"bytes {begin}-{begin + len(part) - 1}/{len(whole)}"
    else:
        assert "content-range" not in answer.headers


# --- the plan


PROFILE = {"limits": DEFAULT_LIMITS, "features": ["subgroups"], "subgroup_size": 4, "cpu": True}


def test_a_plan_is_compiled_for_the_device_that_a_tab_describes(here: Here, tmp_path: Path) -> None:
    here.tab.claim()
    place = here.ask("POST", "profile", json=PROFILE).json()["plan"]
    assert here.ask("POST", "profile", json=PROFILE).json()["plan"] == place, "the same device, the same plan"
    document = here.ask("GET", place + "plan.json").json()
    copy = tmp_path / "plan"
    copy.mkdir()
    (copy / "plan.json").write_text(json.dumps(document))
    for sha256 in {constant["sha256"] for constant in document["constants"].values()}:
        (copy / f"{sha256}.bin").write_bytes(here.ask("GET", f"{place}{sha256}.bin").content)
    plan = read_plan(copy)
    assert plan.shape == {"B": 2, "T": 16} and "optimizer_apply" in plan.programs


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        ({"limits": {**DEFAULT_LIMITS, "maxStorageBufferBindingSize": 4096}}, "LimitExceeded", ""),
        ({"limits": {"maxBufferSize": 1}}, "ConfigError", "limits."),
        ({"limits": {**DEFAULT_LIMITS, "maxBufferSize": -1}}, "ConfigError", "limits.maxBufferSize is -1"),
        ({"limits": {**DEFAULT_LIMITS, "maxBufferSize": "a"}}, "ConfigError", "limits.maxBufferSize"),
        ({"subgroup_size": -4}, "ConfigError", "subgroup_size"),
        ({"features": "all"}, "ConfigError", "features"),
        ({"more": 1}, "ConfigError", "more"),
    ],
)
def test_a_device_that_cannot_is_refused_by_name(here: Here, change: dict[str, Any], name: str, says: str) -> None:
    here.tab.claim()
    error = here.error("POST", "profile", 422, json={**PROFILE, **change})
    assert error["name"] == name and says in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff"])
def test_a_profile_that_is_none_is_refused(here: Here, body: bytes) -> None:
    here.tab.claim()
    assert here.error("POST", "profile", 422, content=body)["name"] == "ConfigError"


# --- one tab at a time


def test_a_second_tab_is_told_that_the_run_is_open(here: Here) -> None:
    here.tab.claim()
    here.tab.begin()
    second = Tab(BASE, here.tab.recording, "tab-2", here.tab.client)
    for method, path in (
        ("GET", "job.json"), ("POST", "events"), ("POST", "profile"), ("PUT", "checkpoints/step-00000005/a?offset=0"),
        ("POST", "checkpoints/step-00000005/commit"),
    ):  # fmt: skip
        body = {"sequence": 1, "events": []}
        error = second.ask(method, path, 409, json=body).json()["error"]
        assert error["name"] == "ConfigError" and "already open in another tab" in error["message"]
    here.clock.seconds += 4
    second.claim()
    assert here.tab.report(status=409)["error"]["name"] == "ConfigError", "now the first one is the stranger"


def test_a_tab_that_is_being_answered_keeps_the_run_however_long_it_takes(here: Here) -> None:
    here.tab.claim()
    with here.desk.request("tab-1"):
        here.clock.seconds += 1000
        assert here.desk.silence == 0
        reloaded = Tab(BASE, here.tab.recording, "tab-2", here.tab.client)
        assert reloaded.ask("GET", "job.json", 409).json()["busy"], "it may ask again until that is over"
    assert here.desk.silence == 0
    here.clock.seconds += 5
    assert here.desk.silence == 5


def test_a_page_that_is_loaded_again_gets_the_run_once_the_last_request_of_the_old_one_is_done(here: Here) -> None:
    here.tab.claim()
    reloaded = Tab(BASE, here.tab.recording, "tab-2", here.tab.client)
    with here.desk.request("tab-1"):
        assert "busy" not in reloaded.ask("GET", "job.json", 409).json(), "a page that is there says something soon"
        here.clock.seconds += 4
        assert reloaded.ask("GET", "job.json", 409).json()["busy"]
    reloaded.claim()


@pytest.mark.parametrize("name", [None, "", "a b", "x" * 65, "ä", "a/b"])
def test_a_request_names_its_tab(here: Here, name: str | None) -> None:
    headers = [] if name is None else [(b"x-hybrid-tab", name.encode())]
    answer = here.tab.client.get(BASE + "job.json", headers=headers)
    assert answer.status_code == 400 and "x-hybrid-tab" in answer.json()["error"]["message"]


# --- events


def test_a_report_that_comes_twice_counts_once(here: Here) -> None:
    here.tab.claim()
    row = json.loads((here.tab.recording / "metrics.jsonl").read_text().splitlines()[0])
    body = {"sequence": 1, "events": [{"kind": "entry", "row": row}]}
    assert here.ask("POST", "events", json=body).json() == {"stop": None}
    here.stop.request("enough")
    assert here.ask("POST", "events", json=body).json() == {"stop": "enough"}
    assert here.ask("POST", "events", 409, json={"sequence": 3, "events": []}).json()["expected"] == 2
    assert len((here.run.run_dir / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"[" * 100_000, b'{"sequence": 1}', b'{"sequence": 0, "events": []}',
        b'{"sequence": 1, "events": [{"kind": "unknown"}]}',
        b'{"sequence": 1, "events": [{"kind": "entry", "row": {"step": NaN}}]}',
        b'{"sequence": 1, "events": [{"kind": "phase", "phase": "lunch"}]}',
        b'{"sequence": 1, "events": [{"kind": "note", "text": "a", "more": 1}]}',
        b'{"sequence": 1, "events": [{"kind": "cut", "file": "run.json", "step": 0}]}',
        b'{"sequence": 1, "events": [{"kind": "cut", "file": "metrics", "step": -1}]}',
        b'{"sequence": 1, "events": [{"kind": "step", "step": 1}]}',
        b'{"sequence": 1, "events": [{"kind": "record", "facts": {"step": "one"}}]}',
        b'{"sequence": 1, "events": [{"kind": "validation", "row": {"step": 1, "split": "train", "loss": 1, "perplexity": 1, "targetTokens": 1}}]}',  # noqa: E501
        b'{"sequence": 1, "events": [{"kind": "end", "status": "won", "step": 1}]}',
        b'{"sequence": 1, "events": [{"kind": "error", "name": "X", "message": "", "differences": [[1]]}]}',
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused_and_changes_nothing(here: Here, body: bytes) -> None:
    here.tab.claim()
    error = here.error("POST", "events", 422, content=body)
    assert error["name"] == "ConfigError" and error["message"].startswith("events: ")
    assert here.tab.report()["stop"] is None, "the tab may go on"
    assert here.view.of("step") == [] and not here.desk.ended.is_set()


def test_run_json_takes_from_a_tab_only_what_a_tab_knows(here: Here) -> None:
    here.tab.claim()
    before = dict(here.run.record.facts)
    facts = {"status": "finished", "runId": "mine", "config": {}, "steps": 1, "backend": {"backend": "browser"}, "x": 1}
    here.tab.report({"kind": "record", "facts": facts})
    after = {**here.run.record.facts}
    assert after.pop("backend") == {"backend": "browser"}
    assert {**after, "updatedAt": 0} == {**before, "updatedAt": 0}


def test_after_the_end_everything_is_gone(here: Here) -> None:
    here.tab.claim()
    here.tab.end("stopped", 0)
    for method, path in (("GET", "job.json"), ("POST", "events"), ("POST", "profile")):
        assert here.error(method, path, 410, json={"sequence": 9, "events": []})["name"] == "HybridError"
    assert here.desk.end is not None and here.desk.error is None


# --- checkpoints that come in


def test_a_checkpoint_comes_in_by_pieces_and_is_there_at_the_commit(here: Here) -> None:
    here.tab.claim()
    here.tab.begin()
    here.tab.upload(5, piece=1000)
    assert finding.newest(here.run.store.folder) is None
    here.tab.commit(5)
    ref = finding.newest(here.run.store.folder)
    assert ref is not None and ref.step == 5 and here.checkpoints == ["step-00000005"]
    whole = (here.tab.folder(5) / "model.safetensors").read_bytes()
    assert here.ask("GET", "checkpoints/step-00000005/model.safetensors").content == whole
    here.tab.save(10)
    assert here.checkpoints == ["step-00000005", "step-00000010"]


def test_a_piece_out_of_order_is_told_where_the_file_stands(here: Here) -> None:
    here.tab.claim()
    put = here.tab.put
    assert put("step-00000005", "a.bin", 4, b"late", 409)["size"] == 0
    assert put("step-00000005", "a.bin", 0, b"abcd") == {"size": 4}
    assert put("step-00000005", "a.bin", 4, b"efg") == {"size": 7}
    for offset in (3, 4, 8, 10**14):
        answer = put("step-00000005", "a.bin", offset, b"x", 409)
        assert answer["size"] == 7 and answer["error"]["name"] == "HybridError"
    assert put("step-00000005", "a.bin", 0, b"anew") == {"size": 4}, "a file may be begun anew"
    (folder,) = here.run.store.folder.iterdir()
    assert folder.name.startswith(".tmp-step-00000005-") and (folder / "a.bin").read_bytes() == b"anew"


@pytest.mark.parametrize("offset", ["", "?offset=", "?offset=-1", "?offset=1.5", "?offset=1e3", "?offset=" + "9" * 16])
def test_an_offset_is_a_number_of_bytes(here: Here, offset: str) -> None:
    here.tab.claim()
    assert here.error("PUT", f"checkpoints/step-00000005/a.bin{offset}", 400, content=b"x")["name"] == "ConfigError"


@pytest.mark.parametrize(
    "path",
    [
        "step-5/a.bin", "step-00000005x/a.bin", "latest/a.bin", "step-000000005/a.bin", ".tmp-step-00000005/a.bin",
        "step-00000005/checkpoint.json", "step-00000005/Checkpoint.JSON", "step-00000005/..a", "step-00000005/a%20b",
        "step-00000005/con", "step-00000005/.hidden", "step-00000005/a%5cb", "step-00000005/" + "a" * 200,
        "step-99999999999999999/a.bin",
    ],
)  # fmt: skip
def test_names_stay_inside_the_folder(here: Here, path: str) -> None:
    here.tab.claim()
    assert here.error("PUT", f"checkpoints/{path}?offset=0", 422, content=b"x")["name"] == "CheckpointCorrupt"
    assert not here.run.store.folder.exists() or here.checkpoints == []


def test_pieces_and_checkpoints_that_are_too_large_are_refused(here: Here) -> None:
    here.tab.claim()
    over = b"x" * (MOST_BYTES + 1)
    assert here.error("PUT", "checkpoints/step-00000005/a?offset=0", 413, content=over)["name"] == "LimitExceeded"

    def unannounced() -> Iterator[bytes]:
        for _ in range(9):
            yield b"x" * 2**20

    for path in ("checkpoints/step-00000005/a?offset=0", "events", "profile", "checkpoints/step-00000005/commit"):
        method = "PUT" if "offset" in path else "POST"
        assert here.error(method, path, 413, content=unannounced())["name"] == "LimitExceeded"
    piece = over[:-1]
    for count in range(7):
        assert here.tab.put("step-00000005", "a", count * len(piece), piece)["size"] == (count + 1) * len(piece)
    here.tab.put("step-00000005", "b", 0, piece)
    error = here.tab.put("step-00000005", "c", 0, piece, 413)["error"]
    assert error["name"] == "LimitExceeded" and "at most" in error["message"]
    for index in range(14):
        here.tab.put("step-00000005", f"small-{index}", 0, b"")
    here.tab.put("step-00000005", "one-too-many", 0, b"", 413)


def test_a_commit_whose_answer_was_lost_is_answered_again(here: Here) -> None:
    here.tab.claim()
    here.tab.upload(5)
    text = here.tab.manifest(5).render()
    first = here.ask("POST", "checkpoints/step-00000005/commit", content=text).json()
    assert here.ask("POST", "checkpoints/step-00000005/commit", content=text).json() == first
    other = here.tab.manifest(5, timestamp_ms=1).render()
    assert here.error("POST", "checkpoints/step-00000005/commit", 422, content=other)["message"].endswith("this name")


def test_half_an_upload_is_no_checkpoint_and_does_not_stay(here: Here) -> None:
    here.tab.claim()
    data = (here.tab.folder(5) / "model.safetensors").read_bytes()
    here.tab.upload(5)
    here.tab.put("step-00000005", "model.safetensors", 0, data[: len(data) // 2])
    error = here.tab.commit(5, status=422)["error"]
    assert error["name"] == "CheckpointCorrupt" and "model.safetensors" in error["message"]
    assert here.checkpoints == []
    here.tab.save(5)
    assert here.checkpoints == ["step-00000005"], "the next attempt begins afresh"
    here.tab.upload(10)
    here.tab.claim()
    assert here.checkpoints == ["step-00000005"], "a page that is loaded again begins afresh too"


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json"])
def test_a_flipped_bit_is_found(here: Here, file: str) -> None:
    here.tab.claim()
    here.tab.upload(5)
    data = bytearray((here.tab.folder(5) / file).read_bytes())
    data[len(data) // 2] ^= 1
    here.tab.put("step-00000005", file, 0, bytes(data))
    error = here.tab.commit(5, status=422)["error"]
    assert error["name"] == "CheckpointCorrupt" and file in error["message"] and here.checkpoints == []


def lineage(tab: Tab, **changes: Any) -> Lineage:
    return replace(tab.manifest(5).lineage, **changes)


HOSTILE = {
    "of another run": lambda tab: {"lineage": lineage(tab, run_id="another")},
    "of another runtime": lambda tab: {"lineage": lineage(tab, runtime="webgpu")},
    "out of sequence": lambda tab: {"lineage": lineage(tab, sequence=7)},
    "of other parents": lambda tab: {"lineage": lineage(tab, previous_checkpoint_hash="0" * 64)},
    "with other settings": lambda tab: {
        "config": {**tab.job["config"], "run": {**tab.job["config"]["run"], "seed": 1}}
    },
    "with another seed": lambda tab: {"seed": 1},
    "with another contract": lambda tab: {"fingerprints": replace(tab.manifest(5).fingerprints, contract={})},
    "with other hashes": lambda tab: {"hashes": replace(tab.manifest(5).hashes, config_hash="0" * 64)},
    "with an audit of its own": lambda tab: {"resume_audits": (AUDIT,)},
    "of another step": lambda tab: {"progress": replace(tab.manifest(5).progress, step=6)},
    "beyond the end": lambda tab: {"progress": Progress(step=500)},
    "with another cursor": lambda tab: {"cursor": {**tab.manifest(5).cursor, "position": 1}},
    "with a state that its files are not": lambda tab: {"state_hash": "0" * 64},
    "ahead of itself": lambda tab: {"optimizer_step": 6},
}
AUDIT = {
    "field": "contract.optimizer.lr", "saved": 1, "current": 2, "reason": "a", "timestamp": "2026-01-01T00:00:00.000Z",
    "source": "x", "operator": None,
}  # fmt: skip


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_checkpoint_that_is_not_the_next_one_of_this_run_is_refused(here: Here, fault: str) -> None:
    here.tab.claim()
    here.tab.upload(5)
    error = here.tab.commit(5, status=422, **HOSTILE[fault](here.tab))["error"]
    assert error["name"] == "CheckpointCorrupt", error
    assert here.checkpoints == [] and here.run.saved == 0
    here.tab.save(5)


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}'])
def test_a_manifest_that_is_none_is_refused(here: Here, text: bytes) -> None:
    here.tab.claim()
    here.tab.upload(5)
    error = here.error("POST", "checkpoints/step-00000005/commit", 422, content=text)
    assert error["name"] == "CheckpointCorrupt" and here.checkpoints == []


def test_files_that_no_checkpoint_of_this_run_has_are_refused(here: Here) -> None:
    here.tab.claim()
    here.tab.upload(5)
    here.tab.put("step-00000005", "more.bin", 0, b"x")
    assert "more.bin" in here.tab.commit(5, status=422)["error"]["message"]
    other = here.tab.manifest(5)
    listed = {**other.files, "more.bin": other.files["config.json"]}
    here.tab.upload(5)
    here.tab.put("step-00000005", "more.bin", 0, (here.tab.folder(5) / "config.json").read_bytes())
    assert "files is" in here.tab.commit(5, status=422, files=listed)["error"]["message"]


def test_going_back_is_refused(here: Here) -> None:
    here.tab.claim()
    here.tab.save(10)
    here.tab.upload(5)
    assert "step 5 does not follow step 10 of 20" in here.tab.commit(5, status=422)["error"]["message"]


def test_unknown_addresses_and_methods_are_typed_errors_too(here: Here) -> None:
    here.tab.claim()
    assert here.error("POST", "nothing", 405)["name"] == "HybridError"
    assert here.error("DELETE", "checkpoints/step-00000005/a", 405)["name"] == "HybridError"
    assert here.error("GET", "openapi.json", 404)["name"] == "HybridError"


def test_a_fault_of_this_side_ends_the_run_with_it(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug")

    here.tab.claim()
    monkeypatch.setattr("hybrid.bridge.server.plans.compile_plan", broken)
    assert here.error("POST", "profile", 500, json=PROFILE) == {"name": "Error", "message": "a bug"}
    assert isinstance(here.desk.error, ZeroDivisionError)
    assert here.error("POST", "profile", 410, json=PROFILE)["message"] == "a bug"
