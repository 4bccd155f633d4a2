"""Every benchmark, one after the other, each written to benchmarks/results/NAME.json with commit, command and machine.

`make acceptance` runs it. Exits with 1 when a promise is not kept or a benchmark fails; the others are run all the
same.

    python benchmarks/run_all.py [NAME ...]
"""

from __future__ import annotations

import argparse
import sys

from common import RESULTS, ROOT, commit, run_json, save_result

BENCHMARKS: dict[str, list[str]] = {
    "peak": ["peak.py"],
    # Rounds enough for a quiet moment on a machine that others use as well.
    "matmul": ["matmul.py", "--rounds", "100"],
    "matmul_f16": ["matmul.py", "--rounds", "20", "--precision", "mixed-f16"],
    "step": ["step.py"],
    "tab_step": ["web/tab_step.py"],
    "page_load": ["web/page_load.py"],
    "python_in_the_tab": ["web/python_step.py"],
    "shakespeare": ["shakespeare.py"],
    "torch_step": ["torch_step.py"],
}


def run(name: str) -> list[str]:
    """Run one benchmark and write its result; what went wrong."""
    script, *options = BENCHMARKS[name]
    measured = commit()  # the tree may move on meanwhile
    try:
        result = run_json([sys.executable, str(ROOT / "benchmarks" / script), *options, "--json"])
    except SystemExit as error:
        return [f"{name}: {error}"]
    words = " ".join([f"benchmarks/{script}", *options, "--json"])
    path = save_result(name, result, f"python {words}", measured)
    print(f"{name}: {path.relative_to(ROOT)}")
    return [f"{name}: not kept: {text}" for text, kept in result.get("promises", {}).items() if not kept]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    names = parser.parse_args().names or list(BENCHMARKS)
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"unknown benchmark {', '.join(unknown)}: expected some of {', '.join(BENCHMARKS)}")
    problems = [problem for name in names for problem in run(name)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(names)} benchmarks in {RESULTS.relative_to(ROOT)}, {len(problems)} problem(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
