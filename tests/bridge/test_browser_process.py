"""The browser that a launched run opens: found, started, heard, and ended with everything it brought."""

from __future__ import annotations

import json
import os
import sys
import time
import webbrowser
from pathlib import Path

import pytest

from hybrid.bridge.launch import browser
from hybrid.bridge.launch.browser import HeadlessChromium, UserBrowser, find_chromium, flags
from hybrid.bridge.launch.devtools import PageWatch
from hybrid.errors import ConfigError, HybridError

URL = "http://127.0.0.1:1/token/"
needs_posix = pytest.mark.skipif(not hasattr(os, "posix_spawn"), reason="starts its browser with posix_spawn")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that is started in Chromium's place; a test writes what it does."""
    path = tmp_path / "chromium"
    monkeypatch.setenv("HYBRID_CHROMIUM", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return path


def script(path: Path, body: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
    path.chmod(0o755)


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    assert condition()  # type: ignore[operator]


def test_the_named_program_comes_first_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(browser, "PLACES", ())
    with pytest.raises(ConfigError, match="--headless needs Chromium, and there is none on PATH"):
        find_chromium()
    for name in ("google-chrome", "chromium"):
        script(tmp_path / name, "")
        assert find_chromium() == str(tmp_path / name)
    monkeypatch.setenv("HYBRID_CHROMIUM", str(tmp_path / "google-chrome"))
    assert find_chromium() == str(tmp_path / "google-chrome")
    monkeypatch.setenv("HYBRID_CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="there is no such file"):
        find_chromium()


def test_the_software_adapter_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(browser, "GPU_DEVICES", (str(tmp_path / "renderD*"),))
    assert browser.SOFTWARE in flags()
    (tmp_path / "renderD128").write_text("")
    assert browser.SOFTWARE not in flags()
    monkeypatch.setenv("HYBRID_CHROMIUM_FLAGS", "--one '--two=a b'")
    assert flags()[-2:] == ["--one", "--two=a b"]


@needs_posix
def test_it_gets_the_address_a_profile_and_pipes_and_ends_with_them(program: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script(
        program,
        "facts = [*sys.argv[1:], os.environ['TMPDIR'], str(os.getsid(0) == os.getpid())]\n"
        f"open({str(said)!r}, 'w').write('\\n'.join(facts))\n"
        "while os.read(3, 4096): pass\n",
    )
    child = HeadlessChromium(URL)
    wait_for(lambda: said.exists() and said.read_text().endswith(("True", "False")))
    *words, temporary, leads = said.read_text().split("\n")
    assert words[-1] == URL and "--remote-debugging-pipe" in words and "--headless" in words
    assert f"--user-data-dir={temporary}" in words and Path(temporary).is_dir()
    assert leads == "True", "Ctrl+C in the terminal does not reach it"
    assert child.problem() is None
    child.close()
    assert child.problem() == "the browser has ended (code 0)", "the pipe was closed, and it heard that"
    assert not Path(temporary).exists()


CREATED = {"targetInfo": {"targetId": "1", "type": "page", "url": "about:blank"}}
SHOWN = {"targetInfo": {"targetId": "1", "type": "page", "url": URL}}
CRASHED = {"targetId": "1", "status": "killed", "errorCode": 9}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ((("Created", SHOWN), ("Crashed", CRASHED), ("Destroyed", CRASHED)), "the page has crashed (killed, code 9)"),
        ((("Created", CREATED), ("InfoChanged", SHOWN), ("Destroyed", {"targetId": "1"})), "the tab was closed"),
        ((("Created", CREATED), ("Destroyed", {"targetId": "1"}), ("Crashed", {"targetId": "2"})), None),
        ((("Created", {}), ("Created", {"targetInfo": 3}), ("Created", SHOWN), ("Crashed", {})), None),
    ],
)
def test_its_pipe_tells_of_a_page_that_is_gone(events: tuple[tuple[str, object], ...], says: str | None) -> None:
    heard, commands = os.pipe()
    answers, told = os.pipe()
    watch = PageWatch(commands, answers, URL)
    assert os.read(heard, 4096).endswith(b"\0")
    for name, facts in events:
        message = json.dumps({"method": f"Target.target{name}", "params": facts}).encode()
        os.write(told, message[:7])
        os.write(told, message[7:] + b"\0no JSON\0")
    os.close(told)
    watch.join(20)
    assert watch.problem == says
    for end in (heard, commands, answers):
        os.close(end)


@needs_posix
def test_a_browser_whose_page_is_gone_has_a_problem(program: Path) -> None:
    events = "".join(
        json.dumps({"method": f"Target.target{name}", "params": facts}) + "\\0"
        for name, facts in (("Created", SHOWN), ("Crashed", CRASHED))
    )
    script(program, f"os.write(4, {events!r}.encode().replace(b'\\\\0', bytes(1)))\nwhile os.read(3, 4096): pass")
    child = HeadlessChromium(URL)
    wait_for(lambda: child.problem() is not None)
    assert child.problem() == "the page has crashed (killed, code 9)"
    child.close()


@needs_posix
def test_one_that_ends_at_once_says_why(program: Path) -> None:
    script(program, "sys.stderr.write('ERROR:dbus nobody\\ncannot open display\\n')\nsys.exit(7)")
    child = HeadlessChromium(URL)
    wait_for(lambda: child.problem() is not None)
    assert child.problem() == "the browser has ended (code 7)" and child.says() == "; it says: cannot open display"
    child.close()


@needs_posix
def test_one_that_does_not_listen_is_killed(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "END_SECONDS", 0.3)
    script(program, "time.sleep(1000)")
    child = HeadlessChromium(URL)
    child.close()
    assert child.problem() == "the browser has ended (code -9)"


@needs_posix
def test_a_program_that_is_none_is_one_line(program: Path) -> None:
    program.write_text("no program")
    with pytest.raises(HybridError, match=r"chromium: cannot be started: Permission denied"):
        HeadlessChromium(URL)


@pytest.mark.parametrize("opens", [True, False])
def test_the_users_browser_is_asked_and_the_address_is_shown(monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
    asked: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) or opens)
    monkeypatch.setenv("DISPLAY", ":0")
    shown = UserBrowser(URL, notes.append)
    assert asked == [URL] and notes[0].endswith(URL)
    assert notes[0].startswith("training in the browser" if opens else "open this address")
    assert shown.problem() is None and not shown.is_ours
    shown.close()


def test_in_a_plain_terminal_only_the_address_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    asked: list[str] = []
    notes: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) or True)
    UserBrowser(URL, notes.append)
    assert asked == [] and notes == [f"open this address in a browser with WebGPU: {URL}"]
    monkeypatch.setenv("BROWSER", "one-that-i-like")
    UserBrowser(URL, notes.append)
    assert asked == [URL]
