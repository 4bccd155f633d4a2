"""Measurements of a WebGPU session: whole steps, the products inside them, and each kernel's share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hybrid.backends.protocol import StepInfo
from hybrid.backends.webgpu.device import Device
from hybrid.backends.webgpu.executor import Executor, device_profile
from hybrid.backends.webgpu.profiling import DispatchTime, profile_dispatches
from hybrid.backends.webgpu.session import TRAINING, WebGPUSession
from hybrid.backends.webgpu.variants import time_rounds
from hybrid.data.batch import Batch
from hybrid.plan.document import BoundSlice, Choice, Dispatch, Plan, PlanKernel
from hybrid.plan.kernels import matmul
from hybrid.plan.kernels.base import source_hash
from hybrid.plan.profile import DeviceProfile

# Products of a 4-layer, 128-wide model at 256 rows, then squares.
PRODUCT_SHAPES = ((256, 128, 128), (256, 512, 128), (256, 128, 512), (512, 512, 512), (1024, 1024, 1024))


def random_batch(vocabulary: int, batch_size: int, sequence_length: int, seed: int = 0) -> Batch:
    """Uniform random tokens, one segment a row: speed does not depend on what they are."""
    rng = np.random.default_rng(seed)
    shape = (batch_size, sequence_length)
    tokens = rng.integers(0, vocabulary, (2, *shape), dtype=np.uint32)
    positions = np.tile(np.arange(sequence_length, dtype=np.uint32), (batch_size, 1))
    return Batch(tokens[0], tokens[1], positions, np.ones(shape, np.uint32), np.arange(batch_size, dtype=np.uint32))


def bench_step(
    session: WebGPUSession, *, steps: int = 30, warm: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Warm whole steps of one microbatch, and the matrix products in them. Medians, in milliseconds.

    `products_ms` is the wall time of the step's products alone, in the same order and on the same buffers.
    `host_share` is what the host adds while it does not wait, as a share of the wall time.
    """
    batch_size, length = session.plan.shape["B"], session.plan.shape["T"]
    batch = random_batch(session.model.vocabulary_size, batch_size, length)

    def run(first: int, count: int) -> list[float]:
        times = []
        for step in range(first, first + count):
            begin = clock()
            session.begin(StepInfo(step, batch.target_tokens, 1))
            session.accumulate(batch)
            session.apply()
            session.poll_metrics()
            times.append(clock() - begin)
        session.poll_metrics(wait=True)
        return times

    begin = clock()
    run(1, 1)
    first_ms = (clock() - begin) * 1e3
    run(2, warm)
    session.executor.waited = 0.0
    before = session.counters()
    begin = clock()
    times = run(warm + 2, steps)
    wall = clock() - begin
    host = wall - session.executor.waited
    after = session.counters()
    step_ms = median(times) * 1e3
    products = [d for p in TRAINING for d in session.plan.dispatches(p) if d.product_class is not None]
    return {
        "step_ms": step_ms,
        "first_step_ms": first_ms,
        "tokens_per_second": batch_size * length / step_ms * 1e3,
        "host_share": host / wall,
        "products_ms": median(dispatch_seconds(session.executor, products, clock, rounds=10)) * 1e3,
        "created": {key: after[key] - before[key] for key in ("buffers_created", "pipelines_created")},
        "readbacks": after["readbacks"] - before["readbacks"],
        "pipelines": len({session.executor.choice(d).kernel for p in TRAINING for d in session.plan.dispatches(p)}),
        "steps": steps,
    }


def dispatch_seconds(
    executor: Executor, dispatches: Sequence[Dispatch], clock: Callable[[], float], *, rounds: int
) -> list[float]:
    """Wall seconds of these dispatches in one pass, once for each round."""
    encoded = [executor.encoded(d, executor.choice(d)) for d in dispatches]
    seconds = []
    for _ in range(rounds):
        encoder = executor.encoder()
        compute = encoder.begin_compute_pass()
        for item in encoded:
            compute.set_pipeline(item.pipeline)
            compute.set_bind_group(0, item.group)
            compute.dispatch_workgroups(*item.workgroups)
        compute.end()
        begin = clock()
        executor.submit(encoder)
        executor.wait()
        seconds.append(clock() - begin)
    return seconds


def kernel_times(session: WebGPUSession, repeats: int = 5) -> list[DispatchTime]:
    """Every dispatch of a training step, timed by the device. The session's state moves by a few meaningless steps."""
    return profile_dispatches(session.executor, TRAINING, repeats=repeats)


def bench_products(
    device: Device, precision: str = "f32", *, repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, Any]]:
    """GFLOP/s of every variant at PRODUCT_SHAPES in each form, the best of a few interleaved rounds."""
    results = []
    profile = device_profile(device)
    for m, n, k in PRODUCT_SHAPES:
        for form in matmul.FORMS:
            plan = _product_plan(form, m, n, k, precision, profile)
            executor = Executor(device, plan, profile)
            (dispatch,) = plan.dispatches("product")
            rounds = time_rounds(executor, dispatch, clock, repeats, dispatches=8)
            executor.close()
            results += [
                {"form": form, "m": m, "n": n, "k": k, "variant": c.variant, "gflops": 2e-9 * m * n * k / s}
                for c, s in zip(dispatch.choices, map(min, zip(*rounds, strict=True)), strict=True)
            ]
    return results


def _product_plan(form: str, m: int, n: int, k: int, precision: str, profile: DeviceProfile) -> Plan:
    """A plan of one dispatch: the product, with every variant as a choice."""
    item = 2 if precision == "mixed-f16" else 4
    sizes = {"a": m * k * item, "b": n * k * item, "c": m * n * item, "flags": 256}
    kernels: dict[str, PlanKernel] = {}
    sources: dict[str, str] = {}
    choices = []
    for variant in matmul.tune_variants(form, m, n, k, subgroup_size=profile.subgroup_size, cpu=profile.cpu):
        launch = matmul.product(form, m, n, k, variant=variant, precision=precision)
        text = launch.kernel.source(precision)
        sources[source_hash(text)] = text
        kernels[launch.kernel.name] = PlanKernel.of(launch.kernel, source_hash(text), precision)
        choices.append(Choice(launch.kernel.name, launch.uniforms, launch.workgroups, variant))
    arenas = ("a", "b", "c", "flags")[: 4 if precision == "mixed-f16" else 3]
    bindings = tuple(BoundSlice(arena, 0, 0, sizes[arena]) for arena in arenas)
    return Plan(
        model={},
        shape={},
        precision=precision,
        requires={"features": ["shader-f16"] if precision == "mixed-f16" else [], "limits": {}},
        arenas={arena: [size] for arena, size in sizes.items()},
        tensors={},
        kernels=kernels,
        sources=sources,
        constants={},
        programs={"product": [Dispatch(tuple(choices), bindings, form)]},
    )
