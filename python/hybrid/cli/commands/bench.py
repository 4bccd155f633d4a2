"""`hybrid bench step|matmul|kernels`: how fast this machine trains, and where the time goes."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

from hybrid.cli.parser import Subparsers, add_command, add_group, add_set_option, flags, path
from hybrid.cli.progress import ProgressLine


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    group = add_group(subparsers, "bench", "measure steps, matrix products and kernels")
    step = add_command(group, "step", "warm training steps of a preset, with the host's and the products' share")
    _add_model_options(step)
    step.add_argument("--steps", metavar="N", type=int, default=30, help="timed steps (default: 30)")
    step.set_defaults(run=run_step)
    kernels = add_command(group, "kernels", "device time of each kernel in a training step")
    _add_model_options(kernels)
    kernels.set_defaults(run=run_kernels)
    products = add_command(group, "matmul", "GFLOP/s of every variant of the matrix products")
    products.add_argument("--precision", choices=("f32", "mixed-f16"), default="f32", help="default: f32")
    _add_output_options(products)
    products.set_defaults(run=run_matmul)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", type=path, help="settings: a .toml or .json file")
    parser.add_argument("--preset", metavar="NAME", help="what the settings start from (default: stdlib-tiny)")
    add_set_option(parser)
    _add_output_options(parser)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="NAME", help="part of a GPU's name, or its number")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run_step(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from hybrid.backends.webgpu.bench import bench_step
    from hybrid.errors import ConfigError

    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: expected at least 1")
    session = open_session(arguments)
    try:
        report = {**_facts(session), **bench_step(session, steps=arguments.steps)}
    finally:
        session.close()
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"{report['adapter']}, {report['precision']}, batch {report['batch']} x {report['sequence']}")
    print(f"  step            {report['step_ms']:10.2f} ms   ({report['tokens_per_second']:,.0f} tokens/s)")
    print(f"  first step      {report['first_step_ms']:10.2f} ms")
    print(f"  host            {report['host_share']:10.1%} of the step")
    ratio = report["step_ms"] / report["products_ms"]
    print(f"  products        {report['products_ms']:10.2f} ms (the step is {ratio:.2f} times its matrix products)")
    print(f"  pipelines       {report['pipelines']:10d}")
    print(f"  readbacks       {report['readbacks']:10d} in {report['steps']} steps")
    return 0


def run_kernels(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from rich.console import Console

    from hybrid.backends.webgpu.bench import kernel_times
    from hybrid.cli.tables import table

    session = open_session(arguments)
    try:
        times = kernel_times(session)
        facts = _facts(session)
    finally:
        session.close()
    totals: dict[str, list[float]] = defaultdict(list)
    for time in times:
        totals[time.kernel].append(time.milliseconds)
    rows = sorted(((name, len(values), sum(values)) for name, values in totals.items()), key=lambda row: -row[2])
    whole = sum(row[2] for row in rows)
    if arguments.json:
        kernels = [{"kernel": name, "dispatches": count, "ms": ms} for name, count, ms in rows]
        print(json.dumps({**facts, "total_ms": whole, "kernels": kernels}))
        return 0
    shown = [(name, count, f"{ms:.3f}", f"{ms / whole:.1%}") for name, count, ms in rows]
    Console().print(table(("kernel", "dispatches", "ms", "share"), [*shown, ("all", len(times), f"{whole:.3f}", "")]))
    return 0


def run_matmul(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from rich.console import Console

    from hybrid.backends.webgpu.bench import bench_products
    from hybrid.backends.webgpu.device import open_device
    from hybrid.cli.tables import table

    device = open_device(arguments.adapter)
    try:
        results = bench_products(device, arguments.precision)
        name = device.name
    finally:
        device.close()
    if arguments.json:
        print(json.dumps({"adapter": name, "precision": arguments.precision, "products": results}))
        return 0
    rows = [(r["form"], f"{r['m']} x {r['n']} x {r['k']}", r["variant"], f"{r['gflops']:.2f}") for r in results]
    Console().print(table(("form", "m x n x k", "variant", "GFLOP/s"), rows))
    return 0


def open_session(arguments: argparse.Namespace, **options: Any) -> Any:
    """A WebGPU session for the model of the given settings, without data: ids are random."""
    from hybrid.backends.webgpu.session import WebGPUSession
    from hybrid.config.loading import load_config, to_settings
    from hybrid.config.machine import machine_memory
    from hybrid.config.resolve import model_config, optimizer_settings, resolve
    from hybrid.config.size import check_size

    config = load_config(
        arguments.config, arguments.preset, tuple(arguments.assignments), flags(arguments, adapter="backend.adapter")
    )
    vocabulary = config.model.vocabulary_size or 256
    check_size(config, "webgpu", machine_memory(), vocabulary)
    config = resolve(config, vocabulary, 10**6)
    with ProgressLine() as progress:
        return WebGPUSession(
            model_config(config),
            batch_size=config.data.microbatch_size or config.data.batch_size,
            sequence_length=config.data.sequence_length,
            precision=config.precision.type,
            optimizer=optimizer_settings(config),
            max_grad_norm=config.optimizer.max_norm or None,
            loss_scaling=to_settings(config)["lossScaling"],
            recompute=bool(config.backend.recompute),
            adapter=config.backend.adapter,
            metrics_interval=10,
            progress=progress,
            **options,
        )


def _facts(session: Any) -> dict[str, Any]:
    return {
        "adapter": session.device.name,
        "precision": session.plan.precision,
        "batch": session.plan.shape["B"],
        "sequence": session.plan.shape["T"],
    }
