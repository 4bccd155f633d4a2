"""Python in a real tab, from the built bundle. The page's policy allows WebAssembly and its own origin, no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import harness
from browser.harness import BrowserPage, Chromium, StaticServer
from hybrid.resources import resource
from tab_python.cases import cases, expected, facts, request

pytestmark = pytest.mark.browser

MODULE = "/test/support/python_page.js"
POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'"
PAGE = b"<!doctype html><meta charset=utf-8><title>Python in the tab</title><link rel=icon href=/icon.svg>"
ICON = b"<svg xmlns='http://www.w3.org/2000/svg'/>"

TRAIN = """
import hybrid_tab as tab
from hybrid.models.config import ModelConfig
from hybrid.plan.compiler import PlanSettings


def feed_forward(ops, p, h, cfg):
    x = ops.linear(h, p.up)
    return ops.linear(ops.add(ops.silu(x), ops.relu2(x)), p.down)


settings = PlanSettings(ModelConfig(256, 16, 1, 16, 2, 32, activation="silu"), batch_size=2, sequence_length=16)
plan = await tab.compile(settings, blocks={"feed_forward": feed_forward})
print(plan.parameters)
session = await tab.open(plan)
for batch in tab.byte_batches("she sells sea shells. " * 9, batch_size=2, sequence_length=16, steps=2):
    await session.step([batch])
for result in await session.results(wait=True):
    tab.report(step=result.data_step, loss=result.loss)
print(len(await session.generate([32], tokens=3)))
"""


@pytest.fixture
def tab(
    python_bundle: Path, chromium: Chromium, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[BrowserPage, StaticServer, list[str]]]:
    monkeypatch.setitem(harness.HEADERS, "Content-Security-Policy", POLICY)
    web = resource("web")
    folders = {
        "/bundle/": python_bundle,
        "/pyodide/": web / "pyodide",
        "/runtime/": web / "runtime",
        "/test/": web / "test",
    }
    with StaticServer(folders, {"/": PAGE, "/icon.svg": ICON}) as server:
        page = chromium.open(server)
        asked: list[str] = []
        page.do(lambda it: it.context.on("request", lambda request: asked.append(request.url)))
        yield page, server, asked
        page.close()


def test_a_plan_compiled_there_has_the_bytes_of_the_desktops(tab: Any) -> None:
    page, _, _ = tab
    _, settings, profile = next(case for case in cases() if case[0] == "llama in mixed-f16, recomputed")
    found = page.call(MODULE, "compilePlan", request(settings), facts(profile))
    seconds = found.pop("seconds")
    assert found == expected(settings, profile)
    assert 0 < seconds["again"] < seconds["first"]


def test_a_script_trains_a_block_of_its_own_and_asks_nobody_else(tab: Any) -> None:
    page, server, asked = tab
    outcome = page.call(MODULE, "runScript", TRAIN)
    assert outcome["error"] is None
    assert outcome["printed"] == ["10288", "3"]
    assert [row["step"] for row in outcome["reported"]] == [1, 2]
    assert all(3 < row["loss"] < 7 for row in outcome["reported"])
    assert {f"{server.url}/bundle/{name}" for name in ("worker.js", "hybrid.zip", "pyodide.asm.wasm")} <= set(asked)
    assert [url for url in asked if not url.startswith(server.url + "/")] == []
    assert [text for text in page.messages if "Content Security Policy" in text] == []


def test_a_script_is_stopped_whatever_it_does(tab: Any) -> None:
    page, _, _ = tab
    waiting = page.call(MODULE, "runScript", "import asyncio\nawait asyncio.sleep(100)", {"stopAfter": 0.2})
    assert waiting["error"]["name"] == "StopRequested"
    assert waiting["error"]["message"] == "the script was stopped at line 2: enough"
    busy = page.call(MODULE, "runScript", "print('begun')\nwhile True:\n    pass", {"seconds": 0.5})
    assert busy["printed"] == ["begun"]
    assert busy["error"]["name"] == "StopRequested"
    assert not busy["ended"]
    stubborn = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ended = page.call(MODULE, "runScript", stubborn, {"stopAfter": 0.2})
    assert ended["error"]["message"] == "the script was stopped, and Python with it: enough"
    assert ended["ended"]
    assert page.call(MODULE, "runScript", "print('another one')")["printed"] == ["another one"]


def test_what_a_script_does_wrong_is_a_sentence_on_the_page(tab: Any) -> None:
    page, _, _ = tab
    error = page.call(MODULE, "runScript", "x = 1\nx.y")["error"]
    assert error["name"] == "ScriptError"
    assert error["line"] == 2
    assert error["message"].startswith("line 2 of the script: AttributeError: 'int' object has no attribute 'y'")
