"""The page with Python beside it: models of any size, and of one's own making, compiled and trained in the tab."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.served import TOKEN
from browser import site_fixtures
from browser.app_page import PATH, App
from browser.harness import Chromium, StaticServer
from hybrid.bridge.server.serve import Options, serving
from hybrid.cli.main import main
from hybrid.resources import resource

pytestmark = pytest.mark.browser

SHAPE = {"Layers": 1, "Width": 16, "Heads": 2, "Context": 16, "Batch": 2}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, python_bundle: Path) -> Iterator[StaticServer]:
    resource("web/dist/app/index.html")
    folder = tmp_path_factory.mktemp("site") / "page"
    site_fixtures.write(folder, python=python_bundle)
    with StaticServer({PATH: folder}) as server:
        yield server


def _choose(app: App, shape: dict[str, int]) -> None:
    app.do(lambda page: page.get_by_text("Custom", exact=True).click())
    for label, value in shape.items():
        app.do(lambda page, label=label, value=value: page.get_by_label(label, exact=True).fill(str(value)))


def test_a_model_of_any_size_is_compiled_in_the_tab_trained_and_continued_on_the_desktop(
    chromium: Chromium, site: StaticServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with App(chromium, site) as app:
        app.ready()
        assert not _python(app), "nobody has asked for it yet"
        _choose(app, {**SHAPE, "Width": 18})
        assert app.wait("#fit:text-matches('evenly')").endswith("by 2 heads evenly: try 20.")
        _choose(app, SHAPE)
        assert re.search(
            r"^8,240 parameters\. It needs \d+ KB on the device, in buffers of at most \d+ KB \(this",
            app.wait("#fit:text-matches('It needs')"),
        )
        assert _python(app)
        assert app.violations() == []
        app.begin(10)
        assert app.finish() == "Finished at step 10."
        command = app.text("#command")
        run = app.download(tmp_path)
        asked = len(_python(app))
        app.do(lambda page: page.reload())
        app.ready()
        _choose(app, SHAPE)
        app.wait("#fit:text-matches('It needs')")
        assert len(_python(app)) == asked, "the plan was kept: no Python is loaded for it"
    text = next(iter(site.folders.values())) / "text" / "stories.txt"
    (tmp_path / text.name).write_bytes(text.read_bytes())
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[:4] == ["hybrid", "train", "--resume", run.name]
    assert main([*words[1:], "--backend", "reference"]) == 0
    [saved] = (tmp_path / "runs").glob("*/checkpoints/step-00000020")
    config = json.loads((saved / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (1, 16)


def test_a_server_that_has_the_page_compiles_for_it_and_takes_its_runs(chromium: Chromium, tmp_path: Path) -> None:
    options = Options(tmp_path / "runs", tmp_path / "stores", TOKEN, port=0)
    with serving(options) as here, App(chromium, f"http://127.0.0.1:{here.port}", path=f"/?token={TOKEN}") as app:
        app.ready()
        _choose(app, SHAPE)
        assert app.wait("#fit:text-matches('It needs')").startswith("8,240 parameters. It needs ")
        app.begin(100_000)
        app.wait("#pause:enabled")
        assert any(url.endswith("/api/plans") for url in app.requests)
        assert not _python(app)
        assert app.do(lambda page: page.locator("#send").is_disabled())
        app.press("Pause")
        app.saved()
        # A full disk is said; sent again, over a connection that breaks once, it arrives.
        answers = [{"status": 507, "json": {"error": {"name": "HybridError", "message": "the disk has no room"}}}, None]

        def answer(route: Any) -> None:
            if not answers:
                return route.continue_()
            kind = answers.pop(0)
            return route.fulfill(**kind) if kind else route.abort()

        app.do(lambda page: page.route("**/api/uploads/*?offset=*", answer))
        app.press("Send to the server")
        assert app.wait("#alert-text") == "The disk has no room."
        assert app.text("#send-note") == "It was not sent."
        app.press("Dismiss")
        app.press("Resume")
        assert app.do(lambda page: page.locator("#send").is_disabled()), "a run that goes on is another one soon"
        app.press("Save and stop")
        app.finish()
        app.press("Try again")
        assert app.wait("#sent") == "look at custom-stories"
        step = app.saved()
        assert app.text("#send-note").strip() == f"custom-stories is there, at step {step}:"
        assert app.violations() == []
        [saved] = options.runs.glob("custom-stories/checkpoints/*")
        assert saved.name == f"step-{step:08d}"
        app.do(lambda page: page.locator("#sent").click())
        assert f"uploaded as custom-stories-{saved.name}.hybrid" in app.wait("#status:text-matches('uploaded')")
        assert app.text("#step").replace(",", "") == f"{step} of 100000"


def test_whatever_a_script_does_to_python_it_ends_and_the_next_one_runs(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.ready()
        app.do(lambda page: page.get_by_text("Python: change the model itself").click())
        assert _run(app, "for i in range(50_000): print(i)\nprint('x' * 1_000_000)").startswith("Finished")
        lines = app.text("#script-lines").splitlines()
        assert 500 <= len(lines) < 1500 and lines[-2] == "49999" and len(lines[-1]) < 6000
        for source, why in (
            ("import os\nos._exit(3)", "exit(3)"),
            ("class A:\n    def __repr__(self): return repr(self)\nrepr(A())", "nested too deeply"),
        ):
            assert _run(app, source).startswith("Ended")
            said = app.text("#script-error")
            assert why in said and said.endswith("the next one gets another.")
            assert _run(app, "print('alive')").startswith("Finished")
            assert app.text("#script-lines").strip() == "alive"


def _python(app: App) -> list[str]:
    return [url for url in app.requests if "/pyodide/" in url]


MICRO = """
import hybrid_tab as tab
from hybrid.models import decoder
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.compiler import PlanSettings

def feed_forward(ops, p, h, cfg):
    up = ops.linear(h, p.up)
    return ops.linear(ops.add(ops.silu(up), ops.relu2(up)), p.down)

model = ModelConfig(256, 16, 1, 16, 2, 32, activation="silu")
settings = PlanSettings(model, 2, 16, optimizer=OptimizerSettings(type="adamw", lr=1e-2))
plan = await tab.compile(settings, blocks={BLOCKS})
print(any("relu2" in kernel for kernel in plan.plan.kernels))
session = await tab.open(plan, seed=7)
for batch in tab.byte_batches(open("text.txt").read(), batch_size=2, sequence_length=16, steps=3):
    await session.step([batch])
for result in await session.results(wait=True):
    tab.report(step=result.data_step, loss=result.loss)
"""


def _run(app: App, source: str) -> str:
    app.do(lambda page: page.get_by_label("Script").fill(source))
    app.press("Run")
    return app.wait("#script-status:text-matches('^(Finished|Ended)')")


def test_the_panel_trains_a_changed_block_and_says_where_a_script_is_wrong(
    chromium: Chromium, site: StaticServer
) -> None:
    with App(chromium, site, viewport={"width": 360, "height": 740}) as app:
        app.ready()
        app.do(lambda page: page.get_by_text("Python: change the model itself").click())
        assert app.violations() == []
        assert app.overflow() == 0
        plain = _run(app, MICRO.replace("BLOCKS", ""))
        assert re.fullmatch(r"Finished: step 3, loss \d\.\d{3}\.", plain)
        assert app.text("#script-lines").strip() == "False"
        changed = _run(app, MICRO.replace("BLOCKS", '"feed_forward": feed_forward'))
        assert changed.startswith("Finished: step 3")
        assert app.text("#script-lines").strip() == "True", "the plan has the op that the block brings"
        assert changed != plain, "and so it learns otherwise"
        label = app.do(lambda page: page.locator("#script-chart").get_attribute("aria-label"))
        assert "at step 3" in label
        assert app.violations() == []
        assert app.overflow() == 0
        assert _run(app, "x = 1\nx.y").startswith("Ended")
        assert app.text("#script-error").startswith("Line 2 of the script: AttributeError")
        assert _run(app, "def f(:\n    pass").startswith("Ended")
        assert app.text("#script-error").startswith("Line 1 of the script: SyntaxError")
        app.do(lambda page: page.get_by_label("Script").fill("import asyncio\nawait asyncio.sleep(60)"))
        app.press("Run")
        app.wait("#script-status:text-matches('running')")
        app.press("Stop")
        assert app.wait("#script-status:text-matches('^Ended')") == "Ended: no step reported."
        assert app.do(lambda page: page.locator("#script-wrong").is_hidden())
        app.do(lambda page: page.reload())
        app.ready()
        app.do(lambda page: page.get_by_text("Python: change the model itself").click())
        assert app.do(lambda page: page.get_by_label("Script").input_value()).endswith("sleep(60)"), "it is kept"
        app.do(lambda page: page.get_by_label("Script").focus())
        app.do(lambda page: page.keyboard.press("Tab"))
        assert app.do(lambda page: page.evaluate("document.activeElement.id")) == "script-run", "Tab goes on"
        assert app.page.messages == []


def test_every_example_trains(chromium: Chromium, site: StaticServer) -> None:
    with App(chromium, site) as app:
        app.ready()
        app.do(lambda page: page.get_by_text("Python: change the model itself").click())
        app.do(lambda page: page.on("dialog", lambda dialog: dialog.accept()))
        for title in app.do(lambda page: page.locator("#example option").all_inner_texts()):
            app.do(lambda page, title=title: page.get_by_label("Example").select_option(title))
            source = app.do(lambda page: page.get_by_label("Script").input_value())
            assert "STEPS = 60" in source and "tokens=60" in source
            source = source.replace("STEPS = 60", "STEPS = 11").replace("tokens=60", "tokens=3")
            assert _run(app, source).startswith("Finished: step 11"), title


def test_without_python_the_page_works_and_says_how_to_get_it(chromium: Chromium, tmp_path: Path) -> None:
    site_fixtures.write(tmp_path / "page")
    with StaticServer({PATH: tmp_path / "page"}) as server, App(chromium, server) as app:
        app.ready()
        assert app.do(
            lambda page: page.get_by_text("Custom", exact=True).locator("xpath=..").locator("input").is_disabled()
        )
        assert "--python" in app.text(".size:last-child")
        app.do(lambda page: page.get_by_text("Python: change the model itself").click())
        assert "--python" in app.text("#python-about")
        assert app.do(lambda page: page.get_by_role("button", name="Run", exact=True).is_disabled())
