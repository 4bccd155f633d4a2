"""What `hybrid serve` tells of the runs, checkpoints and token stores of this machine, also of damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bridge.served import LOGIN, Served, append, copy_run, row, write_run
from hybrid.bridge.server.rows import LINE_BYTES, SPAN_BYTES

STEP = "step-00000010"


# --- lists


def test_runs_are_listed_with_where_they_stand(served: Served) -> None:
    write_run(served.runs, "second", 30, step=25, runId="r", parameters=7, backend={"backend": "webgpu"})
    write_run(served.runs, "first")
    (served.runs / "no-run").mkdir()
    (served.runs / "file").write_text("x")
    first, second = served.json("/api/runs")["runs"]
    assert (first["name"], first["step"], first["loss"]) == ("first", None, None)
    assert (second["name"], second["status"], second["step"], second["steps"]) == ("second", "running", 30, 100)
    assert (second["loss"], second["validationLoss"], second["backend"]) == (4.97, 4.5, "webgpu")
    assert second["problem"] is None
    one = served.json("/api/runs/second")
    assert one["run"] == second and one["facts"]["parameters"] == 7


def test_a_folder_that_is_not_there_has_no_runs(served: Served) -> None:
    served.runs.rmdir()
    assert served.json("/api/runs") == {"runs": []}
    assert served.error("GET", "/api/runs/a", 404)["name"] == "HybridError"


BAD_RECORDS = {
    "half": b'{"format": "hybrid.run", "ver',
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "list": b"[1, 2]",
    "other": b'{"format": "something"}',
    "newer": b'{"format": "hybrid.run", "version": 99}',
    "types": b'{"format": "hybrid.run", "version": 1, "step": "7", "status": 3, "steps": true, "backend": [1]}',
    "numbers": b'{"format": "hybrid.run", "version": 1, "step": NaN, "more": [Infinity, 1e999]}',
    "surrogate": b'{"format": "hybrid.run", "version": 1, "status": "\\ud800"}',
}


@pytest.mark.parametrize("kind", BAD_RECORDS)
def test_one_bad_run_file_hides_no_other_run(served: Served, kind: str) -> None:
    write_run(served.runs, "good", 3)
    (write_run(served.runs, "bad", 2) / "run.json").write_bytes(BAD_RECORDS[kind])
    bad, good = served.json("/api/runs")["runs"]
    assert good["step"] == 3 and good["problem"] is None
    assert bad["step"] == 2 and (bad["problem"] or kind in ("types", "numbers", "surrogate"))
    assert served.json("/api/runs/bad")["run"] == bad
    assert len(served.json("/api/runs/bad/metrics")["rows"]) == 2
    assert served.json("/api/compare?run=good&run=bad")["runs"] == ["good", "bad"]


def test_what_is_no_plain_file_is_not_read(served: Served, tmp_path: Path) -> None:
    folder = write_run(served.runs, "odd")
    (tmp_path / "secret.jsonl").write_text(json.dumps(row(1)) + "\n")
    for name in ("run.json", "metrics.jsonl"):
        (folder / name).unlink()
    os.mkfifo(folder / "run.json")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(folder / "validation.jsonl.x")
    assert served.json("/api/runs")["runs"][0]["problem"] == "run.json is no plain file"
    assert served.json("/api/runs/odd/metrics")["rows"] == []


@pytest.mark.parametrize("name", ["..%2f..", "%2e%2e%2fx", ".hidden", "a b", "a%00", "%ff", "x" * 129, "linked"])
@pytest.mark.parametrize("path", ["", "/metrics", "/events", "/checkpoints", "/checkpoints/step-00000001/config.json"])
def test_names_of_runs_stay_among_the_runs(asked: Served, name: str, path: str) -> None:
    if not (asked.runs / "linked").exists():
        write_run(asked.runs.parent, "elsewhere", 1)
        (asked.runs / "linked").symlink_to(asked.runs.parent / "elsewhere")
        write_run(asked.runs, ".hidden", 1)
    answer = asked.client.get(f"/api/runs/{name}{path}", headers=LOGIN)
    assert answer.status_code in (404, 422) and answer.json()["error"]["name"]
    assert asked.json("/api/runs") == {"runs": []}


# --- rows


def test_rows_come_in_pieces_by_step_and_field(served: Served) -> None:
    write_run(served.runs, "a", 25)
    whole = served.json("/api/runs/a/metrics")
    assert [one["step"] for one in whole["rows"]] == list(range(1, 26)) and whole["next"] is None
    assert whole["rows"][0] == row(1)
    seen: list[int] = []
    after: int | None = 0
    while after is not None:
        part = served.json(f"/api/runs/a/metrics?after={after}&limit=10&fields=total_loss,nothing")
        assert all(set(one) == {"step", "total_loss"} for one in part["rows"])
        seen += [one["step"] for one in part["rows"]]
        after = part["next"]
    assert seen == list(range(1, 26))
    held = served.json("/api/runs/a/metrics?file=validation&after=10")["rows"]
    assert held == [{"step": 20, "split": "validation", "loss": 4.5}]


@pytest.mark.parametrize(
    "query",
    [
        "after=-1",
        "after=x",
        "after=1e3",
        "after=99999999999999999",
        "limit=0",
        "limit=10001",
        "fields=",
        "fields=a,,b",
        "file=x",
    ],
)
def test_a_question_that_makes_no_sense_is_refused(asked: Served, query: str) -> None:
    assert asked.error("GET", f"/api/runs/a/metrics?{query}", 422)["name"] == "ConfigError"


def test_lines_that_are_no_rows_are_left_out(served: Served) -> None:
    folder = write_run(served.runs, "a", 3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 4, "total_loss": NaN}\n{"step": "5"}\nnonsense\n[6]\n{"step": 7, "x": 1e999}\n' + b"[" * 99_999
        )
        file.write(b"\n")
    append(folder, row(8))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"schemaVersion":1,"step":9,"total_lo')  # killed while writing
    assert [one["step"] for one in served.json("/api/runs/a/metrics")["rows"]] == [1, 2, 3, 8]
    assert served.json("/api/runs")["runs"][0]["step"] == 8
    assert served.json("/api/compare?run=a")["metrics"]["steps"] == [1, 2, 3, 8]


def test_any_place_of_a_long_file_is_found(served: Served) -> None:
    folder = write_run(served.runs, "long", 4000)
    assert (folder / "metrics.jsonl").stat().st_size > 4 * SPAN_BYTES
    for after in (0, 1, 7, 1234, 3998, 3999, 4000, 9999):
        rows = served.json(f"/api/runs/long/metrics?after={after}&limit=2")["rows"]
        assert [one["step"] for one in rows] == [step for step in (after + 1, after + 2) if step <= 4000]


def test_a_line_without_end_ends_the_file(served: Served) -> None:
    folder = write_run(served.runs, "a", 2)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * (LINE_BYTES + 10) + b"\n")
    append(folder, row(3))
    assert [one["step"] for one in served.json("/api/runs/a/metrics")["rows"]] == [1, 2]


# --- comparison


def test_runs_are_compared_step_by_step_and_setting_by_setting(served: Served) -> None:
    shared = {"data": {"batchSize": 4}, "optimizer": {"lr": 1e-3}}
    write_run(served.runs, "a", 20, config=shared)
    write_run(served.runs, "b", 10, config={**shared, "optimizer": {"lr": 2e-3, "eps": 1e-8}})
    found = served.json("/api/compare?run=a&run=b&fields=total_loss,lr")
    assert found["runs"] == ["a", "b"]
    assert found["metrics"]["steps"] == list(range(1, 21))
    first, second = found["metrics"]["values"]
    assert first["total_loss"][:2] == second["total_loss"][:2] == [4.999, 4.998]
    assert second["total_loss"][10:] == [None] * 10 and first["lr"][19] == 1e-3
    assert found["validation"] == {"steps": [10, 20], "values": [{"loss": [4.5, 4.5]}, {"loss": [4.5, None]}]}
    assert found["config"] == [
        {"key": "optimizer.eps", "values": [None, 1e-8]},
        {"key": "optimizer.lr", "values": [1e-3, 2e-3]},
    ]


def test_a_long_comparison_is_thinned_out_at_the_same_steps(served: Served) -> None:
    write_run(served.runs, "a", 1000)
    write_run(served.runs, "b", 777)
    found = served.json("/api/compare?run=a&run=b&points=10")["metrics"]
    assert found["steps"] == [100, 200, 300, 400, 500, 600, 700, 777, 800, 900, 1000]
    assert found["values"][0]["total_loss"][7] is None, "a step that only the other run has"


@pytest.mark.parametrize("query", ["", "run=", "run=../a", "run=a&points=0", "&".join(["run=a"] * 17)])
def test_a_comparison_of_nothing_or_too_much_is_refused(served: Served, query: str) -> None:
    write_run(served.runs, "a", 1)
    for path in ("/api/compare", "/api/compare/events"):
        if "points" not in query or path == "/api/compare":
            served.error("GET", f"{path}?{query}", 422)
        served.error("GET", f"{path}?run=a&run=missing", 404)


# --- checkpoints


def test_checkpoints_are_listed_and_sent_by_ranges(served: Served, recording: Path) -> None:
    folder = copy_run(recording, served.runs, "run") / "checkpoints"
    (folder / "step-00000099").mkdir()
    (folder / "step-00000015" / "checkpoint.json").write_text("{")
    found = served.json("/api/runs/run/checkpoints")["checkpoints"]
    assert {one["name"]: one["status"] for one in found} == {
        "step-00000005": "complete", "step-00000010": "complete", "step-00000015": "damaged",
        "step-00000020": "complete", "step-00000099": "unfinished",
    }  # fmt: skip
    assert found[-1]["step"] == 20 and found[-1]["sequence"] == 4 and len(found[-1]["checkpointHash"]) == 64
    data = (folder / STEP / "model.safetensors").read_bytes()
    place = f"/api/runs/run/checkpoints/{STEP}/model.safetensors"
    assert served.ask("GET", place).content == data
    head = served.ask("HEAD", place)
    assert head.headers["content-length"] == str(len(data)) and head.headers["accept-ranges"] == "bytes"
    for text, part in (
        ("bytes=0-0", data[:1]), ("bytes=10-19", data[10:20]), ("bytes=-5", data[-5:]),
        (f"bytes={len(data) - 1}-", data[-1:]), ("bytes=0-99999999999", data),
    ):  # fmt: skip
        answer = served.ask("GET", place, 206, headers={"range": text})
        assert answer.content == part and answer.headers["content-range"].endswith(f"/{len(data)}")
    for text in (f"bytes={len(data)}-", f"bytes={len(data)}-{len(data) + 5}", "bytes=999999999999999-", "bytes=-0"):
        answer = served.ask("GET", place, 416, headers={"range": text})
        assert answer.headers["content-range"] == f"bytes */{len(data)}" and answer.json()["error"]["name"]
    for text in ("bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "bytes=x", "bytes=-"):
        assert served.ask("GET", place, headers={"range": text}).content == data


@pytest.mark.parametrize(
    "path",
    [
        "step-00000099/config.json", "step-00000011/config.json", f"{STEP}/nothing",
        f"{STEP}/..%2fcheckpoint.json", f"{STEP}/link", f"{STEP}/.hidden", "..%2f/run.json", "%2e%2e/run.json",
    ],
)  # fmt: skip
def test_only_files_of_finished_checkpoints_are_sent(served: Served, recording: Path, path: str) -> None:
    folder = copy_run(recording, served.runs, "run") / "checkpoints"
    (folder / "step-00000099").mkdir()
    (folder / "step-00000099" / "config.json").write_text("{}")
    (folder / STEP / "link").symlink_to("/etc/passwd")
    (folder / STEP / ".hidden").write_text("x")
    answer = served.client.get(f"/api/runs/run/checkpoints/{path}", headers=LOGIN)
    assert answer.status_code in (404, 422) and answer.json()["error"]["name"]


# --- token stores


def test_token_stores_are_listed_and_sent_by_ranges(served: Served, recording: Path) -> None:
    cache = recording.parent / "cache"
    (store,) = cache.iterdir()
    (served.data / "tokens-a").symlink_to(store)
    assert served.json("/api/data") == {"stores": []}, "a link leads elsewhere"
    (served.data / "tokens-a").unlink()
    (served.data / "tokens-a").mkdir()
    for path in store.iterdir():
        (served.data / "tokens-a" / path.name).write_bytes(path.read_bytes())
    (served.data / "broken").mkdir()
    (served.data / "broken" / "manifest.json").write_text("{")
    broken, good = served.json("/api/data")["stores"]
    assert broken["problem"] and broken["tokens"] is None
    assert good["problem"] is None and good["tokens"] > 1000 and good["vocabularySize"] == 256
    tokens = (store / "tokens.bin").read_bytes()
    answer = served.ask("GET", "/api/data/tokens-a/tokens.bin", 206, headers={"range": "bytes=4-7"})
    assert answer.content == tokens[4:8]
    served.ask("GET", "/api/data/tokens-a/tokens.bin", 416, headers={"range": f"bytes={len(tokens)}-"})
    for path in ("tokens-a/nothing", "nothing/tokens.bin", "%2e%2e%2fx/y", "tokens-a/..%2f..%2fx"):
        answer = served.client.get(f"/api/data/{path}", headers=LOGIN)
        assert answer.status_code in (404, 422)
