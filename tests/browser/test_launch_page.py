"""The page of a launched run in a real Chromium: what it shows, its buttons, and that it goes on when it is hidden,
loaded again, or loses its device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from browser.harness import BrowserPage, Chromium
from hybrid.bridge.launch import train_in_browser
from hybrid.bridge.launch.tab_errors import NoAdapter, TabFailed
from hybrid.bridge.launch.watch import TabLost
from hybrid.errors import HybridError
from hybrid.resources import resource
from hybrid.training.outcome import Outcome
from hybrid.training.start import Request, Services
from training.micro import Recorder, entries, micro_config, run_file, state_hash, steps_saved

pytestmark = pytest.mark.browser

SETTINGS = ("backend.name=browser", "run.logEvery=2", "sampling.every=10", "evaluation.every=10")
PATIENCE = 60.0  # seconds; a busy machine compiles slowly


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        resource("web/dist/launch.html")
    except HybridError:
        pytest.fail("the page is not built: run `make web`")


@dataclass
class Tab:
    """The tests' browser, as the launcher sees one. show: opens the address."""

    show: Callable[[str], Any]
    is_ours: bool = False
    url: str = ""
    page: Any = None

    def __call__(self, url: str) -> Tab:
        self.url = url
        self.page = self.show(url)
        return self

    def problem(self) -> str | None:
        return None

    def says(self) -> str:
        return ""

    def close(self) -> None:
        """Stays open, to be looked at."""


@dataclass
class Launched:
    """A run in a tab, and what it has told so far."""

    tab: Tab
    outcome: Future[Outcome]
    view: Recorder = field(default_factory=Recorder)

    def until(self, kind: str, holds: Callable[[dict[str, Any]], bool] = lambda facts: True) -> None:
        """Wait for an event of this kind for which something holds."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if any(holds(facts) for facts in self.view.of(kind)):
                return
            if self.outcome.done():
                self.outcome.result()
            time.sleep(0.02)
        raise AssertionError(f"no {kind!r} came; there were {self.view.events[-5:]}")


@contextmanager
def launched(folder: Path, show: Callable[[str], Any], *assignments: str, run: str = "run") -> Iterator[Launched]:
    with ThreadPoolExecutor(1) as pool:
        tab, view = Tab(show), Recorder()
        services = Services(view=view)
        request = Request(micro_config(folder, *SETTINGS, *assignments), folder / run)
        outcome = pool.submit(train_in_browser, request, services, opener=tab)
        try:
            yield Launched(tab, outcome, view)
        finally:
            services.stop.request("the test is over")
            if isinstance(tab.page, BrowserPage):
                outcome.exception(PATIENCE)
                tab.page.close()


def shown(page: BrowserPage, role: str, name: str | None = None) -> str:
    """The text of the one element that has this role (and name) for whoever cannot see the page."""
    return str(page.do(lambda inner: inner.get_by_role(role, name=name).inner_text()))


def number(page: BrowserPage, name: str) -> str:
    """What is written beside a term."""
    return str(page.do(lambda inner: inner.locator(f"dt:text-is('{name}') + dd").inner_text()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, chromium: Chromium) -> Path:
    """A folder whose `run` did twenty steps in a tab, undisturbed; what the page showed was looked at."""
    folder = tmp_path_factory.mktemp("whole")
    with launched(folder, lambda url: BrowserPage(chromium, url), "run.steps=20") as run:
        run.until("run")
        page = run.tab.page
        same = page.do(lambda inner: _second_tab(inner, run.tab.url))
        assert "already open in another tab" in same
        assert run.outcome.result(PATIENCE).status == "finished"
        text = page.do(lambda inner: (inner.get_by_text("finished at step 20").wait_for(), inner.title())[1])
        assert text == "hybrid: done"
        assert shown(page, "status") == f"finished at step 20: {folder / 'run'}"
        assert shown(page, "heading", "micro") == "micro"
        assert number(page, "step") == "20 of 20"
        assert number(page, "saved") == "step 20"
        assert float(number(page, "loss")) == pytest.approx(run.view.of("step")[-1]["loss"], abs=1e-4)
        assert number(page, "validation loss").endswith("at step 20")
        assert float(number(page, "tokens a second").replace(",", "")) > 0
        assert number(page, "time left") == "0 seconds"
        assert page.do(lambda inner: inner.locator("#sample").inner_text()).startswith("the ")
        assert page.do(lambda inner: inner.get_by_role("progressbar").evaluate("bar => bar.value / bar.max")) == 1
        assert all(page.do(lambda inner: [b.is_disabled() for b in inner.get_by_role("button").all()]))
        assert page.messages == [], "nothing was refused, nothing failed"
    return folder


def _second_tab(inner: Any, url: str) -> str:
    other = inner.context.new_page()
    other.goto(url)
    other.locator("#status.error").wait_for()
    text = other.get_by_role("status").inner_text()
    other.close()
    return str(text)


def test_the_page_shows_the_run_and_the_folder_holds_it(whole: Path) -> None:
    assert [row["step"] for row in entries(whole)] == list(range(1, 21))
    assert steps_saved(whole) == [5, 10, 15, 20]


def test_its_buttons_pause_and_stop_and_the_same_command_goes_on(
    whole: Path, tmp_path: Path, chromium: Chromium
) -> None:
    with launched(tmp_path, lambda url: BrowserPage(chromium, url), "run.steps=100000", run="stopped") as run:
        run.until("step")
        page = run.tab.page
        page.do(lambda inner: inner.get_by_role("button", name="Pause").click())
        run.until("note", lambda facts: facts["text"].startswith("paused after step"))
        assert shown(page, "status") == "paused"
        before = len(run.view.of("step"))
        time.sleep(0.5)
        assert len(run.view.of("step")) == before
        page.do(lambda inner: inner.get_by_role("button", name="Go on").click())
        run.until("note", lambda facts: facts["text"].startswith("going on"))
        page.do(lambda inner: inner.get_by_role("button", name="Save and stop").click())
        outcome = run.outcome.result(PATIENCE)
        assert (outcome.status, outcome.exit_code) == ("stopped", 75)
        assert "asked for on the page" in outcome.message
    assert steps_saved(tmp_path, "stopped")[-1] == outcome.step


def test_a_page_that_is_loaded_again_goes_on_from_the_last_checkpoint(
    whole: Path, tmp_path: Path, chromium: Chromium
) -> None:
    with launched(tmp_path, lambda url: BrowserPage(chromium, url), "run.steps=20") as run:
        run.until("checkpoint", lambda facts: facts["step"] >= 5)
        run.tab.page.do(lambda inner: inner.reload())
        assert run.outcome.result(PATIENCE).status == "finished"
    assert run.view.of("run")[-1]["step"] in (5, 10, 15)
    assert state_hash(tmp_path) == state_hash(whole)


LOSE_THE_DEVICE = """
const request = GPUAdapter.prototype.requestDevice;
const tell = globalThis.postMessage;
const devices = [];
GPUAdapter.prototype.requestDevice = async function (...wanted) {
  devices.push(await request.apply(this, wanted));
  return devices.at(-1);
};
globalThis.postMessage = (message) => {
  tell.call(globalThis, message);
  if (devices.length === 1 && message.kind === "step" && message.facts.step === 12) devices[0].destroy();
};
"""
HIDE_THE_ADAPTER = "Object.defineProperty(navigator, 'gpu', { value: { requestAdapter: async () => null } });\n"


def spoiled(chromium: Chromium, code: str) -> Callable[[str], BrowserPage]:
    """Opens a page whose worker begins with some code of ours."""

    def show(url: str) -> BrowserPage:
        page = BrowserPage(chromium, "about:blank")

        def begin(inner: Any) -> None:
            def answer(route: Any) -> None:
                response = route.fetch()
                route.fulfill(response=response, body=code + response.text())

            inner.route("**/worker.js", answer)
            inner.goto(url)
            inner.locator("#status:not(:text-is('starting'))").wait_for()  # routes are answered while we wait

        page.do(begin)
        return page

    return show


def test_a_device_that_is_destroyed_is_replaced_and_the_run_ends_in_the_same_state(
    whole: Path, tmp_path: Path, chromium: Chromium
) -> None:
    with launched(tmp_path, spoiled(chromium, LOSE_THE_DEVICE), "run.steps=20") as run:
        assert run.outcome.result(PATIENCE).status == "finished"
    notes = [facts["text"] for facts in run.view.of("note")]
    assert sum("the device was lost" in note for note in notes) == 1, notes
    assert state_hash(tmp_path) == state_hash(whole)
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, 21))


def test_without_an_adapter_page_and_command_say_what_to_do(tmp_path: Path, chromium: Chromium) -> None:
    with launched(tmp_path, spoiled(chromium, HIDE_THE_ADAPTER)) as run:
        with pytest.raises(NoAdapter, match=r"WebGPU found no graphics adapter.*chrome://gpu"):
            run.outcome.result(PATIENCE)
        page = run.tab.page
        page.do(lambda inner: inner.locator("#status.error").wait_for())
        assert "chrome://gpu" in shown(page, "status")


WRITE_DOWN_THE_ORDER = """
const order = [];
const { fetch: ask, postMessage: tell } = globalThis;
globalThis.fetch = (url, init) => {
  order.push(`ask ${new URL(url).pathname.split("/").slice(2).join("/").replace(/[0-9a-f]{64}/, "HASH")}`);
  return ask.call(globalThis, url, init);
};
globalThis.postMessage = (message) => {
  order.push(`show ${message.facts.stage ?? message.kind}`);
  tell.call(globalThis, message);
  if (message.kind === "step") console.info(JSON.stringify(order.splice(0)));
};
const create = GPUDevice.prototype.createComputePipelineAsync;
GPUDevice.prototype.createComputePipelineAsync = function (wanted) {
  order.push("pipeline");
  return create.call(this, wanted);
};
"""


def test_the_page_shows_how_far_it_is_before_anything_takes_long(tmp_path: Path, chromium: Chromium) -> None:
    with launched(tmp_path, spoiled(chromium, WRITE_DOWN_THE_ORDER), "run.steps=100000", "run.logEvery=1") as run:
        run.until("step", lambda facts: facts["step"] >= 3)
        run.tab.page.do(lambda inner: inner.title())  # what it wrote is heard while something is asked of it
        written = next(message for message in run.tab.page.messages if message.startswith("info: ["))
    order: list[str] = json.loads(written.removeprefix("info: "))
    moments = (
        "ask job.json", "show phase", "ask data/manifest.json", "show opening the device", "show compiling the plan",
        "ask profile", "ask plans/HASH/plan.json", "show compiling kernels", "pipeline", "show run", "show step",
    )  # fmt: skip
    assert [order.index(moment) for moment in moments] == sorted(order.index(moment) for moment in moments), order
    assert "pipeline" not in order[order.index("show run") :], "they are all made before the first step"


@pytest.mark.parametrize("script", ["}{", None, "throw Error('no')"])
def test_a_worker_that_cannot_begin_ends_the_command_at_once(
    tmp_path: Path, chromium: Chromium, script: str | None
) -> None:
    def show(url: str) -> BrowserPage:
        page = BrowserPage(chromium, "about:blank")

        def begin(inner: Any) -> None:
            def answer(route: Any) -> None:
                route.fulfill(status=404 if script is None else 200, content_type="text/javascript", body=script or "")

            inner.route("**/worker.js", answer)
            inner.goto(url)
            inner.locator("#status.error").wait_for()

        page.do(begin)
        return page

    with launched(tmp_path, show) as run:
        with pytest.raises(
            TabFailed, match=r"the worker of this page failed: .*console says more.*`make web`"
        ) as error:
            run.outcome.result(PATIENCE)
        assert str(error.value) in shown(run.tab.page, "status")
    assert run_file(tmp_path)["status"] == "failed"


def test_a_tab_that_is_left_ends_the_command_soon(tmp_path: Path, chromium: Chromium) -> None:
    with launched(tmp_path, lambda url: BrowserPage(chromium, url), "run.steps=100000", "checkpoint.every=1") as run:
        run.until("checkpoint")
        run.tab.page.do(lambda inner: inner.goto("about:blank"))
        with pytest.raises(TabLost, match="the tab was closed; the same command goes on from the checkpoint of step"):
            run.outcome.result(PATIENCE)


class HiddenPage:
    """A page behind another tab. Playwright makes each of its own pages believe that it is looked at; so this one is
    made without it."""

    def __init__(self, chromium: Chromium, url: str) -> None:
        self._chromium = chromium
        self._answers: list[Any] = []
        chromium.run(lambda: self._open(chromium.browser.new_browser_cdp_session(), url))

    def _open(self, session: Any, url: str) -> None:
        self._session = session
        session.on("Target.receivedMessageFromTarget", lambda event: self._answers.append(json.loads(event["message"])))
        self._context = session.send("Target.createBrowserContext")["browserContextId"]
        where = {"browserContextId": self._context}
        target = session.send("Target.createTarget", {"url": url, **where})["targetId"]
        attached = session.send("Target.attachToTarget", {"targetId": target, "flatten": False})
        self._attached = attached["sessionId"]
        front = session.send("Target.createTarget", {"url": "about:blank", **where})["targetId"]
        session.send("Target.activateTarget", {"targetId": front})

    def visibility(self) -> str:
        """`hidden` or `visible`, as the page sees itself."""
        command = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": "document.visibilityState"}}
        facts = {"sessionId": self._attached, "message": json.dumps(command)}
        self._chromium.run(lambda: self._session.send("Target.sendMessageToTarget", facts))
        deadline = time.monotonic() + PATIENCE
        while not self._answers and time.monotonic() < deadline:
            self._chromium.run(lambda: self._session.send("Browser.getVersion"))  # lets events in
        return str(self._answers.pop()["result"]["result"]["value"])

    def close(self) -> None:
        facts = {"browserContextId": self._context}
        self._chromium.run(lambda: self._session.send("Target.disposeBrowserContext", facts))


def test_a_hidden_page_keeps_training(whole: Path, tmp_path: Path, chromium: Chromium) -> None:
    with launched(tmp_path, lambda url: HiddenPage(chromium, url), "run.steps=20") as run:
        run.until("run")
        page = run.tab.page
        assert page.visibility() == "hidden"
        assert run.outcome.result(PATIENCE).status == "finished"
        assert page.visibility() == "hidden"
        page.close()
    assert state_hash(tmp_path) == state_hash(whole)
