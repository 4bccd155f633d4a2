"""The browser that shows the page: the user's own, or Chromium without a window, which ends with this process."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hybrid.bridge.launch.devtools import PageWatch
from hybrid.bridge.server.temporary import TemporaryFolder
from hybrid.errors import ConfigError, HybridError

NAMES = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge",
)  # fmt: skip
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
    "C:/Program Files (x86)/Microsoft/Edge/Application/msedge.exe",
)
FLAGS = (
    "--headless",
    "--enable-unsafe-webgpu",
    "--enable-features=Vulkan",
    "--ignore-gpu-blocklist",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows",
    "--password-store=basic",
    "--use-mock-keychain",
)
SOFTWARE = "--use-webgpu-adapter=swiftshader"
GPU_DEVICES = ("/dev/dri/renderD*", "/dev/nvidia0", "/dev/dxg")
END_SECONDS = 5.0
LOG_CHARACTERS = 600


class Browser(Protocol):
    """Something that shows the page. is_ours: whether we started it, and know whether it runs."""

    is_ours: bool

    def problem(self) -> str | None:
        """Why it can no longer show the page; None while all is well, or nobody knows."""
        ...

    def says(self) -> str:
        """What it wrote last, as the end of a sentence; empty if nothing."""
        ...

    def close(self) -> None: ...


class UserBrowser:
    """The default browser of the desktop. It goes on when the run has ended."""

    is_ours = False

    def __init__(self, url: str, note: Callable[[str], None]) -> None:
        opened = False
        if has_desktop():
            with contextlib.suppress(webbrowser.Error, OSError):
                opened = webbrowser.open(url)
        note(f"training in the browser: {url}" if opened else f"open this address in a browser with WebGPU: {url}")

    def problem(self) -> str | None:
        return None

    def says(self) -> str:
        return ""

    def close(self) -> None:
        return None


class HeadlessChromium:
    """Chromium without a window, with a profile of its own that is removed with it.

    It leads a session of its own, so that Ctrl+C in the terminal reaches this process only. It ends when its debugging
    pipe does: however this process dies, nothing is left running. Errors: ConfigError when there is no Chromium.
    """

    is_ours = True

    def __init__(self, url: str) -> None:
        program = find_chromium()
        self._temporary = TemporaryFolder("hybrid-chromium-", _short_folder())
        self._profile = self._temporary.path
        self._log = self._profile / "stderr.txt"
        arguments = [program, *flags(), f"--user-data-dir={self._profile}"]
        start = _Spawned if hasattr(os, "posix_spawn") else _Opened
        try:
            environment = {**os.environ, "TMPDIR": str(self._profile)}
            self._process: _Process = start(arguments, url, environment, self._log)
        except OSError as error:
            self._temporary.close()
            raise HybridError(f"{program}: cannot be started: {error.strerror or error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def problem(self) -> str | None:
        code = self._process.poll()
        return self._process.page_problem if code is None else f"the browser has ended (code {code})"

    def says(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            # Without a desktop it complains about its message bus, which does not matter.
            said = " ".join(line for line in lines if "dbus" not in line).strip()
            return f"; it says: {said[-LOG_CHARACTERS:]}" if said else ""
        return ""

    def close(self) -> None:
        self._process.end()
        deadline = time.monotonic() + END_SECONDS
        while self._profile.exists() and time.monotonic() < deadline:
            self._temporary.close()  # its last process may still write
            time.sleep(0.05)


def has_desktop() -> bool:
    """Whether a window can be opened here. In a plain terminal, `webbrowser` would start one that shows text, which has
    no WebGPU, and wait for its end."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def find_chromium() -> str:
    """The program: HYBRID_CHROMIUM, else the first Chromium, Chrome or Edge of the path. ConfigError if there is
    none."""
    named = os.environ.get("HYBRID_CHROMIUM")
    if named:
        if Path(named).is_file():
            return named
        raise ConfigError(f"HYBRID_CHROMIUM is {named!r}: there is no such file")
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    for place in PLACES:
        if Path(place).is_file():
            return place
    raise ConfigError(
        "--headless needs Chromium, and there is none on PATH: install it (Debian: apt install chromium), or set "
        "HYBRID_CHROMIUM to its path"
    )


def flags() -> list[str]:
    """Chromium's options on this machine; HYBRID_CHROMIUM_FLAGS adds to them."""
    chosen = list(FLAGS)
    if sys.platform == "linux":
        if not any(glob.glob(device) for device in GPU_DEVICES):  # noqa: PTH207 - patterns from the root
            chosen.append(SOFTWARE)
        if os.geteuid() == 0:
            chosen.append("--no-sandbox")  # Chromium refuses to have one as root
    return [*chosen, *shlex.split(os.environ.get("HYBRID_CHROMIUM_FLAGS", ""))]


def _short_folder() -> str | None:
    """For temporary files, None for the usual one: Chromium puts sockets there, and a socket's path has at most 107
    bytes."""
    return None if os.name == "nt" or len(tempfile.gettempdir()) <= 40 else "/tmp"


class _Process(Protocol):
    pid: int

    @property
    def page_problem(self) -> str | None: ...

    def poll(self) -> int | None: ...

    def end(self) -> None: ...


class _Spawned:
    """A child whose descriptors 3 and 4 are pipes to us, as `--remote-debugging-pipe` wants them."""

    def __init__(self, arguments: list[str], url: str, environment: dict[str, str], log: Path) -> None:
        command, self._commands = os.pipe()
        self._answers, answer = os.pipe()
        ends = [command, self._commands, self._answers, answer]
        try:
            import fcntl

            # Away from the numbers 3 and 4, so that neither copy below overwrites the other's source.
            high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command, answer)]
            ends += high
            flags = os.O_WRONLY | os.O_CREAT
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, high[0], 3),
                (os.POSIX_SPAWN_DUP2, high[1], 4),
            ]
            words = [*arguments, "--remote-debugging-pipe", url]
            self.pid = os.posix_spawn(
                words[0], words, environment, file_actions=actions, setsid=True,
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
            )  # fmt: skip
        except BaseException:
            for end in ends:
                os.close(end)
            raise
        for end in (command, answer, *high):
            os.close(end)
        self._code: int | None = None
        self._watch = PageWatch(self._commands, self._answers, url)

    @property
    def page_problem(self) -> str | None:
        return self._watch.problem

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def end(self) -> None:
        os.close(self._commands)
        deadline = time.monotonic() + END_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also those of its children that outlive it
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        self._watch.join(END_SECONDS)
        os.close(self._answers)


class _Opened:
    """A child where there is no posix_spawn: it ends with `end`, but not if this process is killed."""

    def __init__(self, arguments: list[str], url: str, environment: dict[str, str], log: Path) -> None:
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        with log.open("wb") as stderr:
            self._child = subprocess.Popen(
                [*arguments, url], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                env=environment,
                creationflags=group,
            )  # fmt: skip
        self.pid = self._child.pid
        self.page_problem = None  # nobody tells

    def poll(self) -> int | None:
        return self._child.poll()

    def end(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
