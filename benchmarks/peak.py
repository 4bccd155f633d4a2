"""The fused-multiply-add peak of an adapter, measured: the most that any kernel could reach, for ratios.

Each thread keeps some independent chains x = fma(x, a, b) in registers, written out several times in a loop; nothing is
loaded. How many chains and how long a loop body a driver likes differs, so several are tried and the best one counts.
A multiply-add is two operations, whether or not the driver fuses it.

    python benchmarks/peak.py [--adapter NAME] [--rounds 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common import command, commit, machine
from hybrid.backends.webgpu.device import Device, load_wgpu, open_device

SHAPES = [(chains, copies) for chains in (8, 10, 12, 16, 24, 32) for copies in (4, 16)]
WORKGROUP = 64
RUN_SECONDS = 0.004  # long against the cost of a submit, short against the time slices of a shared machine


@dataclass
class Timed:
    """A dispatch that is timed again and again: what one costs, several of them to a submit."""

    label: str
    flops: float  # of one dispatch
    pipeline: Any
    group: Any
    workgroups: tuple[int, int, int]
    first_seconds: float = 0.0  # of the first dispatch, which compiles
    dispatches: int = 1
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)

    @property
    def gflops(self) -> float:
        return self.flops / min(self.seconds) / 1e9

    @property
    def median_gflops(self) -> float:
        return self.flops / statistics.median(self.seconds) / 1e9

    @property
    def gflops_a_core(self) -> float:
        """By processor time instead of the clock on the wall: meaningful for a CPU driver, also on a busy machine."""
        return self.flops / min(self.processor_seconds) / 1e9


class Bench:
    """Builds dispatches on one device and times them in turn."""

    def __init__(self, device: Device) -> None:
        self.device = device.device
        self.wgpu = load_wgpu()
        self.fence = self.buffer(np.zeros(4, np.uint32))

    def buffer(self, data: np.ndarray) -> Any:
        usage = self.wgpu.BufferUsage
        return self.device.create_buffer_with_data(data=data, usage=usage.STORAGE | usage.COPY_SRC | usage.COPY_DST)

    def prepare(
        self,
        label: str,
        source: str,
        uniforms: Sequence[float | int],
        buffers: dict[int, Any],
        workgroups: tuple[int, int, int],
        flops: float,
    ) -> Timed:
        """buffers: binding number -> buffer. Compiles, runs once and settles how many dispatches make a run."""
        words = b"".join((np.float32(v) if isinstance(v, float) else np.uint32(v)).tobytes() for v in uniforms)
        uniform = self.device.create_buffer_with_data(
            data=words + bytes(-len(words) % 16), usage=self.wgpu.BufferUsage.UNIFORM
        )
        begin = time.perf_counter()
        module = self.device.create_shader_module(code=source)
        pipeline = self.device.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
        group = self.device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": n, "resource": {"buffer": b}} for n, b in {0: uniform, **buffers}.items()],
        )
        timed = Timed(label, flops, pipeline, group, workgroups)
        self.run(timed)
        timed.first_seconds = time.perf_counter() - begin
        alone = min(self.run(timed)[0] for _ in range(3))
        timed.dispatches = max(1, round(RUN_SECONDS / alone))
        return timed

    def run(self, timed: Timed) -> tuple[float, float]:
        """Seconds and processor seconds of one dispatch, from submit to the end on the device."""
        begin, begin_processor = time.perf_counter(), time.process_time()
        encoder = self.device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(timed.pipeline)
        compute.set_bind_group(0, timed.group)
        for _ in range(timed.dispatches):
            compute.dispatch_workgroups(*timed.workgroups)
        compute.end()
        self.device.queue.submit([encoder.finish()])
        self.device.queue.read_buffer(self.fence)  # returns when everything before it is done
        seconds, processor = time.perf_counter() - begin, time.process_time() - begin_processor
        return seconds / timed.dispatches, processor / timed.dispatches

    def rounds(self, items: Sequence[Timed], count: int) -> None:
        """Time all of them in turn, `count` times: what else the machine does meets all alike."""
        for _ in range(count):
            for item in items:
                seconds, processor = self.run(item)
                item.seconds.append(seconds)
                item.processor_seconds.append(processor)


def peak_items(bench: Bench, cpu: bool) -> list[Timed]:
    """The multiply-add kernels. Few threads on a CPU, where they run one after the other, and many on a GPU."""
    threads = 1 << (12 if cpu else 18)
    steps = 16_000 if cpu else 4_000
    output = bench.buffer(np.zeros(threads, np.float32))
    items = []
    for chains, copies in SHAPES:
        loops = steps // (chains * copies) or 1
        items.append(
            bench.prepare(
                f"{chains} chains x {copies}",
                _source(chains, copies),
                (loops, 0.5, 0.25),
                {1: output},
                (threads // WORKGROUP, 1, 1),
                2.0 * threads * loops * copies * chains,
            )
        )
    return items


def _source(chains: int, copies: int) -> str:
    names = [f"x{i}" for i in range(chains)]
    starts = "".join(f"  var {x} = f32(id.x) + {i}.0;\n" for i, x in enumerate(names))
    body = "".join(f"    {x} = fma({x}, a, b);\n" for x in names) * copies
    return f"""struct Uniforms {{ loops: u32, a: f32, b: f32 }}
@group(0) @binding(0) var<uniform> u: Uniforms;
@group(0) @binding(1) var<storage, read_write> output: array<f32>;
@compute @workgroup_size({WORKGROUP})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
  let a = u.a;
  let b = u.b;
{starts}  for (var i = 0u; i < u.loops; i++) {{
{body}  }}
  output[id.x] = {" + ".join(names)};
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", help="part of a GPU's name, or its number")
    parser.add_argument("--rounds", type=int, default=10, help="how often each kernel is timed (default: 10)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    device = open_device(arguments.adapter)
    bench = Bench(device)
    items = peak_items(bench, device.info.kind == "CPU")
    bench.rounds(items, arguments.rounds)
    best = max(items, key=lambda item: item.gflops)
    if arguments.json:
        report = {
            "command": command(),
            "commit": commit(),
            "machine": machine(),
            "adapter": device.name,
            "driver": device.info.description,
            "peak_gflops": best.gflops,
            "kernels": [{"kernel": i.label, "gflops": i.gflops, "median_gflops": i.median_gflops} for i in items],
        }
        print(json.dumps(report))
        return
    print(f"{device.name}, {device.info.description}: multiply-adds in registers, GFLOP/s")
    for item in items:
        print(f"  {item.label:<16} best {item.gflops:8.1f}   median {item.median_gflops:8.1f}")
    print(f"  peak             {best.gflops:13.1f}")


if __name__ == "__main__":
    main()
