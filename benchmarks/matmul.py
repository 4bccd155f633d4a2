"""Matrix products against the adapter's multiply-add peak and against a naive kernel, all in one run.

For each shape (M x N x K) and form: the naive kernel (a thread for each element, one load of A and B for each
multiply-add) and the variants that a plan for this adapter offers, or with --all every one that `hybrid tune` tries.
Everything is timed in turn, the peak too, several dispatches to a submit; figures are of the fastest run, of a product
as of the peak in the same rounds. "Processor time" counts what the process used on all cores instead of the clock on
the wall: for a CPU driver that is the figure which a busy machine spoils less. The first dispatch compiles; a driver
with a shader cache on disk compiles only the first time ever (Mesa: MESA_SHADER_CACHE_DISABLE=true turns it off).

    python benchmarks/matmul.py [--precision mixed-f16] [--rounds 10] [--shape M,N,K] [--form nt] [--all] [--json]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from common import command, commit, machine
from hybrid.backends.webgpu.device import open_device
from hybrid.backends.webgpu.executor import device_profile
from hybrid.plan.kernels import matmul
from hybrid.plan.kernels.base import FLAGS_BINDING, ceil_div, prelude
from peak import Bench, Timed, peak_items

# Of a 4-layer, 128-wide model at 256 rows: attention projections, feed-forward up and down, head; and a square.
SHAPES = ((256, 128, 128), (256, 512, 128), (256, 128, 512), (256, 256, 128), (512, 512, 512))

# What the project promises of a CPU driver, each as (text, whether the products of one run keep it).
PROMISES = {
    "the fastest variant of each form at 512^3 at 35 % or more of the peak": lambda best: all(
        record["of_peak"] >= 0.35 for (_, *shape), record in best.items() if shape == [512, 512, 512]
    ),
    "the fastest variant of each form and shape at least 1.5 times the naive kernel": lambda best: all(
        record["times_naive"] >= 1.5 for record in best.values()
    ),
}

_NAIVE = """
struct Uniforms { m: u32, n: u32, k: u32 }
@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read> a: array<act>;
@group(0) @binding(2) var<storage, read> b: array<act>;
@group(0) @binding(3) var<storage, read_write> c: array<act>;
@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = id.y;
  let column = id.x;
  if (row < u.m && column < u.n) {
    var sum = 0.0;
    for (var k = 0u; k < u.k; k++) { sum += f32(a[A_INDEX]) * f32(b[B_INDEX]); }
    c[row * u.n + column] = act(sum);
  }
}
"""


def naive_source(form: str, precision: str) -> str:
    a = "k * u.m + row" if form == "tn" else "row * u.k + k"
    b = "column * u.k + k" if form == "nt" else "k * u.n + column"
    return prelude(precision, False, ()) + _NAIVE.replace("A_INDEX", a).replace("B_INDEX", b)


def measure(
    bench: Bench, form: str, shape: tuple[int, int, int], names: tuple[str, ...], precision: str, peaks: list[Timed],
    rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """One record for each variant."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    element = np.float16 if precision == "mixed-f16" else np.float32
    a, b, c = (bench.buffer(rng.standard_normal(size).astype(element)) for size in (m * k, n * k, m * n))
    flags = {FLAGS_BINDING: bench.buffer(np.zeros(64, np.uint32))} if precision == "mixed-f16" else {}
    flops = 2.0 * m * n * k
    buffers = {1: a, 2: b, 3: c}
    grid = (ceil_div(n, 8), ceil_div(m, 8), 1)
    naive = bench.prepare("naive", naive_source(form, precision), (m, n, k), buffers, grid, flops)
    items = []
    for name in names:
        launch = matmul.product(form, m, n, k, variant=name, precision=precision)
        source = launch.kernel.source(precision)
        items.append(bench.prepare(name, source, launch.uniforms, buffers | flags, launch.workgroups, flops))
    bench.rounds([*peaks, naive, *items], rounds)
    peak = max(item.flops / min(item.seconds[-rounds:]) for item in peaks) / 1e9
    peak_a_core = max(item.flops / min(item.processor_seconds[-rounds:]) for item in peaks) / 1e9
    return [
        {
            "form": form,
            "m": m,
            "n": n,
            "k": k,
            "variant": item.label,
            "gflops": item.gflops,
            "median_gflops": item.median_gflops,
            "gflops_a_core": item.gflops_a_core,
            "peak_gflops": peak,
            "of_peak": item.gflops / peak,
            "of_peak_a_core": item.gflops_a_core / peak_a_core,
            "naive_gflops": naive.gflops,
            "times_naive": item.gflops / naive.gflops,
            "first_dispatch_ms": item.first_seconds * 1e3,
        }
        for item in items
    ]


def fastest(records: list[dict[str, Any]]) -> dict[tuple[str, int, int, int], dict[str, Any]]:
    """The record of the fastest variant for each form and shape."""
    best: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: record["gflops"]):
        best[record["form"], record["m"], record["n"], record["k"]] = record
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", help="part of a GPU's name, or its number")
    parser.add_argument("--precision", choices=("f32", "mixed-f16"), default="f32", help="default: f32")
    parser.add_argument("--rounds", type=int, default=10, help="how often each kernel is timed (default: 10)")
    parser.add_argument("--shape", metavar="M,N,K", action="append", help="instead of the usual shapes; repeatable")
    parser.add_argument("--form", choices=matmul.FORMS, action="append", help="default: all three")
    parser.add_argument("--all", action="store_true", help="every variant that this adapter can run")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in arguments.shape] if arguments.shape else SHAPES

    device = open_device(arguments.adapter)
    bench, profile = Bench(device), device_profile(device)
    candidates = peak_items(bench, cpu=bool(profile.cpu))
    bench.rounds(candidates, arguments.rounds)
    peaks = sorted(candidates, key=lambda item: -item.gflops)[:3]  # go on with the best, beside the products
    offered = matmul.tune_variants if arguments.all else matmul.variants
    records = []
    for m, n, k in shapes:
        for form in arguments.form or matmul.FORMS:
            names = offered(form, m, n, k, subgroup_size=profile.subgroup_size, cpu=profile.cpu)
            records += measure(bench, form, (m, n, k), names, arguments.precision, peaks, arguments.rounds)
    peak = max(item.gflops for item in candidates)

    if arguments.json:
        report = {
            "command": command(),
            "commit": commit(),
            "machine": machine(),
            "adapter": device.name,
            "driver": device.info.description,
            "subgroup_size": profile.subgroup_size,
            "precision": arguments.precision,
            "peak_gflops": peak,
            "products": records,
        }
        if profile.cpu and arguments.precision == "f32":
            best = fastest(records)
            report["promises"] = {text: keeps(best) for text, keeps in PROMISES.items()}
        print(json.dumps(report))
        return
    print(f"{device.name}, {device.info.description}, {arguments.precision}: multiply-add peak {peak:.1f} GFLOP/s")
    print(f"{'':<35} GFLOP/s          of peak   of peak by    times      first")
    print("form  m x n x k         variant       best  median           processor time  naive   dispatch")
    for r in records:
        shape = f"{r['m']} x {r['n']} x {r['k']}"
        print(
            f"{r['form']:<5} {shape:<17} {r['variant']:<11}{r['gflops']:7.1f} {r['median_gflops']:7.1f}"
            f" {r['of_peak']:9.1%} {r['of_peak_a_core']:12.1%} {r['times_naive']:10.1f}"
            f" {r['first_dispatch_ms']:7.0f} ms"
        )


if __name__ == "__main__":
    main()
