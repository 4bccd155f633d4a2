"""From the load of the launched page to the first step, and what the page itself still draws while its worker trains.

The preset stdlib-tiny in Chromium on SwiftShader, each load in a browser profile of its own: nothing is cached, no
kernel variant is known. Times are of the page's own clock, which begins with the navigation; what is shown counts once
it is drawn. `run.logEvery` is 1, so that the first step is shown when its result is there.

    make web
    .venv/bin/python benchmarks/web/page_load.py [--loads 5] [--seconds 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from browser.harness import FLAGS, BrowserPage, Chromium, find_chromium  # noqa: E402
from common import own_cache  # noqa: E402
from hybrid.bridge.launch import train_in_browser  # noqa: E402
from hybrid.config.loading import load_config  # noqa: E402
from hybrid.training.start import Request, Services  # noqa: E402
from hybrid.training.view import QuietView  # noqa: E402

PRESET = "stdlib-tiny"
SETTINGS = ("run.logEvery=1", "sampling.every=0")
PATIENCE_MS = 120_000
PROMISES = {
    "the first step within 8 s of the load": lambda r: r["first_step_s"] <= 8,
    "progress within 1 s of the load": lambda r: r["progress_s"] <= 1,
    "the page draws while it trains: nineteen frames of twenty within 50 ms": lambda r: all(
        load["training"]["p95_ms"] <= 50 for load in r["loads"]
    ),
}

# Runs before anything of the page. What changes is drawn with the next frame, after which a task of ours runs.
WATCH = """
(() => {
  let resolve;
  globalThis.loaded = new Promise((done) => (resolve = done));
  const seen = []; // [stage, seconds]
  let text = "";
  let stepped = false;
  const drawn = (then) => requestAnimationFrame(() => setTimeout(() => then(performance.now() / 1000)));
  const look = () => {
    const status = document.getElementById("status")?.textContent;
    const stage = status?.replace(/:.*/, "");
    if (stage && stage !== "starting" && stage !== text) {
      text = stage;
      drawn((at) => seen.push([stage, at]));
    }
    if (!stepped && /^[1-9]/.test(document.getElementById("step")?.textContent ?? "")) {
      stepped = true;
      drawn((at) => resolve({ stages: seen, step: at }));
    }
  };
  new MutationObserver(look).observe(document, { subtree: true, childList: true, characterData: true });
})();
"""
# Milliseconds between frames, and of the tasks that held the page up, for some seconds.
DRAW = """
(seconds) => new Promise((resolve) => {
  const intervals = [];
  const tasks = [];
  const observer = new PerformanceObserver((list) => tasks.push(...list.getEntries().map((task) => task.duration)));
  observer.observe({ type: "longtask" });
  const begin = performance.now();
  let last = null;
  const frame = (now) => {
    if (last !== null) intervals.push(now - last);
    last = now;
    if (performance.now() - begin < 1000 * seconds) requestAnimationFrame(frame);
    else {
      observer.disconnect();
      resolve({ intervals, tasks });
    }
  };
  requestAnimationFrame(frame);
})
"""


class Shown:
    """The page in a browser with a fresh profile, as the launcher wants to see one."""

    is_ours = False

    def __init__(self, chromium: Chromium, profile: Path) -> None:
        self._chromium = chromium
        self._profile = profile
        self.page: Future[BrowserPage] = Future()

    def __call__(self, url: str) -> Shown:
        page = BrowserPage(self._chromium, "about:blank", self._context)
        page.do(lambda inner: (inner.context.add_init_script(WATCH), inner.goto(url)))
        self.page.set_result(page)
        return self

    def _context(self) -> Any:
        launch = self._chromium.driver.chromium.launch_persistent_context
        return launch(self._profile, executable_path=find_chromium(), headless=True, args=[*FLAGS])

    def problem(self) -> str | None:
        return None

    def says(self) -> str:
        return ""

    def close(self) -> None:
        """Stays open, to be measured without training."""


def drawing(page: BrowserPage, seconds: float) -> dict[str, float]:
    found = page.do(lambda page: page.evaluate(DRAW, seconds))
    intervals = sorted(found["intervals"])
    return {
        "frames": len(intervals),
        "p50_ms": statistics.median(intervals),
        "p95_ms": intervals[int(0.95 * (len(intervals) - 1))],
        "longest_ms": intervals[-1],
        "long_tasks": len(found["tasks"]),
        "longest_task_ms": max(found["tasks"], default=0.0),
    }


def one_load(chromium: Chromium, folder: Path, seconds: float) -> dict[str, Any]:
    services = Services(view=QuietView())
    shown = Shown(chromium, folder / "profile")
    request = Request(load_config(None, PRESET, SETTINGS, {"backend.name": "browser"}), folder / "run")
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(train_in_browser, request, services, opener=shown)
        try:
            wait([outcome, shown.page], return_when=FIRST_COMPLETED)
            if outcome.done():
                outcome.result()
            page = shown.page.result()
            page.do(lambda inner: inner.set_default_timeout(PATIENCE_MS))
            seen = page.do(lambda inner: inner.evaluate("loaded"))
            training = drawing(page, seconds)
        finally:
            services.stop.request("measured")
        outcome.result()
        idle = drawing(page, seconds)
        page.close()
    stages = seen["stages"]
    return {
        "progress_s": stages[0][1],
        "first_step_s": seen["step"],
        "stages": stages,
        "training": training,
        "idle": idle,
    }


def measure(loads: int, seconds: float) -> dict[str, Any]:
    results = []
    with Chromium() as chromium, own_cache():
        for _ in range(loads):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                results.append(one_load(chromium, Path(name), seconds))
    middle = {key: statistics.median(load[key] for load in results) for key in ("progress_s", "first_step_s")}
    result: dict[str, Any] = {**middle, "loads": results}
    result["promises"] = {text: bool(keeps(result)) for text, keeps in PROMISES.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=5, help="cold loads, whose medians count (default: 5)")
    parser.add_argument("--seconds", type=float, default=10, help="that frames are watched (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    result = measure(arguments.loads, arguments.seconds)
    if arguments.json:
        print(json.dumps(result))
        return 0
    for load in result["loads"]:
        print(
            "  ".join(f"{stage} {at:.2f}" for stage, at in load["stages"]), f" first step {load['first_step_s']:.2f} s"
        )
    print(f"{'medians':16}progress {result['progress_s']:.2f} s, first step {result['first_step_s']:.2f} s")
    for name in ("training", "idle"):
        frames = [load[name] for load in result["loads"]]
        p50, p95 = (statistics.median(found[key] for found in frames) for key in ("p50_ms", "p95_ms"))
        longest, task = (max(found[key] for found in frames) for key in ("longest_ms", "longest_task_ms"))
        print(f"{name:16}frames every {p50:.1f} ms (p95 {p95:.1f}, longest {longest:.0f}), longest task {task:.0f} ms")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
