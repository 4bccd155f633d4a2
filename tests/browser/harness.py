"""A real browser for tests: files served on loopback, Chromium without a window, JavaScript functions called from
Python.

    with StaticServer({"/runtime/": resource("web/runtime")}) as server, Chromium() as chromium:
        page = chromium.open(server)
        report = page.call("/runtime/some_module.js", "someFunction", 1, "two")      # on the page
        report = page.call_in_worker("/runtime/some_module.js", "someFunction", 1)   # in a module worker

The function is an export of the module and may be async; arguments and result are JSON.
"""

from __future__ import annotations

import glob
import mimetypes
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from hybrid.resources import resource

T = TypeVar("T")

# WebGPU on Chromium's own software driver, without the network traffic of a browser at home.
FLAGS = (
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan",
    "--ignore-gpu-blocklist",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLAYWRIGHT_BUILDS = "~/.cache/ms-playwright/chromium-*/chrome-linux*/chrome"

MIME_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".wgsl": "text/plain"}
# Cross-origin isolation: precise clocks and shared memory.
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Accept-Ranges": "bytes",
}

PAGE = b"<!doctype html><meta charset=utf-8><title>test</title><link rel=icon href=data:,>"
WORKER = b"""
onmessage = async ({ data: { module, name, parameters } }) => {
  try {
    const exports = await import(module);
    postMessage({ value: await exports[name](...parameters) });
  } catch (error) {
    postMessage({ error: `${error?.name}: ${error?.message}\\n${error?.stack}` });
  }
};
"""
CALL = """async ([module, name, parameters]) => (await import(module))[name](...parameters)"""
CALL_IN_WORKER = """([module, name, parameters]) => new Promise((resolve, reject) => {
  const worker = new Worker("/harness/worker.js", { type: "module" });
  const finish = (settle, value) => { worker.terminate(); settle(value); };
  worker.onmessage = ({ data }) =>
    data.error === undefined ? finish(resolve, data.value) : finish(reject, new Error(data.error));
  worker.onerror = (event) => finish(reject, new Error(event.message || "the worker could not start"));
  worker.postMessage({ module, name, parameters });
})"""


def find_chromium() -> str | None:
    """The browser to drive: HYBRID_CHROMIUM, the first Chromium on the path, or one that Playwright has fetched."""
    named = os.environ.get("HYBRID_CHROMIUM")
    if named:
        return named if Path(named).is_file() else None
    on_path = (shutil.which(name) for name in NAMES)
    fetched = sorted(glob.glob(str(Path(PLAYWRIGHT_BUILDS).expanduser())))  # noqa: PTH207 - a pattern from its root
    return next((path for path in on_path if path), fetched[-1] if fetched else None)


def why_no_browser() -> str | None:
    """Why no browser can be driven here, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the Python package playwright is not installed"
    return None if find_chromium() else "no Chromium is found: apt install chromium, or set HYBRID_CHROMIUM to its path"


class StaticServer:
    """Serves folders and single answers on a free loopback port: prefix -> folder, path -> bytes.

    Answers carry the right MIME type and the headers of cross-origin isolation, and honour one byte range.
    """

    def __init__(self, folders: Mapping[str, Path], answers: Mapping[str, bytes] | None = None) -> None:
        self.folders = {prefix: folder.resolve() for prefix, folder in folders.items()}
        self.answers = {"/": PAGE, "/harness/worker.js": WORKER, **(answers or {})}
        self.requests: list[str] = []  # method, path and range of every request, for tests of what is fetched
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> StaticServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def find(self, path: str) -> tuple[bytes, str] | None:
        """(content, MIME type) of a path; None for what is not there and for what lies outside the folders."""
        if path in self.answers:
            suffix = Path(path).suffix
            return self.answers[path], MIME_TYPES.get(suffix, "text/html" if not suffix else "application/octet-stream")
        for prefix, folder in self.folders.items():
            if path.startswith(prefix):
                file = (folder / path.removeprefix(prefix)).resolve()
                if file.is_relative_to(folder) and file.is_file():
                    kind = MIME_TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0]
                    return file.read_bytes(), kind or "application/octet-stream"
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                wanted = self.headers.get("Range")
                server.requests.append(f"GET {path}" + (f" {wanted}" if wanted else ""))
                found = server.find(path)
                if found is None:
                    self._answer(HTTPStatus.NOT_FOUND, b"not found", "text/plain")
                    return
                content, kind = found
                span = _range(wanted, len(content))
                if span is None:
                    self._answer(HTTPStatus.OK, content, kind)
                else:
                    begin, end = span
                    extra = {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
                    self._answer(HTTPStatus.PARTIAL_CONTENT, content[begin:end], kind, extra)

            def _answer(
                self, status: HTTPStatus, content: bytes, kind: str, extra: dict[str, str] | None = None
            ) -> None:
                self.send_response(status)
                for name, value in {**HEADERS, **(extra or {})}.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests say themselves what went wrong."""

        return Handler


def _range(header: str | None, size: int) -> tuple[int, int] | None:
    """Begin and end of `bytes=first-last`; None for no range, and for one that cannot be served."""
    if not header or not header.startswith("bytes=") or "," in header:
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    begin = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    return (begin, end) if begin < end else None


class BrowserPage:
    """One page of the browser. `messages` collects what it wrote to its console and the errors nobody caught."""

    def __init__(self, chromium: Chromium, address: str, new_context: Callable[[], Any] | None = None) -> None:
        self.messages: list[str] = []
        self._chromium = chromium

        def open_page() -> Any:
            page = (new_context or chromium.browser.new_context)().new_page()
            page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: self.messages.append(f"uncaught: {error}"))
            page.goto(address)
            return page

        self._page = chromium.run(open_page)

    def do(self, action: Callable[[Any], T]) -> T:
        """Anything else Playwright can do: `action` gets the `playwright.sync_api.Page`, on Playwright's thread."""
        return self._chromium.run(lambda: action(self._page))

    def violations(self) -> list[str]:
        """What axe finds wrong with the page as it is shown."""
        axe = resource("web/node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")

        def look(page: Any) -> list[str]:
            page.evaluate(axe)
            found = page.evaluate("axe.run().then((result) => result.violations)")
            return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found]

        return list(self.do(look))

    def call(self, module: str, name: str, *parameters: Any) -> Any:
        """Call an export of a module on the page. An error there is raised here, with what the console says."""
        return self._evaluate(CALL, module, name, parameters)

    def call_in_worker(self, module: str, name: str, *parameters: Any) -> Any:
        """The same in a module worker of its own, which ends with the call."""
        return self._evaluate(CALL_IN_WORKER, module, name, parameters)

    def _evaluate(self, script: str, module: str, name: str, parameters: tuple[Any, ...]) -> Any:
        from playwright.sync_api import Error

        try:
            return self.do(lambda page: page.evaluate(script, [module, name, list(parameters)]))
        except Error as error:
            console = "\n".join(self.messages[-20:]) or "nothing"
            raise AssertionError(f"{module} {name}: {error.message}\nthe console says: {console}") from error

    def close(self) -> None:
        self.do(lambda page: page.context.close())


class Chromium:
    """Chromium without a window, with WebGPU on SwiftShader. One process; `open` makes pages that share nothing.

    Playwright keeps an event loop running on its thread, where no other may run: it gets a thread of its own.
    """

    def __init__(self, *flags: str) -> None:
        self._thread = ThreadPoolExecutor(1, "playwright")
        try:
            self.run(lambda: self._launch(flags))
        except BaseException:
            self._thread.shutdown()
            raise

    def _launch(self, flags: tuple[str, ...]) -> None:
        from playwright.sync_api import sync_playwright

        self.driver = sync_playwright().start()
        try:
            self.browser = self.driver.chromium.launch(
                executable_path=find_chromium(), headless=True, args=[*FLAGS, *flags]
            )
        except BaseException:
            self.driver.stop()
            raise

    def run(self, action: Callable[[], T]) -> T:
        """Do something on Playwright's thread."""
        return self._thread.submit(action).result()

    def open(self, server: StaticServer, path: str = "/") -> BrowserPage:
        """A page in a context of its own (no shared storage), once it has loaded `path`."""
        return BrowserPage(self, server.url + path)

    def open_with_profile(self, server: StaticServer, profile: Path, *flags: str) -> BrowserPage:
        """A page of another browser, whose storage lies in the folder `profile`. Contexts without one have their
        storage in memory, where no quota holds.
        """

        def new_context() -> Any:
            return self.driver.chromium.launch_persistent_context(
                profile, executable_path=find_chromium(), headless=True, args=[*FLAGS, *flags]
            )

        return BrowserPage(self, server.url, new_context)

    def close(self) -> None:
        def stop() -> None:
            self.browser.close()
            self.driver.stop()

        self.run(stop)
        self._thread.shutdown()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
