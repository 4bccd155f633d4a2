"""`hybrid serve` as processes and connections: watchers of a run that trains, lost connections, and the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.served import (
    LOGIN,
    TOKEN,
    append,
    client_of,
    declaration,
    packed,
    row,
    running,
    write_run,
)
from bridge.watching import Watcher, WatcherOfMany, watch
from hybrid.bridge.server import hub as hub_module
from hybrid.bridge.server.hub import Hub
from hybrid.bridge.server.serve import warning
from hybrid.cli.main import main
from hybrid.errors import HybridError
from hybrid.training.metrics_log import read_rows
from training import micro

MANY = 200


@pytest.fixture
def runs(tmp_path: Path, built: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def path_of(run: str, query: str = "") -> str:
    return f"/api/runs/{run}/events{query}"


# --- watchers


def test_200_watchers_miss_no_row(runs: Path, tmp_path: Path) -> None:
    """All see every row, in order, once: those that were there from the start, and those that came and went."""
    folder, last = write_run(runs, "busy", 20), 200

    async def write() -> None:
        for step in range(21, last + 1):
            append(folder, row(step))
            if step % 20 == 0:
                append(folder, {"step": step, "split": "validation", "loss": 4.0}, file="validation.jsonl")
            await asyncio.sleep(0.01)

    async def faithful(watcher: Watcher) -> None:
        await watcher.watch(last, 60)

    async def restless(watcher: Watcher, stops: Iterator[int]) -> None:
        for stop in stops:
            await watcher.watch(stop, 60)
        await watcher.watch(last, 60)

    async def all_of_them(watchers: list[Watcher]) -> None:
        tasks = [
            restless(one, iter(range(10 + index % 30, last, 30 + index % 50))) if index % 2 else faithful(one)
            for index, one in enumerate(watchers)
        ]
        await asyncio.gather(write(), *tasks)

    with running(tmp_path) as place:
        watchers = [Watcher(place.port, path_of("busy", "?fields=total_loss")) for _ in range(MANY)]
        asyncio.run(all_of_them(watchers))
        assert len(watchers) == MANY
        for watcher in watchers:
            assert watcher.steps == list(range(1, last + 1))
            assert watcher.rows["metrics"][-1] == {"step": last, "total_loss": row(last)["total_loss"]}
            assert "cut" not in watcher.events and not watcher.gone


def test_two_watchers_and_a_terminal_see_one_run(runs: Path, tmp_path: Path) -> None:
    config = micro.config_file(tmp_path)
    command = [
        sys.executable, "-m", "hybrid", "train", str(config), "--backend", "reference",
        "--run-dir", str(runs / "micro"), "--set", "evaluation.every=10", "--json",
    ]  # fmt: skip
    with running(tmp_path) as place:
        terminal = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        while not (runs / "micro" / "run.json").exists():
            assert terminal.poll() is None
            time.sleep(0.02)

        async def both() -> list[Watcher]:
            watchers = [Watcher(place.port, path_of("micro")) for _ in range(2)]
            await asyncio.gather(*(one.watch(20, 60) for one in watchers))
            await watchers[0].watch(20, 60)
            return watchers

        watchers = asyncio.run(both())
        said, _ = terminal.communicate(timeout=60)
        assert terminal.returncode == 0
        shown = [event for event in map(json.loads, said.splitlines()) if event["event"] == "step"]
        assert shown[-1]["step"] == 20
        rows = list(read_rows(runs / "micro" / "metrics.jsonl"))
        for watcher in watchers:
            assert watcher.rows["metrics"] == rows
        with client_of(place) as client:
            one = client.get("/api/runs/micro").json()["run"]
        assert (one["status"], one["step"]) == ("finished", 20)
        late = Watcher(place.port, path_of("micro"))
        asyncio.run(late.watch(20, 60))
        assert late.rows["metrics"] == rows and late.record["status"] == "finished"


def test_a_run_that_is_removed_while_it_is_watched_ends_its_streams_only(runs: Path, tmp_path: Path) -> None:
    write_run(runs, "a", 3)
    other = write_run(runs, "b", 3)
    with running(tmp_path) as place:

        async def watch_both() -> tuple[Watcher, Watcher]:
            gone, stays = Watcher(place.port, path_of("a")), Watcher(place.port, path_of("b"))

            async def change() -> None:
                while len(gone.steps) < 3 or len(stays.steps) < 3:
                    await asyncio.sleep(0.02)
                shutil.rmtree(runs / "a")
                (other / "run.json").write_text('{"half')
                append(other, row(4))

            await asyncio.gather(gone.watch(), stays.watch(4), change())
            return gone, stays

        gone, stays = asyncio.run(watch_both())
        assert gone.gone and not stays.gone and stays.steps == [1, 2, 3, 4]
        with client_of(place) as client:
            assert client.get("/api/runs/a/events").status_code == 404
            assert client.get("/api/runs").json()["runs"][0]["problem"]


def test_a_watcher_goes_on_after_the_server_was_started_again(runs: Path, tmp_path: Path) -> None:
    folder = write_run(runs, "a", 5)
    with running(tmp_path) as place:
        watcher = watch(Watcher(place.port, path_of("a")), 5)
    append(folder, row(6))
    with running(tmp_path) as place:
        watcher.port = place.port
        watch(watcher, 6)
    assert watcher.steps == [1, 2, 3, 4, 5, 6]
    assert "cut" not in watcher.events


def test_several_runs_are_watched_on_one_stream_from_where_they_were_compared(runs: Path, tmp_path: Path) -> None:
    """Nothing that the comparison has is told again, nothing that comes later is missed: over a lost connection, a run
    that takes steps back, and one that is removed."""
    first, second, query = write_run(runs, "a", 30), write_run(runs, "b", 30), "run=a&run=b&fields=total_loss"
    with (first / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":31')
    with running(tmp_path) as place:
        with client_of(place) as client:
            found = client.get(f"/api/compare?{query}").json()
        watcher = WatcherOfMany(place.port, f"/api/compare/events?{query}&lastEventId={found['at']}")
        watcher.runs = {name: Watcher(place.port, "") for name in ("a", "b")}
        with (first / "metrics.jsonl").open("ab") as file:
            file.write(b',"total_loss":1.5}\n')
        append(second, row(31))
        watch(watcher, 31)
        assert {name: one.record["status"] for name, one in watcher.runs.items()} == {"a": "running", "b": "running"}
        append(first, row(32))
        append(second, row(32))
        watch(watcher, 32)
        assert watcher.runs["a"].rows["metrics"] == [{"step": 31, "total_loss": 1.5}, {"step": 32, "total_loss": 4.968}]
        assert watcher.runs["b"].steps == [31, 32] and watcher.runs["a"].rows["validation"] == []
        assert "cut" not in watcher.events
        (second / "metrics.jsonl").write_text("")
        append(second, row(1), row(33))
        append(first, row(33))
        watch(watcher, 33)
        assert watcher.runs["b"].events.count("cut") == 1 and watcher.runs["b"].steps == [1, 33]
        assert "cut" not in watcher.runs["a"].events
        append(second, row(34))

        async def until_gone() -> None:
            listening = asyncio.create_task(watcher.watch())
            async with asyncio.timeout(30):
                while watcher.runs["b"].steps[-1] < 34:
                    await asyncio.sleep(0.02)
                shutil.rmtree(first)
                while not watcher.runs["a"].gone:
                    await asyncio.sleep(0.02)
                assert not listening.done()
                shutil.rmtree(second)
                await listening

        asyncio.run(until_gone())
        assert watcher.runs["b"].gone, "and then the stream ends"


def test_watchers_that_go_leave_nothing_behind(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs: list[Hub] = []

    class Known(Hub):
        def __init__(self) -> None:
            super().__init__(poll_seconds=0.02, silence_seconds=0.1)
            hubs.append(self)

    monkeypatch.setattr("hybrid.bridge.server.serve.Hub", Known)
    write_run(runs, "a", 3)
    with running(tmp_path) as place:

        async def some() -> None:
            await asyncio.gather(*(Watcher(place.port, path_of("a")).watch(3) for _ in range(10)))

        asyncio.run(some())
        deadline = time.monotonic() + 10
        while hubs[0].watchers and time.monotonic() < deadline:
            time.sleep(0.02)
        assert hubs[0].watchers == 0
    assert hub_module.POLL_SECONDS <= 0.25


def test_silence_is_broken_for_connections_that_nobody_holds(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.bridge.server.serve.Hub", lambda: Hub(0.02, 0.1))
    write_run(runs, "a", 1)
    with running(tmp_path) as place, socket.create_connection(("127.0.0.1", place.port), 10) as connection:
        head = f"GET {path_of('a')} HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\nAuthorization: token {TOKEN}\r\n\r\n"
        connection.sendall(head.encode())
        said = b""
        while said.count(b": nothing new") < 2:
            said += connection.recv(65536)
        assert b"text/event-stream" in said and b"retry: 1000" in said


# --- uploads


def test_a_connection_that_breaks_leaves_what_came(runs: Path, tmp_path: Path, recording: Path) -> None:
    file = packed(recording, tmp_path)
    data = file.read_bytes()
    with running(tmp_path) as place, client_of(place) as client:
        upload = client.post("/api/uploads", json=declaration(file)).json()["id"]
        with socket.create_connection(("127.0.0.1", place.port), 10) as connection:
            head = (
                f"PUT /api/uploads/{upload}?offset=0 HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\n"
                f"Authorization: token {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            connection.sendall(head.encode() + data[:1500])
            time.sleep(0.3)
        deadline = time.monotonic() + 10
        while not (have := client.get(f"/api/uploads/{upload}").json()["received"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert have == 1500
        assert client.head(f"/api/uploads/{upload}").headers["upload-offset"] == "1500"
        assert client.put(f"/api/uploads/{upload}?offset=1500", content=data[1500:]).status_code == 200
        assert client.post(f"/api/uploads/{upload}/commit").json()["run"] == "micro"


# --- the process


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "HYBRID_TOKEN": TOKEN, "DISPLAY": ""}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_server_at_once_also_with_watchers(runs: Path, tmp_path: Path, stop: signal.Signals) -> None:
    write_run(runs, "a", 3)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(built=str(tmp_path / "built")))
    words = ["serve", "--port", "0", "--runs", str(runs), "--data", str(tmp_path), "--no-browser"]
    server = subprocess.Popen(
        [sys.executable, str(program), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment(), "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert server.stdout is not None
    match = re.search(r"http://127\.0\.0\.1:([0-9]+)/\?token=(\S+)", server.stdout.readline())
    assert match is not None and match[2] == TOKEN

    async def watch_to_the_end() -> Watcher:
        watcher = Watcher(int(match[1]), path_of("a"))

        async def end() -> None:
            while len(watcher.steps) < 3:
                await asyncio.sleep(0.02)
            server.send_signal(stop)

        await asyncio.gather(watcher.watch(), end())
        return watcher

    watcher = asyncio.run(watch_to_the_end())
    assert server.wait(20) == 0, "although the stream would never have ended by itself"
    assert watcher.steps == [1, 2, 3] and not watcher.gone, "the stream ended in good order"
    assert "ending" in server.stdout.read() and server.stderr is not None and server.stderr.read() == ""


PROGRAM = """
import sys
from pathlib import Path
from bridge.served import small_export
from hybrid.bridge.server import pages, serve
from hybrid.cli.main import main

pages.resource = lambda name: Path({built!r}) / name
serve.Site = lambda export: pages.Site(small_export)
sys.exit(main())
"""


def test_a_port_that_is_taken_is_said_so(runs: Path, tmp_path: Path) -> None:
    with running(tmp_path) as place:
        message = f"no server can be opened on 127.0.0.1:{place.port}"
        with pytest.raises(HybridError, match=message), running(tmp_path, port=place.port):
            pass
        with running(tmp_path, port=None) as one, running(tmp_path, port=None) as other:
            assert one.port != other.port
            with client_of(other) as client:
                assert client.get("/api/runs", headers=LOGIN).status_code == 200


def test_a_server_on_a_network_warns(tmp_path: Path, built: Path) -> None:
    assert warning("127.0.0.1") is None and warning("::1") is None and warning("localhost") is None
    assert "not encrypted" in (warning("0.0.0.0") or "") and "--host box" in (warning("box") or "")


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "x"],
        ["--port", "65536"],
        ["--max-upload", "0"],
        ["--max-upload", "1X"],
        ["--token", "short"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert capsys.readouterr().err.startswith("hybrid: ")
