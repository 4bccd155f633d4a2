"""A whole training step of hybrid beside tinygrad's, on one machine, in turns.

4 layers, width 128, 4 heads, vocabulary 256, batch 4 x 64, f32, AdamW; hybrid's own numbers (products, host, pipelines,
readbacks) come from `hybrid bench step`. hybrid's first step is timed from the start of a process with empty caches:
device, kernels, their timing, one step. What hybrid remembers of its kernels' speed is remembered from this run only.

    make benchmark-env
    .venv/bin/python benchmarks/step.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

from common import RIVALS, ROOT, own_cache, run_json

# The settings of the rival: 0.84 M parameters here, 0.83 M there.
SETTINGS = (
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "model.vocabularySize=256",
    "data.sequenceLength=64",
    "data.batchSize=4",
    "precision.type=f32",
)
# What the project promises, each as (text, whether a result keeps it).
PROMISES = {
    "at least 6 times faster than tinygrad": lambda r: r["times_faster"] >= 6,
    "at most twice the time of the matrix products in it": lambda r: r["times_products"] <= 2,
    "first step with a cold cache at most 6 s": lambda r: r["cold_first_step_s"] <= 6,
    "host time under 5 % of the step": lambda r: r["host_share"] < 0.05,
    "at most 30 pipelines": lambda r: r["pipelines"] <= 30,
    "no buffer or pipeline created in warm steps": lambda r: not any(r["created"].values()),
}


def hybrid_step(steps: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "hybrid", "bench", "step", "--json", "--steps", str(steps)]
    words += [word for setting in SETTINGS for word in ("--set", setting)]
    result: dict[str, Any] = run_json(words)
    return result


def cold_first_step() -> float:
    """Seconds from nothing to the result of the first step, in a new process without any cache."""
    with own_cache(), tempfile.TemporaryDirectory() as empty:
        environment = {"XDG_CACHE_HOME": empty, "MESA_SHADER_CACHE_DISABLE": "true"}
        return float(run_json([sys.executable, __file__, "--only-first-step"], environment))


def first_step() -> float:
    began = time.perf_counter()
    from hybrid.backends.protocol import StepInfo
    from hybrid.backends.webgpu.bench import random_batch
    from hybrid.cli.commands.bench import open_session

    nothing = argparse.Namespace(config=None, preset=None, adapter=None, assignments=SETTINGS)
    session = open_session(nothing)
    batch = random_batch(session.model.vocabulary_size, session.plan.shape["B"], session.plan.shape["T"])
    session.begin(StepInfo(1, batch.target_tokens, 1))
    session.accumulate(batch)
    session.apply()
    session.poll_metrics(wait=True)
    return time.perf_counter() - began


def tinygrad_step(steps: int) -> dict[str, Any]:
    if not RIVALS.exists():
        raise SystemExit("step: the environment of the rivals is missing; run `make benchmark-env`")
    words = [str(RIVALS), str(ROOT / "benchmarks" / "tinygrad_step.py"), "--json", "--steps", str(steps)]
    result: dict[str, Any] = run_json(words)
    return result


def measure(rounds: int) -> dict[str, Any]:
    cold = cold_first_step()
    ours, theirs = [], []
    for _ in range(rounds):  # in turns, so that a busy moment of the machine falls on both
        ours.append(hybrid_step(30))
        theirs.append(tinygrad_step(10))
    best = min(ours, key=lambda result: result["step_ms"])
    step = statistics.median(result["step_ms"] for result in ours) / 1e3
    rival = statistics.median(result["step_s"] for result in theirs)
    result = {
        "adapter": best["adapter"],
        "step_s": step,
        "tinygrad_step_s": rival,
        "times_faster": rival / step,
        "products_s": best["products_ms"] / 1e3,
        "times_products": statistics.median(result["step_ms"] / result["products_ms"] for result in ours),
        "cold_first_step_s": cold,
        "tinygrad_first_step_s": theirs[0]["first_step_s"],
        "host_share": best["host_share"],
        "pipelines": best["pipelines"],
        "created": best["created"],
        "readbacks": best["readbacks"],
        "tinygrad": {name: theirs[0][name] for name in ("versions", "adapter", "parameters")},
        "rounds": [[o["step_ms"] / 1e3, t["step_s"]] for o, t in zip(ours, theirs, strict=True)],
    }
    result["promises"] = {text: bool(keeps(result)) for text, keeps in PROMISES.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that both are measured, in turns (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only-first-step", action="store_true", help="print the seconds to the first step's result")
    arguments = parser.parse_args()
    if arguments.only_first_step:
        print(first_step())
        return 0
    with own_cache():
        result = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'':18}{'warm step':>12}{'first step':>12}   {result['adapter']}")
    print(f"{'hybrid':18}{result['step_s'] * 1e3:>9.1f} ms{result['cold_first_step_s']:>10.2f} s")
    print(f"{'tinygrad WEBGPU':18}{result['tinygrad_step_s'] * 1e3:>9.1f} ms{result['tinygrad_first_step_s']:>10.2f} s")
    print(
        f"{result['times_faster']:.1f} times faster; {result['times_products']:.2f} times its matrix products; ", end=""
    )
    print(f"host {result['host_share']:.1%}; {result['pipelines']} pipelines")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
