"""The pages of `hybrid serve` in a real browser, under the headers that it sends."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.served import TOKEN, append, row, write_run
from browser.harness import BrowserPage, Chromium
from hybrid.bridge.server.serve import Options, Place, serving
from hybrid.plan.profile import DEFAULT_LIMITS
from training import micro

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("served")
    runs = folder / "runs"
    shape = {"model": {"layers": 2}, "optimizer": {"lr": 0.001}}
    write_run(runs, "first", 40, config=shape, parameters=123_000, backend={"backend": "webgpu"})
    write_run(runs, "second", 30, status="finished", config={**shape, "model": {"layers": 3}})
    (write_run(runs, "third", 5) / "run.json").write_text("{")
    with serving(Options(runs, folder / "stores", TOKEN, port=0)) as here:
        yield here


@pytest.fixture
def runs(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(tmp_path_factory.getbasetemp().glob("served*")) / "runs"


class Tab:
    """A tab that has come by the address with the token. What goes wrong in it is kept."""

    def __init__(self, chromium: Chromium, place: Place, path: str, **options: Any) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.origin = f"http://127.0.0.1:{place.port}"

        def new_context() -> Any:
            context = chromium.browser.new_context(**options)
            context.on("request", lambda request: self.requests.append(request.url))
            context.on(
                "console", lambda message: self.problems.append(message.text) if message.type == "error" else None
            )
            context.on("weberror", lambda error: self.problems.append(str(error.error)))
            return context

        self.page = BrowserPage(chromium, f"{self.origin}{path}?token={TOKEN}", new_context)
        self.do = self.page.do
        self.violations = self.page.violations

    def wait(self, selector: str) -> str:
        return str(self.do(lambda page: (page.locator(selector).wait_for(), page.locator(selector).inner_text())[1]))

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *error: object) -> None:
        self.page.close()
        assert [url for url in self.requests if not url.startswith((self.origin, "blob:", "data:"))] == []
        assert TOKEN not in "".join(self.requests[1:]), "the token is in the first address only"


@pytest.mark.parametrize("look", [{}, {"color_scheme": "dark", "viewport": {"width": 360, "height": 640}}], ids=str)
def test_runs_are_watched_and_compared(chromium: Chromium, place: Place, runs: Path, look: dict[str, Any]) -> None:
    with Tab(chromium, place, "/runs/", **look) as tab:
        assert "40 of 100" in tab.wait("#rows tr:nth-child(1)")
        assert "cannot be read" in tab.wait("#rows tr:nth-child(3)")
        assert tab.do(lambda page: page.url) == f"{tab.origin}/runs/", "the token has left the address"
        assert tab.violations() == []
        tab.do(lambda page: page.locator("#link-first").click())
        tab.wait("#step:text('40 of 100')")
        assert tab.wait("#run-title") == "first" and "running" in tab.wait("#status")
        append(runs / "first", row(41, total_loss=1.25, tokens_per_second=1234))
        tab.wait("#loss:text('1.2500')")
        assert tab.wait("#step") == "41 of 100" and tab.wait("#rate") == "1,234"
        assert tab.do(lambda page: page.locator("#loss-chart canvas").count()) == 1
        assert tab.violations() == []
        tab.do(lambda page: page.get_by_role("link", name="all runs").first.click())
        for name in ("first", "second"):
            tab.do(lambda page, name=name: page.get_by_label(f"compare {name}").check())
        tab.do(lambda page: page.get_by_role("button", name="Compare").click())
        assert "model.layers" in tab.wait("#settings")
        assert tab.wait("#comparison-title") == "first, second"
        tab.do(lambda page: page.locator("#compare-chart canvas").wait_for())
        assert tab.wait("#keys .first") == "first · running · 1.2500"
        assert tab.wait("#keys .second") == "second · finished · 4.9700"
        append(runs / "first", row(42, total_loss=1.125))
        append(runs / "second", row(31, total_loss=2.5))
        tab.wait("#keys .first:text('1.1250')")
        tab.wait("#keys .second:text('2.5000')")
        tab.wait("#compare-chart[aria-label$='first 1.1250, second 2.5000']")
        write_run(runs, "second", status="stopped", config={"model": {"layers": 3}, "optimizer": {"lr": 0.001}})
        tab.wait("#keys .second:text('stopped')")
        assert tab.violations() == []
        assert tab.do(lambda page: page.evaluate("document.documentElement.scrollWidth - innerWidth")) <= 0
        # As it was: the files are shared by the tests of this module.
        for name, count in (("first", 40), ("second", 30)):
            lines = (runs / name / "metrics.jsonl").read_text().splitlines(keepends=True)
            (runs / name / "metrics.jsonl").write_text("".join(lines[:count]))
        write_run(runs, "second", status="finished", config={"model": {"layers": 3}, "optimizer": {"lr": 0.001}})
        assert tab.problems == []
        tab.do(lambda page: page.evaluate("location.hash = 'run/nowhere'"))
        assert "the run nowhere cannot be watched" in tab.wait("#alert-text:text('nowhere')")
        tab.do(lambda page: page.locator("#link-first").wait_for())


def test_two_tabs_and_a_terminal_watch_one_run(chromium: Chromium, place: Place, runs: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "hybrid", "train", str(micro.config_file(tmp_path)), "--backend", "reference",
        "--run-dir", str(runs / "watched"), "--steps", "60", "--set", "evaluation.every=20", "--json",
    ]  # fmt: skip
    write_run(runs, "watched")  # so that the tabs are there from the first step on
    with Tab(chromium, place, "/runs/") as one, Tab(chromium, place, "/runs/") as other:
        for tab in (one, other):
            tab.wait("#link-watched")
            tab.do(lambda page: page.evaluate("location.hash = 'run/watched'"))
            tab.wait("#status:text('running')")
        (runs / "watched" / "run.json").unlink()
        terminal = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        shown = [event for event in map(json.loads, terminal.stdout.splitlines()) if event["event"] == "validation"]
        rows = [json.loads(line) for line in (runs / "watched" / "metrics.jsonl").read_text().splitlines()]
        for tab in (one, other):
            tab.wait("#status:text('finished')")
            tab.wait("#step:text('60 of 60')")
            assert tab.wait("#loss") == f"{rows[-1]['total_loss']:.4f}"
            assert tab.wait("#validation") == f"{shown[-1]['loss']:.4f}"
            assert tab.problems == []
    shutil.rmtree(runs / "watched")


def test_the_training_page_runs_under_the_headers_of_the_server(chromium: Chromium, place: Place) -> None:
    with Tab(chromium, place, "/") as tab:
        assert tab.wait(".size:nth-child(4) .count") == "25 million parameters", "at once: nothing is compiled for it"
        tab.wait("#train:enabled")
        assert tab.wait("#fit").startswith("It needs ")
        for size in ("tiny", "small", "medium", "large"):
            assert re.fullmatch(r"[\d.]+ [MG]B on the device", tab.wait(f"#memory-{size}:text-matches('device')"))
        assert tab.do(lambda page: page.evaluate("crossOriginIsolated")) is True
        assert tab.do(lambda page: page.evaluate("navigator.storage !== undefined")) is True
        assert tab.problems == []
        # What the browser has is not sent again: only asked for.
        script = """async () => {
          const address = new URL("app_worker.js", document.baseURI);
          performance.clearResourceTimings();
          const { status } = await fetch(address).then((answer) => answer.blob().then(() => answer));
          const { transferSize, encodedBodySize } = performance.getEntriesByName(address.href).at(-1);
          return [status, transferSize, encodedBodySize];
        }"""
        status, sent, size = tab.do(lambda page: page.evaluate(script))
        assert status == 200 and 0 < sent < 1000 and size > 100_000
        # WebAssembly may be compiled, text may not be run as a program.
        module = "WebAssembly.compile(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0])).then(() => true)"
        assert tab.do(lambda page: page.evaluate(f"window.wasm = {module}")) is True
        script = """() => new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
          const script = document.createElement("script");
          script.textContent = "window.evil = 1";
          document.head.append(script);
          setTimeout(() => resolve("nothing"), 2000);
        })"""
        assert tab.do(lambda page: page.evaluate(script)) == "script-src-elem"


def test_the_training_page_leads_to_the_runs_of_the_machine(chromium: Chromium, place: Place) -> None:
    with Tab(chromium, place, "/") as tab:
        tab.wait("#machine:visible")
        tab.do(lambda page: page.click("#machine"))
        tab.wait("#table:visible")
        assert tab.problems == []


def test_the_page_has_plans_compiled_here(chromium: Chromium, place: Place) -> None:
    config = {**micro.SETTINGS, "model": {**micro.SETTINGS["model"], "vocabularySize": 256}}
    profile = {"limits": DEFAULT_LIMITS, "features": [], "subgroup_size": 0, "cpu": None}
    script = f"""async () => {{
      const site = await (await fetch("site.json")).json();
      const body = {json.dumps(json.dumps({"config": config, "profile": profile}))};
      const headers = {{ "content-type": "application/json" }};
      const answer = await (await fetch(site.planners.server, {{ method: "POST", headers, body }})).json();
      const plan = await (await fetch(new URL(answer.plan + "plan.json", document.baseURI))).json();
      return plan.format;
    }}"""
    with Tab(chromium, place, "/") as tab:
        assert tab.do(lambda page: page.evaluate(script)) == "hybrid.plan"
