"""What a server meets on a real machine: folders that hold anything, other programs' cookies, clients that lie."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.served import (
    BASE,
    MOST_UPLOAD,
    PORT,
    TOKEN,
    Served,
    append,
    client_of,
    copy_run,
    declaration,
    packed,
    row,
    running,
    write_run,
)
from hybrid.bridge.server import imports, serving
from hybrid.bridge.server.feed import Cursor, read_news
from hybrid.bridge.server.imports import Imports
from hybrid.bridge.server.login import is_own_host
from hybrid.checkpoint.loading import VerifiedCheckpoint, load
from hybrid.cli.main import main
from hybrid.config.tree import RunConfig
from hybrid.training.saved_run import check_all_but_state


def links_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


# --- folders


@pytest.mark.parametrize("make", [links_to_itself, os.mkfifo, Path.mkdir], ids=["loop", "pipe", "folder"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl", "run.json"])
def test_what_stands_in_the_place_of_a_file_hides_no_run(
    served: Served, name: str, make: Callable[[Path], object]
) -> None:
    write_run(served.runs, "good", 3)
    folder = write_run(served.runs, "odd", 20)
    (folder / name).unlink()
    make(folder / name)
    listed = {run["name"]: run for run in served.json("/api/runs")["runs"]}
    assert listed["good"]["step"] == 3
    assert served.json("/api/runs/odd")["run"] == listed["odd"]
    assert served.json("/api/compare?run=good&run=odd")["runs"] == ["good", "odd"]
    if (handles := Path("/dev/fd")).exists():
        before = len(list(handles.iterdir()))
        for _ in range(5):
            served.json("/api/runs")
        assert len(list(handles.iterdir())) <= before + 2, "no file stays open"


def test_links_that_lead_to_each_other_hide_nothing(served: Served, recording: Path) -> None:
    write_run(served.runs, "good", 3)
    links_to_itself(served.runs / "loop")
    links_to_itself(served.data / "loop")
    assert [run["name"] for run in served.json("/api/runs")["runs"]] == ["good"]
    assert served.json("/api/data") == {"stores": []}
    served.error("GET", "/api/runs/loop", 404)
    served.error("GET", "/api/data/loop/manifest.json", 404)
    run = copy_run(recording, served.runs, "run")
    links_to_itself(run / "checkpoints" / "step-00000010" / "loop")
    served.error("GET", "/api/runs/run/checkpoints/step-00000010/loop", 404)


def test_nobody_waits_for_a_pipe(served: Served, recording: Path) -> None:
    run = copy_run(recording, served.runs, "run")
    os.mkfifo(run / "checkpoints" / "step-00000010" / "pipe")
    (served.data / "store").mkdir()
    (served.data / "store" / "manifest.json").write_text("{}")
    os.mkfifo(served.data / "store" / "pipe")
    served.error("GET", "/api/runs/run/checkpoints/step-00000010/pipe", 404)
    served.error("GET", "/api/data/store/pipe", 404)


def test_a_link_in_the_place_of_the_checkpoints_is_not_followed(served: Served, tmp_path: Path) -> None:
    run = write_run(served.runs, "run", 1)
    elsewhere = tmp_path / "elsewhere" / "step-00000001"
    elsewhere.mkdir(parents=True)
    (elsewhere / "checkpoint.json").write_text("{}")
    (run / "checkpoints").symlink_to(elsewhere.parent)
    served.error("GET", "/api/runs/run/checkpoints/step-00000001/checkpoint.json", 404)


def test_a_record_that_is_nested_beyond_reason_is_a_problem(served: Served) -> None:
    folder = write_run(served.runs, "deep", 2)
    depth = 500
    config = '{"a":' * depth + "1" + "}" * depth
    (folder / "run.json").write_text(f'{{"format":"hybrid.run","version":1,"config":{config}}}')
    assert served.json("/api/runs/deep")["run"]["problem"] == "run.json is nested too deeply"
    assert served.json("/api/compare?run=deep")["config"] == []


def test_steps_that_no_run_has_are_no_rows(served: Served) -> None:
    folder = write_run(served.runs, "a")
    append(folder, row(-5), row(1), row(10**15), row(10**300))
    assert [one["step"] for one in served.json("/api/runs/a/metrics")["rows"]] == [1]
    events = read_news(folder, Cursor()).events
    assert [event.value["step"] for event in events if event.kind == "entry"] == [1]
    assert all(Cursor.parse(event.at.id) == event.at for event in events), "each is a place to go on from"


def test_two_servers_of_one_folder_may_commit_one_file(
    served: Served, recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = packed(recording, tmp_path)
    upload = served.ask("POST", "/api/uploads", json=declaration(file)).json()["id"]
    served.ask("PUT", f"/api/uploads/{upload}?offset=0", content=file.read_bytes())
    other, check = Imports(served.runs, MOST_UPLOAD), check_all_but_state

    def check_while_the_other_commits(whole: VerifiedCheckpoint) -> RunConfig:
        monkeypatch.setattr(imports, "check_all_but_state", check)
        assert other.commit(upload)["run"] == "micro"
        return check(whole)

    monkeypatch.setattr(imports, "check_all_but_state", check_while_the_other_commits)
    assert served.ask("POST", f"/api/uploads/{upload}/commit").json()["run"] == "micro-2"
    for run in served.json("/api/runs")["runs"]:
        assert load(served.runs / run["name"] / "checkpoints" / "step-00000010").manifest.progress.step == 10, (
            "each is whole"
        )
    assert [path.name for path in (served.runs / ".uploads" / upload).iterdir()] == ["upload.json"]


# --- who asks


@pytest.mark.parametrize(
    "others",
    ['theme={"dark": true}; ', "words=a b c; ", "flag; ", "Path=/x; ", "name=\xe9; ", '="; ', "hybrid-1=x; ; "],
)
def test_the_cookies_of_other_programs_lock_nobody_out(asked: Served, others: str) -> None:
    cookie = f"hybrid-{PORT}={TOKEN}"
    for text in (others + cookie, f"{cookie}; {others}"):
        headers = {"cookie": text.encode("latin-1")}
        assert asked.client.get(f"{BASE}/api/data", headers=headers).status_code == 200, text
    headers = {"cookie": f"{others}hybrid-{PORT}=wrong".encode("latin-1")}
    assert asked.client.get(f"{BASE}/api/data", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("host", "address", "own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1:80", "127.0.0.1", True),
        ("[::1]", "::1", True),
        ("192.168.1.7", "0.0.0.0", True),
        ("127.0.0.1:8321", "127.0.0.1", False),
        ("evil.example", "0.0.0.0", False),
        ("", "127.0.0.1", False),
        ("127.0.0.1:", "127.0.0.1", False),
    ],
)
def test_on_the_port_of_http_browsers_leave_it_out(host: str, address: str, own: bool) -> None:
    assert is_own_host(host, address, 80) is own


@pytest.mark.parametrize("option", ["--runs", "--data"])
def test_a_file_in_the_place_of_a_folder_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["serve", option, str(tmp_path / "file")]) == 2
    assert "expected a folder" in capsys.readouterr().err


# --- connections


def test_who_asks_for_nothing_is_not_waited_for(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SILENT_SECONDS", 0.3)
    run = write_run(tmp_path / "runs", "a", 1)
    with running(tmp_path) as place, client_of(place) as client:
        host = f"Host: 127.0.0.1:{place.port}\r\n"
        silent = []
        for text in (
            "",
            f"GET /api/runs HTTP/1.1\r\n{host}",
            f"GET / HTTP/1.1\r\n{host}\r\nGET /api",
            f"POST /api/plans HTTP/1.1\r\n{host}Content-Length: 1000\r\n\r\n[",
        ):
            silent.append(socket.create_connection(("127.0.0.1", place.port), timeout=5))
            silent[-1].sendall(text.encode())
        with client.stream("GET", "/api/runs/a/events") as watched:
            lines = watched.iter_lines()
            next(line for line in lines if line == "event: entry")
            for connection in silent:
                with connection:
                    while connection.recv(4096):
                        pass  # the end of it, or a timeout
            time.sleep(0.7)
            append(run, row(2))
            assert next(line for line in lines if '"step":2' in line), "who listens is not silent"
        assert client.get("/api/data").status_code == 200


def test_an_address_beyond_reason_is_not_repeated_whole(asked: Served) -> None:
    assert len(asked.error("GET", "/" + "a" * 20_000, 404)["message"]) < 400
