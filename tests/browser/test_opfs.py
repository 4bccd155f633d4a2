"""Checkpoints in the private file system of a real Chromium: they outlive the page, refuse to be half there, and say
when there is no room."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from browser.harness import BrowserPage, Chromium, StaticServer
from hybrid.checkpoint import archive, finding
from hybrid.checkpoint.loading import load
from hybrid.resources import resource

pytestmark = pytest.mark.browser

MODULE = "/test/support/opfs.js"


@pytest.fixture(scope="module")
def server():
    web = resource("web")
    with StaticServer({"/runtime/": web / "runtime", "/test/": web / "test"}) as running:
        yield running


@pytest.mark.parametrize("place", ["call", "call_in_worker"])
def test_files_are_written_read_continued_cut_and_removed(page, place):
    report = getattr(page, place)(MODULE, "files")
    assert report["flushed"] == 11
    assert report["part"] == "wor"
    assert report["continued"] == report["afterAbort"] == "hello all"
    assert report["replaced"] == "shorter"
    assert report["listing"] == [["a.txt"], ["inner"], ["b.txt"]]
    assert report["missing"] == [None, None, None, None]
    assert [refused["name"] for refused in report["refused"]] == ["HybridError"] * 4
    assert [refused["message"] for refused in report["refused"]][:2] == [
        "opfs/files/nothing: not there",
        "opfs/files/a.txt: bytes 2 to 99 of 7 do not exist",
    ]
    assert report["left"] == [[], []]


def test_a_checkpoint_outlives_the_page(page):
    assert page.call_in_worker(MODULE, "saveSteps", [1, 2, 3]) == [
        ["step-00000002", "complete"],
        ["step-00000003", "complete"],
    ]
    page.do(lambda it: it.reload())
    found = page.call_in_worker(MODULE, "readNewest")
    assert found["step"] == found["sequence"] == 3
    assert found["same"]
    assert page.call(MODULE, "readNewest") == found, "a page reads what a worker wrote"
    assert page.call(MODULE, "saveSteps", [4], "run-b") == [["step-00000004", "complete"]]
    assert page.call_in_worker(MODULE, "readNewest", "run-b")["same"], "and the other way round"


def test_a_save_that_never_finished_is_passed_over_and_cleaned(page):
    page.call_in_worker(MODULE, "saveSteps", [1])
    assert page.call_in_worker(MODULE, "leaveInTheMiddle", 2) == "step-00000002"
    page.do(lambda it: it.reload())
    assert page.call_in_worker(MODULE, "readNewest")["step"] == 1
    assert page.call_in_worker(MODULE, "saveSteps", [3]) == [
        ["step-00000001", "complete"],
        ["step-00000003", "complete"],
    ]


@pytest.fixture
def lasting_page(chromium: Chromium, server: StaticServer, tmp_path: Path):
    """A page whose storage is on the disk, and whose browser says how much room there really is."""
    opened = chromium.open_with_profile(server, tmp_path / "profile", "--disable-features=StaticStorageQuota")
    yield opened
    opened.close()


def test_without_room_the_error_says_so_and_the_last_checkpoint_stays(lasting_page, server):
    page = lasting_page
    page.call_in_worker(MODULE, "saveSteps", [1])

    def limit(it):
        session = it.context.new_cdp_session(it)
        session.send("Storage.overrideQuotaForOrigin", {"origin": server.url, "quotaSize": 1_000_000})

    page.do(limit)
    place = page.call_in_worker(MODULE, "placeWithoutRoom", "run-p")
    assert place["name"] == "LimitExceeded" and "left of the 1000000 that it gives this site" in place["message"]
    report = page.call_in_worker(MODULE, "saveWithoutRoom", 2)
    assert report["estimated"]["name"] == "LimitExceeded"
    assert "left of the 1000000 that it gives this site: export and delete older runs" in report["estimated"]["message"]
    for what in ("filler", "full"):
        assert report[what]["name"] == "LimitExceeded", report[what]
        assert "filler: the browser gives this site no more room" in report[what]["message"]
    assert report["inside"]["name"] == "LimitExceeded", report["inside"]
    assert "step-00000002: could not be saved: " in report["inside"]["message"]
    assert "earlier checkpoints are untouched" in report["inside"]["message"]
    assert (report["folders"], report["files"]) == (["step-00000001"], [])
    page.do(lambda it: it.reload())
    assert page.call_in_worker(MODULE, "readNewest")["step"] == 1


def test_a_run_is_carried_to_the_desktop_and_back(page, tmp_path: Path):
    page.call_in_worker(MODULE, "saveSteps", [1, 2])
    packed = page.call_in_worker(MODULE, "packNewest")
    assert (packed["name"], packed["complete"]) == ("run-a-step-00000002.hybrid", True)
    file = tmp_path / packed["name"]
    file.write_bytes(base64.b64decode(packed["base64"]))
    loaded = load(finding.resolve(file).path)
    assert loaded.manifest.lineage.runtime == "browser"
    assert loaded.manifest.progress.step == 2

    archive.unpack(file, tmp_path / "step-00000002")
    again = tmp_path / "again.hybrid"
    archive.pack(tmp_path / "step-00000002", again)
    text = base64.b64encode(again.read_bytes()).decode()
    assert page.call_in_worker(MODULE, "unpack", text, "run-c") == loaded.manifest.checkpoint_hash
    assert page.call_in_worker(MODULE, "readNewest", "run-c")["same"]


def test_a_second_page_is_told_that_the_run_is_taken(chromium: Chromium, page: BrowserPage, server: StaticServer):
    page.call(MODULE, "hold", "run-a")

    def in_second_page(it):
        second = it.context.new_page()
        second.goto(server.url)
        try:
            script = "async ([module, run]) => (await import(module)).tryLock(run)"
            return [second.evaluate(script, [MODULE, run]) for run in ("run-a", "run-b")]
        finally:
            second.close()

    taken, free = page.do(in_second_page)
    assert taken["name"] == "ConfigError"
    assert taken["message"].startswith("run 'run-a': another tab is training it")
    assert free is None
    assert page.call_in_worker(MODULE, "tryLock", "run-a")["name"] == "ConfigError"
    page.call(MODULE, "release")
    assert page.do(in_second_page) == [None, None]


@pytest.mark.parametrize("place", ["call", "call_in_worker"])
def test_the_place_of_a_run_in_storage_is_open_once(page, place):
    report = getattr(page, place)(MODULE, "placesOfOneRun", "run-a")
    for key in ("second", "app"):
        assert report[key]["name"] == "ConfigError" and "another tab is training it" in report[key]["message"]
    assert "run.json: expected an object with format" in report["unreadable"]["message"]
    assert report["free"] is None, "closed, and refused before it was open"


def test_a_file_has_one_writer_and_persistence_is_asked_for(page):
    busy = page.call_in_worker(MODULE, "busyFile")
    assert busy["message"] == "opfs/busy/a: in use by another tab or worker"
    assert page.call(MODULE, "persistence") == "boolean"
