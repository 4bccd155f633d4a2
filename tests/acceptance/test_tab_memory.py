"""A thousand steps in a tab leave its memory as it was: the JavaScript heap, the buffers, and the process of the GPU,
which for a software adapter holds the device's memory too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser.harness import Chromium, StaticServer
from hybrid.resources import resource
from hybrid.training.parity.workload import MODELS, Workload
from parity.browser_runtime import MODULE, RemoteSession, arrays, browser

pytestmark = [pytest.mark.acceptance, pytest.mark.browser]

STEPS, SETTLED, EVERY = 1000, 300, 100
MOST_HEAP_GROWTH = 256 * 1024
MOST_GROWTH = 8 * 1024 * 1024


def gpu_processes() -> Iterator[int]:
    """The GPU processes of this test's browser, which descend from this process."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # it has ended
        if b"--type=gpu-process" in command:
            found.append(int(folder.name))
    for process in found:
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            yield process


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def heap_bytes(page: Any) -> int:
    """The JavaScript heap in use, once its garbage is collected."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = int(session.send("Runtime.getHeapUsage")["usedSize"])
    session.detach()
    return used


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_flat_over_a_thousand_steps_in_a_tab(
    chromium: Chromium, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    web = resource("web")
    heap, gpu, reports = {}, {}, {}
    with StaticServer({"/runtime/": web / "runtime", "/test/": web / "test", "/plans/": tmp_path}) as server:
        page = chromium.open(server)
        narrow = replace(MODELS["llama"], width=32, feed_forward_width=64)
        workload = Workload("llama", narrow, STEPS)
        session: Any = browser(page, tmp_path, "/plans/").make(workload)
        assert isinstance(session, RemoteSession)
        batch = arrays(workload.microbatches(1)[0])
        (process,) = gpu_processes()
        for step in range(EVERY, STEPS + 1, EVERY):
            reports[step] = page.call(MODULE, "run", session.id, step - EVERY + 1, step, batch)
            heap[step], gpu[step] = page.do(heap_bytes), resident_bytes(process)
        page.close()
    later = range(SETTLED, STEPS + 1, EVERY)
    heap_growth = max(heap[step] for step in later) - heap[SETTLED]
    growth = max(gpu[step] for step in later) - gpu[SETTLED]
    record_property("heap_bytes_at_step_300", heap[SETTLED])
    record_property("heap_growth_bytes_to_step_1000", heap_growth)
    record_property("gpu_process_growth_bytes_to_step_1000", growth)
    record_property("device_bytes", reports[SETTLED]["memory"]["total"])
    assert heap_growth <= MOST_HEAP_GROWTH
    assert growth <= MOST_GROWTH
    assert reports[STEPS]["memory"] == reports[SETTLED]["memory"]
    for name in ("buffersCreated", "pipelinesCreated"):
        assert reports[STEPS]["counters"][name] == reports[EVERY]["counters"][name]
    assert reports[STEPS]["loss"] < reports[EVERY]["loss"]
