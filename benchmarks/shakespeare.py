"""hybrid and a plain torch loop at the shakespeare-char setting, on the same batches: how low is the validation loss?

    .venv/bin/python benchmarks/shakespeare.py [--text FILE] [--backend auto] [--steps 2000] [--json]

Both are judged on the whole validation split, sum over sum.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import corpus, own_cache, run_json, run_quietly

HIGHEST_LOSS = 1.92
LARGEST_DIFFERENCE = 0.02


def measure(text: Path, backend: str, steps: int, seed: int) -> dict[str, Any]:
    common = ["--text", str(text), "--steps", str(steps), "--seed", str(seed), "--json"]
    baseline = run_json([sys.executable, str(Path(__file__).with_name("torch_shakespeare.py")), *common])
    with own_cache(), tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        hybrid = [sys.executable, "-m", "hybrid"]
        began = time.perf_counter()
        run_quietly(
            [*hybrid, "train", "--preset", "shakespeare-char", "--set", f'data.source="{text}"', "--backend", backend,
             "--steps", str(steps), "--seed", str(seed), "--run-dir", run]
        )  # fmt: skip
        seconds = time.perf_counter() - began
        ours = run_json([*hybrid, "eval", run, "--backend", backend, "--json"])
    return {
        "steps": steps,
        "seed": seed,
        "backend": backend,
        "validation_loss": ours["loss"],
        "torch_validation_loss": baseline["validation_loss"],
        "difference": ours["loss"] - baseline["validation_loss"],
        "wall_s": seconds,
        "torch_step_s": baseline["step_s"],
        "eval": {name: value for name, value in ours.items() if name != "checkpoint"},  # a temporary folder
        "torch": baseline,
        "promises": {
            f"validation loss at most {HIGHEST_LOSS}": ours["loss"] <= HIGHEST_LOSS,
            f"within {LARGEST_DIFFERENCE} of torch": abs(ours["loss"] - baseline["validation_loss"])
            <= LARGEST_DIFFERENCE,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="tinyshakespeare.txt (default: where the checkout keeps it)")
    parser.add_argument("--backend", default="auto", help="of hybrid (default: auto)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    result = measure(corpus(arguments.text), arguments.backend, arguments.steps, arguments.seed)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'':8}{'validation loss':>18}   after {result['steps']} steps")
    print(f"{'hybrid':8}{result['validation_loss']:>18.4f}   {result['wall_s']:.0f} s with set-up and evaluation")
    print(f"{'torch':8}{result['torch_validation_loss']:>18.4f}   {result['torch_step_s'] * 1e3:.1f} ms a step")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
