"""The page where anybody trains, in a real Chromium, by clicking: from a plain file server, in a sub-folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import site_fixtures
from browser.app_page import PATH, App
from browser.harness import Chromium, StaticServer
from hybrid.bridge.stories import stories
from hybrid.cli.main import main
from hybrid.errors import HybridError
from hybrid.resources import resource

pytestmark = pytest.mark.browser

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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_model_is_trained_by_clicking_and_axe_finds_nothing(
    chromium: Chromium, site: StaticServer, scheme: str
) -> None:
    with App(chromium, site, color_scheme=scheme, viewport=PHONE, reduced_motion="reduce") as app:
        app.ready()
        assert app.text(".size:first-child .count") == "21,600 parameters"
        assert "on the device, in buffers of at most" in app.text("#fit")
        assert app.violations() == []
        assert app.overflow() == 0
        app.begin(60)
        first = app.wait("#sample")
        assert app.violations() == []
        assert app.finish() == "Finished at step 60."
        assert app.do(lambda page: page.locator("#server:visible, #machine:visible").count()) == 0, "there is none"
        assert app.text("#step") == "60 of 60"
        assert float(app.text("#loss")) < 5, "it has learned something"
        label = app.do(lambda page: page.locator("#loss-chart").get_attribute("aria-label"))
        assert label.startswith(f"training loss {app.text('#loss')} at step 60, 5.")
        assert "validation loss" in label
        assert app.text("#sample") != first
        assert app.violations() == []
        assert app.overflow() == 0
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


COUNT_LOCKS = """
const locks = (globalThis.locks = []);
const request = async (kind) => {
  locks.push(kind);
  const lock = new EventTarget();
  lock.release = async () => {
    locks.push("released");
    lock.dispatchEvent(new Event("release"));
  };
  return lock;
};
Object.defineProperty(navigator, "wakeLock", { value: { request } });
"""


def test_the_screen_stays_on_while_it_trains_and_may_sleep_while_it_is_paused(
    chromium: Chromium, site: StaticServer
) -> None:
    with App(chromium, site, COUNT_LOCKS) as app:
        app.begin(100_000)
        app.wait("#pause:enabled")
        assert _locks(app) == ["screen"]
        app.press("Pause")
        assert _locks(app) == ["screen", "released"]
        app.press("Resume")
        assert _locks(app) == ["screen", "released", "screen"]
        app.press("Save and stop")
        app.finish()
        assert _locks(app) == ["screen", "released", "screen", "released"]


def _locks(app: App) -> list[str]:
    return list(app.do(lambda page: page.evaluate("locks")))


def test_the_page_can_be_used_before_it_loads_anything_of_a_run(chromium: Chromium, site: StaticServer) -> None:
    loaded = """() => {
      const [usable] = performance.getEntriesByName("interactive");
      const before = performance.getEntriesByType("resource").filter((one) => one.startTime < usable.startTime);
      return before.map(({ name }) => name.split("/").at(-1));
    }"""
    with App(chromium, site) as app:
        app.ready()
        names = app.do(lambda page: page.evaluate(loaded))
        assert {"app.js", "app.css", "site.json"} <= set(names)
        others = [
            name
            for name in names
            if not re.fullmatch(r"(app|app_worker|chunk-\w+)\.(js|css)|site\.json|icon\.svg", name)
        ]
        assert others == []


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


def test_what_goes_wrong_is_said_in_a_sentence(chromium: Chromium, site: StaticServer, tmp_path: Path) -> None:
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
        app.do(lambda page: page.context.set_offline(True))
        app.press("Train longer")
        assert "cannot be reached: see that the connection is there" in app.wait("#alert-text")
        app.press("Dismiss")
        app.press("New run")
        text = tmp_path / "text.txt"
        text.write_bytes(b"soon gone " * 100)
        app.do(lambda page: page.locator("#files").set_input_files(str(text)))
        text.unlink()
        app.press("Train")
        assert "cannot be read any more" in app.wait("#alert-text")


def test_records_that_were_cut_lose_no_run(chromium: Chromium, site: StaticServer) -> None:
    """A browser that is ended by force leaves half of what it was writing."""
    cut = """async (file) => {
      const runs = await (await navigator.storage.getDirectory()).getDirectoryHandle("runs");
      for await (const folder of runs.values()) {
        const stream = await (await folder.getFileHandle(file)).createWritable({ keepExistingData: true });
        await stream.truncate(20);
        await stream.close();
      }
    }"""
    with App(chromium, site) as app:
        app.ready()
        app.drop(f"{'long' * 60}.txt", stories(20, seed=5).encode())
        app.begin(4)
        assert app.finish() == "Finished at step 4."
        app.do(lambda page: (page.evaluate(cut, "run.json"), page.reload()))
        assert "step 4 of 4, finished" in app.wait("#run-list .what")
        app.do(lambda page: page.get_by_role("button", name="Look at micro-long").click())
        assert app.wait("#status:text-matches('Finished')") == "Finished at step 4."
        app.do(lambda page: (page.evaluate(cut, "job.json"), page.reload()))
        assert "download it, and drop the file here" in app.wait("#run-list .what")
        assert app.do(lambda page: page.locator("#run-list button").all_inner_texts()) == ["Download", "Delete"]
        app.do(lambda page: (page.once("dialog", lambda dialog: dialog.accept()), page.get_by_text("Delete").click()))
        app.do(lambda page: page.locator("#runs").wait_for(state="hidden"))


def test_a_worker_that_cannot_work_is_said_again_at_each_try(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site, in_worker="throw new Error('not here');") as app:
        assert app.wait("#alert-text").endswith("not here. Load the page again.")
        app.press("Dismiss")
        app.begin(10)
        assert app.wait("#alert-text").endswith("not here. Load the page again.")
        assert app.do(lambda page: page.locator("#setup").is_visible())


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
