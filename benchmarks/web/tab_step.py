"""A whole training step in a tab, beside jax-js and TensorFlow.js in the same Chromium, and beside the same kernels
through wgpu-py on the same SwiftShader driver; in turns.

4 layers, width 128, 4 heads, vocabulary 256, batch 4 x 64, f32, AdamW. Every step waits for its loss.

    make benchmark-env
    .venv/bin/python benchmarks/web/tab_step.py [--rounds 2] [--steps 10] [--json]
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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from browser.harness import Chromium, StaticServer  # noqa: E402
from common import ROOT, run_json  # noqa: E402
from conftest import swiftshader_icd  # noqa: E402
from hybrid.config.loading import load_config  # noqa: E402
from hybrid.config.resolve import model_config, optimizer_settings, resolve  # noqa: E402
from hybrid.plan.compiler import PlanSettings, compile_plan  # noqa: E402
from hybrid.plan.folder import write_plan  # noqa: E402
from hybrid.plan.profile import DeviceProfile  # noqa: E402
from step import SETTINGS  # noqa: E402

RIVALS = ("jax", "tfjs")
PROMISES = {
    "at most 1.4 times the step of wgpu-py on the same driver": lambda r: r["times_wgpu"] <= 1.4,
    "at least 3 times faster than the faster of jax-js and TensorFlow.js": lambda r: r["times_faster"] >= 3,
}


def bundle(folder: Path) -> None:
    """The three programs as modules without imports."""
    esbuild = ROOT / "web" / "node_modules" / ".bin" / "esbuild"
    entries = [str(HERE / f"{name}_step.js") for name in ("hybrid", *RIVALS)]
    options = ["--bundle", "--format=esm", "--minify", f"--outdir={folder}", "--log-level=error"]
    subprocess.run([str(esbuild), *entries, *options], check=True)


def write_plan_for(found: dict[str, Any], folder: Path) -> None:
    """The plan of the measured model for a device with this profile."""
    config = resolve(load_config(None, None, SETTINGS, {}), 256, 1000, None)
    settings = PlanSettings(
        model_config(config),
        config.data.batch_size,
        config.data.sequence_length,
        "f32",
        optimizer_settings(config),
        config.optimizer.max_norm or None,
        {"enabled": False},
    )
    profile = DeviceProfile(
        limits=found["limits"],
        features=frozenset(found["features"]),
        subgroup_size=found["subgroup_size"],
        cpu=found["cpu"],
    )
    write_plan(compile_plan(settings, profile), folder)


def through_wgpu(steps: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "hybrid", "bench", "step", "--json", "--steps", str(steps)]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as empty:
        environment = {"VK_ICD_FILENAMES": str(swiftshader_icd()), "HYBRID_CACHE": empty}
        result: dict[str, Any] = run_json(words, environment)
    return result


def measure(rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, Chromium() as chromium:
        folder = Path(name)
        bundle(folder)
        with StaticServer({"/": folder}) as server:

            def in_tab(program: str, *parameters: Any) -> dict[str, Any]:
                page = chromium.open(server)
                try:
                    result: dict[str, Any] = page.call(f"/{program}_step.js", "measure", *parameters)
                    return result
                finally:
                    page.close()

            page = chromium.open(server)
            write_plan_for(page.call("/hybrid_step.js", "profile"), folder / "plan")
            page.close()
            tab, desktop = [], []
            rivals: dict[str, list[dict[str, Any]]] = {rival: [] for rival in RIVALS}
            for _ in range(rounds):
                tab.append(in_tab("hybrid", "/plan", steps))
                desktop.append(through_wgpu(steps))
                for rival in RIVALS:
                    rivals[rival].append(in_tab(rival, max(3, steps // 3)))
    step = statistics.median(second for result in tab for second in result["steps_s"])
    wgpu = statistics.median(result["step_ms"] for result in desktop) / 1e3
    others = {
        rival: statistics.median(second for result in results for second in result["steps_s"])
        for rival, results in rivals.items()
    }
    result = {
        "step_s": step,
        "first_step_s": tab[0]["first_step_s"],
        "wgpu_step_s": wgpu,
        "times_wgpu": step / wgpu,
        "rivals_step_s": others,
        "rivals_first_step_s": {rival: results[0]["first_step_s"] for rival, results in rivals.items()},
        "times_faster": min(others.values()) / step,
        "pipelines": tab[0]["pipelines"],
        "variants": {"tab": tab[0]["variants"], "wgpu": desktop[0].get("variants")},
    }
    result["promises"] = {text: bool(keeps(result)) for text, keeps in PROMISES.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="times that all are measured, in turns (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="warm steps of each measurement (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.steps)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'':24}{'warm step':>12}{'first step':>13}")
    print(f"{'hybrid in the tab':24}{result['step_s']:>10.3f} s{result['first_step_s']:>11.1f} s")
    print(f"{'hybrid through wgpu-py':24}{result['wgpu_step_s']:>10.3f} s")
    for rival, seconds in result["rivals_step_s"].items():
        print(f"{rival:24}{seconds:>10.3f} s{result['rivals_first_step_s'][rival]:>11.1f} s")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
