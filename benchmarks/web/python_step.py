"""Python in the tab: how long its first plan takes, and what a step costs when Python drives it instead of JavaScript;
and how soon the page can be used.

4 layers, width 128, 4 heads, vocabulary 256, batch 4 x 64, f32, AdamW, in Chromium on SwiftShader. Every step waits for
its loss. "Cached": the bundle is in the browser's cache. "Kept": the page asks for a plan that it has had before.

    make web pyodide
    .venv/bin/python benchmarks/web/python_step.py [--rounds 3] [--steps 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from browser import harness  # noqa: E402
from browser.app_page import PATH, App  # noqa: E402
from browser.harness import Chromium, StaticServer  # noqa: E402
from common import ROOT  # noqa: E402
from hybrid.bridge.site import export_site  # noqa: E402

BUNDLE = ROOT / "web" / "dist" / "pyodide"
PROMISES = {
    "the first plan within 5 s": lambda r: r["first_plan_s"] <= 5,
    "the first plan within 2 s when Python is cached": lambda r: r["cached_plan_s"] <= 2,
    "a plan of the page within 2 s when it was compiled before": lambda r: r["kept_plan_s"] <= 2,
    "the page can be used within 1 s": lambda r: r["interactive_s"] <= 1,
    "a step at most 5 % slower than JavaScript's alone": lambda r: r["times_javascript"] <= 1.05,
}


LOADS = 5  # of the page, whose median counts
SHAPE = {"Layers": 4, "Width": 128, "Heads": 4, "Context": 64, "Batch": 4}
# Seconds from the choice of a custom model to what its plan needs.
CHOOSE = """() => new Promise((resolve) => {
  const begun = performance.now();
  const fit = document.getElementById("fit");
  const look = () => /It needs/.test(fit.textContent) && resolve((performance.now() - begun) / 1000);
  new MutationObserver(look).observe(fit, { subtree: true, childList: true, characterData: true });
  for (const [id, value] of Object.entries(SHAPE)) {
    const input = document.getElementById(id.toLowerCase());
    input.value = value;
    if (id === "Batch") document.querySelector("input[value=custom]").click();
  }
})"""


def measure_page(chromium: Chromium) -> dict[str, float]:
    """Of the page itself, whose half second of waiting for the next digit counts as well."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "page"
        export_site(folder, python=BUNDLE)
        with StaticServer({PATH: folder}) as server, App(chromium, server) as app:
            script = CHOOSE.replace("SHAPE", json.dumps(SHAPE))
            usable = "performance.getEntriesByName('interactive')[0].startTime / 1000"
            interactive = [app.ready().do(lambda page: page.evaluate(usable))]
            first = app.do(lambda page: page.evaluate(script))
            for _ in range(LOADS - 1):
                app.do(lambda page: page.reload())
                interactive.append(app.ready().do(lambda page: page.evaluate(usable)))
            kept = app.do(lambda page: page.evaluate(script))
    return {"interactive_s": statistics.median(interactive), "page_plan_s": first, "kept_plan_s": kept}


def measure(rounds: int, steps: int) -> dict[str, Any]:
    esbuild = ROOT / "web" / "node_modules" / ".bin" / "esbuild"
    keep = patch.dict(harness.HEADERS, {"Cache-Control": "max-age=3600"})
    with tempfile.TemporaryDirectory() as name, Chromium() as chromium, keep:
        options = ["--bundle", "--format=esm", "--minify", f"--outdir={name}", "--log-level=error"]
        subprocess.run([str(esbuild), str(HERE / "python_step.js"), *options], check=True)
        with StaticServer({"/bundle/": BUNDLE, "/": Path(name)}) as server:
            page = chromium.open(server)
            first = page.call("/python_step.js", "firstPlan")
            page.do(lambda it: it.reload())
            cached = page.call("/python_step.js", "firstPlan")
            seconds = page.call_in_worker("/python_step.js", "measure", rounds, steps)
            page.close()
        of_page = measure_page(chromium)
    python, javascript = (statistics.median(seconds[driver]) for driver in ("python", "javascript"))
    result = {
        "first_plan_s": first["first_plan_s"],
        "cached_plan_s": cached["first_plan_s"],
        "next_plan_s": cached["next_plan_s"],
        **of_page,
        "step_s": python,
        "javascript_step_s": javascript,
        "times_javascript": python / javascript,
        "bundle_bytes": {path.name: path.stat().st_size for path in sorted(BUNDLE.iterdir())},
    }
    result["promises"] = {text: bool(keeps(result)) for text, keeps in PROMISES.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that both are measured, in turns (default: 3)")
    parser.add_argument("--steps", type=int, default=10, help="warm steps of each measurement (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if not (BUNDLE / "worker.js").is_file():
        parser.error("Python in the tab is not built: npm run build:pyodide --prefix web")
    result = measure(arguments.rounds, arguments.steps)
    if arguments.json:
        print(json.dumps(result))
        return 0
    for name in (name for name in result if name.endswith("_s")):
        print(f"{name.removesuffix('_s').replace('_', ' '):20}{result[name]:>10.3f} s")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
