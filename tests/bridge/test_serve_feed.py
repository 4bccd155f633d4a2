"""The events of a run folder, from any place on: every row once, whatever happens to the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.served import append, row, write_run
from hybrid.bridge.server.feed import BLOCK_BYTES, Cursor, Event, end_of, read_news, signature
from hybrid.training.metrics_log import JsonLines

BEGINNING = Cursor()


def told(folder: Path, at: Cursor = BEGINNING) -> tuple[list[Event], Cursor]:
    """Everything that there is to tell now."""
    events: list[Event] = []
    while True:
        news = read_news(folder, at)
        events += news.events
        at = news.at
        if not news.more:
            return events, at


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def steps(events: list[Event], kind: str = "entry") -> list[int]:
    return [event.value["step"] for event in events if event.kind == kind]


def test_everything_is_told_once_and_then_what_is_new(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 20)
    events, at = told(folder)
    assert events[0].kind == "run" and events[0].value["name"] == "a"
    assert steps(events) == list(range(1, 21)) and steps(events, "validation") == [10, 20]
    assert told(folder, at) == ([], at)
    append(folder, row(21))
    (new,), at = told(folder, at)
    assert new.value == row(21) and new.at == at
    write_run(tmp_path, "a", status="finished")
    assert kinds(told(folder, at)[0]) == ["run"]


def test_any_event_is_a_place_to_go_on_from(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 30)
    events, _ = told(folder)
    for index, event in enumerate(events):
        assert Cursor.parse(event.at.id) == event.at
        rest, _ = told(folder, event.at)
        assert [one.value for one in rest] == [one.value for one in events[index + 1 :]]


@pytest.mark.parametrize("text", ["", "x", "1-2-3", "1.2.3-4.5.6-x", "9" * 50, "1.2.3-4.5.6-7-8", "-1.0.0-0.0.0-0"])
def test_an_id_that_is_none_begins_at_the_beginning(text: str) -> None:
    assert Cursor.parse(text) == Cursor()


@pytest.mark.parametrize("text", ["999999.5.7-0.0.0-0", "10.1.0-0.0.0-1", "0.0.5-0.0.0-0"])
def test_a_place_that_is_not_in_this_file_begins_again(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, "a", 3)
    events, _ = told(folder, Cursor.parse(text))
    assert "cut" in kinds(events) and steps(events[kinds(events).index("cut") :]) == [1, 2, 3]


def test_steps_that_are_taken_back_are_told_of(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 20)
    _, at = told(folder)
    rows = JsonLines(folder / "metrics.jsonl", folder / "metrics.discarded.jsonl")
    rows.cut(10)
    for step in range(11, 31):  # longer than before when it is looked at again
        rows.append(row(step, step_time_ms=0.5))
    rows.close()
    events, _ = told(folder, at)
    assert (events[0].kind, events[0].value) == ("cut", {"file": "metrics", "step": 0})
    assert steps(events) == list(range(1, 31)) and "validation" not in kinds(events)


def test_half_a_row_is_not_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 2)
    text = json.dumps(row(3)).encode()
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(text[:20])
    events, at = told(folder)
    assert steps(events) == [1, 2]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(text[20:] + b"\n")
    assert steps(told(folder, at)[0]) == [3]


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 1)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'nonsense\n{"step": NaN}\n\n\xff\xff\n[1]\n' + b"x" * (2 * BLOCK_BYTES) + b"\n")
    append(folder, row(2))
    events, at = told(folder)
    assert steps(events) == [1, 2] and told(folder, at) == ([], at)


def test_a_long_file_comes_in_blocks(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 5000)
    first = read_news(folder, Cursor())
    assert first.more and 0 < len(first.events) < 5000
    assert steps(told(folder)[0]) == list(range(1, 5001))


@pytest.mark.parametrize("rows", [0, 1, 9, 2000])
def test_the_end_is_the_place_behind_what_was_told(tmp_path: Path, rows: int) -> None:
    folder = write_run(tmp_path, "a", rows)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"no row\n" + b'{"step":')  # a line that is none, and one that is being written
    _, at = told(folder)
    end = end_of(folder)
    assert (end.entry, end.validation, end.record) == (at.entry, at.validation, 0)
    assert kinds(told(folder, end)[0]) == ["run"]


def test_the_end_of_a_folder_without_rows_is_its_beginning(tmp_path: Path) -> None:
    assert end_of(tmp_path) == Cursor()


def test_a_run_that_is_removed_is_gone(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", 3)
    _, at = told(folder)
    before = signature(folder)
    shutil.rmtree(folder)
    assert signature(folder) != before
    assert kinds(told(folder, at)[0]) == ["gone"]


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_a_bad_run_file_is_told_as_a_problem(tmp_path: Path, data: bytes) -> None:
    folder = write_run(tmp_path, "a", 2)
    _, at = told(folder)
    (folder / "run.json").write_bytes(data)
    (event,), _ = told(folder, at)
    assert event.kind == "run" and event.value["problem"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 40)),
        st.tuples(st.just("cut"), st.integers(0, 60)),
        st.tuples(st.just("half"), st.integers(1, 30)),
        st.tuples(st.just("look"), st.integers(1, 3)),
        st.tuples(st.just("reconnect"), st.integers(0, 100)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ACTIONS)
def test_a_watcher_knows_what_the_file_says(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    """However the run goes on, goes back, is killed, and however often the watcher loses its connection."""
    folder = write_run(tmp_path_factory.mktemp("feed"), "a")
    rows = JsonLines(folder / "metrics.jsonl", folder / "discarded.jsonl")
    known: list[dict[str, Any]] = []
    seen: list[Event] = []
    at, step = Cursor(), 0

    def look(blocks: int) -> None:
        nonlocal at
        for _ in range(blocks):
            news = read_news(folder, at)
            at = news.at
            for event in news.events:
                seen.append(event)
                if event.kind == "cut":
                    known.clear()
                elif event.kind == "entry":
                    known.append(event.value)

    for times, (action, number) in enumerate([*actions, ("look", 50)]):
        if action == "append":
            for _ in range(number):
                step += 1
                rows.append(row(step, step_time_ms=times + number / 7))
        elif action == "cut":
            step = min(step, number)
            rows.cut(step)
        elif action == "half":
            rows.close()
            rows.cut(step)
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(json.dumps(row(step + 1)).encode()[:number])
            look(1)
            rows.cut(step)
        elif action == "look":
            look(number)
        elif seen:
            at = Cursor.parse(at.id)
    rows.close()
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    assert known == [json.loads(line) for line in lines]
