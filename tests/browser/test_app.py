"""The page where anybody trains, in a real Chromium, by clicking: from a plain file server, in a sub-folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import site_fixtures
from browser.harness import BrowserPage, Chromium, StaticServer
from hybrid.bridge.stories import stories
from hybrid.cli.main import main
from hybrid.errors import HybridError
from hybrid.resources import resource

pytestmark = pytest.mark.browser

PATIENCE = 90_000.0  # milliseconds; a busy machine compiles slowly
PATH = "/some/where/"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticServer]:
    try:
        resource("web/dist/app/index.html")
    except HybridError:
        pytest.fail("the page is not built: run `make web`")
    folder = tmp_path_factory.mktemp("site") / "page"
    site_fixtures.write(folder)
    with StaticServer({PATH: folder}) as server:
        yield server


class App:
    """The page, and what a person does with it."""

    def __init__(
        self, chromium: Chromium, site: StaticServer, script: str = "", in_worker: str = "", **options: Any
    ) -> None:
        """script, in_worker: code of ours with which the page, or its worker, begins."""
        self.requests: list[str] = []

        def new_context() -> Any:
            context = chromium.browser.new_context(**options)
            context.set_default_timeout(PATIENCE)
            context.on("request", lambda request: self.requests.append(request.url))

            def answer(route: Any) -> None:
                response = route.fetch()
                route.fulfill(response=response, body=in_worker + response.text())

            if in_worker:
                context.route("**/app_worker.js", answer)
            if script:
                context.add_init_script(script)
            return context

        self.origin = site.url
        self.page = BrowserPage(chromium, f"{site.url}{PATH}index.html", new_context)
        self.do = self.page.do

    def press(self, name: str) -> None:
        self.do(lambda page: page.get_by_role("button", name=name, exact=True).click())

    def ready(self) -> App:
        self.do(lambda page: page.locator("#train:enabled").wait_for())
        return self

    def begin(self, steps: int) -> App:
        self.ready()
        self.do(lambda page: page.get_by_label("Steps").fill(str(steps)))
        self.press("Train")
        return self

    def wait(self, selector: str) -> str:
        """The text of an element, once it is seen."""
        return str(self.do(lambda page: (page.locator(selector).wait_for(), page.locator(selector).inner_text())[1]))

    def text(self, selector: str) -> str:
        return str(self.do(lambda page: page.locator(selector).inner_text()))

    def saved(self) -> int:
        """The step of the newest save, once there is one."""
        return int(re.sub(r"\D", "", self.wait("#saved:text-matches('step')")))

    def finish(self) -> str:
        self.wait("#new")
        return self.text("#status")

    def drop(self, name: str, content: bytes) -> None:
        script = """([name, bytes]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], name));
          for (const kind of ["dragenter", "dragover", "drop"])
            document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
        }"""
        self.do(lambda page: page.evaluate(script, [name, list(content)]))

    def download(self, folder: Path) -> Path:
        def save(page: Any) -> Path:
            with page.expect_download() as download:
                page.get_by_role("button", name="Download the run").click()
            path = folder / download.value.suggested_filename
            download.value.save_as(path)
            return path

        return Path(self.do(save))

    def violations(self) -> list[str]:
        """What axe finds wrong with the page as it is shown."""
        axe = resource("web/node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")

        def look(page: Any) -> list[str]:
            page.evaluate(axe)
            found = page.evaluate("axe.run().then((result) => result.violations)")
            return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found]

        return list(self.do(look))

    def close(self) -> None:
        foreign = [url for url in self.requests if not url.startswith((self.origin, "blob:", "data:"))]
        self.page.close()
        assert foreign == [], "a request left the origin of the page"

    def __enter__(self) -> App:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_model_is_trained_by_clicking_and_axe_finds_nothing(
    chromium: Chromium, site: StaticServer, scheme: str
) -> None:
    with App(chromium, site, color_scheme=scheme, viewport=PHONE, reduced_motion="reduce") as app:
        app.ready()
        assert app.text(".size .count") == "21,600 parameters"
        assert "on the device, in buffers of at most" in app.text("#fit")
        assert app.violations() == []
        assert _overflow(app) == 0
        app.begin(60)
        first = app.wait("#sample")
        assert app.violations() == []
        assert app.finish() == "Finished at step 60."
        assert app.text("#step") == "60 of 60"
        assert float(app.text("#loss")) < 5, "it has learned something"
        label = app.do(lambda page: page.locator("#loss-chart").get_attribute("aria-label"))
        assert label.startswith(f"training loss {app.text('#loss')} at step 60, 5.")
        assert "validation loss" in label
        assert app.text("#sample") != first
        assert app.violations() == []
        assert _overflow(app) == 0
        app.do(lambda page: page.reload())
        app.press("Look at micro-stories")
        assert app.wait("#status:text-matches('Finished')").startswith("Finished at step 60")
        assert "data.source=stories.txt --steps 120" in app.text("#command")
        app.press("Train longer")
        app.wait("#pause:enabled")
        assert app.text("#step").endswith(" of 120")
        app.press("Save and stop")
        app.finish()
        assert app.page.messages == []


def _overflow(app: App) -> int:
    """Pixels by which the page is wider than the screen."""
    return int(app.do(lambda page: page.evaluate("document.documentElement.scrollWidth - innerWidth")))


def test_the_keyboard_is_enough(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.ready()

        def go(page: Any) -> list[str]:
            reached = []
            for _ in range(20):
                page.keyboard.press("Tab")
                reached.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
                if reached[-1] == "train":
                    page.keyboard.press("Enter")
                    break
            return reached

        assert app.do(go) == ["size", "text", "files", "steps", "precision", "train"]
        assert app.do(lambda page: page.evaluate("document.activeElement.id")) == "run-title"
        app.wait("#pause:enabled")
        app.do(lambda page: [page.keyboard.press(key) for key in ("Tab", "Tab", "Tab", "Enter")])
        assert app.finish().startswith(("Saved at step", "Finished"))
        assert app.do(lambda page: page.get_by_role("status").all_inner_texts())[-1] == app.text("#status")


def test_a_stop_before_the_first_step_leads_back_and_leaves_nothing(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.begin(60)
        app.press("Save and stop")
        app.wait("#setup")
        assert app.do(lambda page: page.locator("#alert").is_hidden())
        assert app.do(lambda page: page.locator("#run-list li").count()) == 0
        app.begin(10)
        assert app.finish() == "Finished at step 10."


def test_a_run_pauses_saves_and_goes_on_after_a_reload(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.begin(100_000)
        app.wait("#rate:text-matches('[0-9]')")
        app.press("Pause")
        step = app.saved()
        assert app.text("#status") == "paused"
        app.do(lambda page: page.wait_for_timeout(300))
        assert int(app.text("#step").split(" of ")[0].replace(",", "")) <= step
        app.do(lambda page: page.reload())
        assert re.search(r"step [\d,]+ of 100,000, just now", app.wait("#run-list .what"))
        app.press("Go on with micro-stories")
        app.wait("#pause:enabled")
        assert int(app.text("#step").split(" of ")[0].replace(",", "")) >= step
        app.press("Save")
        app.saved()
        app.press("Save and stop")
        assert app.finish().endswith("You can close this tab.")
        app.press("Go on")
        app.wait("#pause:enabled")
        app.press("Save and stop")
        app.finish()


def test_a_second_tab_is_told_that_the_run_is_open(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.begin(100_000)
        app.saved()

        def second(page: Any) -> str:
            other = page.context.new_page()
            other.goto(page.url)
            text = other.locator("#run-list .what").inner_text()
            assert other.locator("#run-list button").count() == 0
            other.close()
            return str(text)

        assert "open in another tab" in app.do(second)
        app.press("Save and stop")
        app.finish()


def test_a_run_is_carried_to_another_browser_and_to_the_desktop(
    chromium: Chromium, site: StaticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = stories(300, seed=5).encode()
    with App(chromium, site) as app:
        app.ready()
        app.drop("my tales.txt", text)
        assert "my tales.txt" in app.text("#files-text")
        app.begin(40)
        app.finish()
        command = app.text("#command")
        run = app.download(tmp_path)
    with App(chromium, site) as other:
        other.ready()
        other.drop(run.name, run.read_bytes())
        asked = other.wait("#wanted-text")
        assert "my tales.txt" in asked and "step 40" in asked
        other.do(
            lambda page: page.locator("#wanted-file").set_input_files(
                [{"name": "my tales.txt", "mimeType": "text/plain", "buffer": text}]
            )
        )
        other.wait("#pause:enabled")
        assert int(other.text("#step").split(" of ")[0]) >= 40
        other.press("Save and stop")
        other.finish()
    (tmp_path / "my tales.txt").write_bytes(text)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[:4] == ["hybrid", "train", "--resume", run.name]
    assert main([*words[1:], "--backend", "reference"]) == 0
    assert list((tmp_path / "runs").glob("*/checkpoints/step-00000080"))


def test_a_run_on_the_text_of_the_page_needs_nothing_else(
    chromium: Chromium, site: StaticServer, tmp_path: Path
) -> None:
    with App(chromium, site) as app:
        app.begin(100_000)
        app.saved()
        run = app.download(tmp_path)
        app.press("Save and stop")
        app.finish()
    with App(chromium, site) as other:
        other.ready()
        other.drop(run.name, run.read_bytes())
        other.wait("#pause:enabled")
        other.press("Save and stop")
        other.finish()


def test_what_goes_wrong_is_said_in_a_sentence(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.ready()
        app.drop("broken.hybrid", b"this is no archive at all, and never was one")
        assert re.search(r"broken\.hybrid.*\.$", app.wait("#alert-text"))
        app.press("Dismiss")
        app.drop("latin.txt", "caf\xe9 ".encode("latin-1") * 100)
        app.press("Train")
        assert "not UTF-8 at offset 3" in app.wait("#alert-text")
        app.drop("short.txt", b"a")
        app.press("Train")
        assert "nothing to predict; add text" in app.wait("#alert-text:text-matches('predict')")
        app.do(lambda page: page.get_by_text("Small stories").click())
        app.begin(10)
        assert app.finish() == "Finished at step 10."


def test_without_an_adapter_the_page_says_what_to_do(chromium: Chromium, site: StaticServer) -> None:
    hide = "Object.defineProperty(navigator, 'gpu', { value: { requestAdapter: async () => null } });"
    with App(chromium, site, hide) as app:
        assert "chrome://gpu" in app.wait("#alert-text")
        assert app.do(lambda page: page.locator("#train").is_disabled())
        assert app.violations() == []


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
  if (devices.length === 1 && message.kind === "step" && message.facts.step === 30) devices[0].destroy();
};
"""


def test_a_lost_device_is_replaced_and_the_run_finishes(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site, in_worker=LOSE_THE_DEVICE) as app:
        app.begin(60)
        assert app.finish() == "Finished at step 60."
        app.do(lambda page: page.get_by_text("Notes").click())
        assert "the device was lost" in app.text("#notes")


def test_a_full_disk_is_said_with_what_to_do(chromium: Chromium, site: StaticServer) -> None:
    full = "navigator.storage.estimate = async () => ({ quota: 1000, usage: 900 });"
    with App(chromium, site, in_worker=full) as app:
        app.begin(60)
        said = app.wait("#alert-text")
        assert "this browser has 100 left" in said and "delete older runs" in said
        assert app.do(lambda page: page.locator("#train").is_enabled())
