"""Training on a CUDA device: a 0.8 B Llama-style model in bf16, 124 M beside a plain loop, and WGSL beside torch.

    python benchmarks/torch_cuda.py [llama] [gpt2] [wgsl] [--device cuda] [--steps 30] [--set KEY=VALUE ...] [--json]

llama: tokens/s and the share of the device's peak (MFU) of 21 layers x 1,792, 4,096 tokens a row, bf16, compiled layers
that are run again in their backward pass but for products and attention. gpt2: torch_step.py at 12 layers x 768, 1,024
tokens a row, bf16, both loops compiled. wgsl: the same step in f32 through the WGSL kernels and through torch (exact
products, no TF32) on the device, in turns; and what share of each step the products are. Every part trains on random
tokens, or on the text of torch_step.py; --set makes the models of all parts smaller, to try the command elsewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_step
from common import corpus
from hybrid.backends.protocol import StepInfo, TrainingSession
from hybrid.backends.torch.session import TorchSession
from hybrid.backends.webgpu.bench import bench_step, random_batch
from hybrid.cli.commands.bench import open_session
from hybrid.config.loading import load_config
from hybrid.config.resolve import model_config, resolve
from hybrid.config.tree import RunConfig
from hybrid.training.sessions import torch_settings
from hybrid.training.utilisation import peak_flops, utilisation

LLAMA = (
    *("model.layers=21", "model.width=1792", "model.heads=28", "model.kvHeads=7", "model.vocabularySize=32768"),
    *("model.tiedEmbeddings=false", "data.sequenceLength=4096", "data.batchSize=4"),
    *("precision.type=mixed-bf16", "backend.recompute=selective"),
)
GPT2 = (
    *("model.layers=12", "model.width=768", "model.heads=12", "model.vocabularySize=50257", "model.contextLength=1024"),
    *("model.feedForwardWidth=null", "data.sequenceLength=1024", "data.batchSize=16", "precision.type=mixed-bf16"),
)
SMALL = (
    *("model.layers=8", "model.width=512", "model.heads=8", "model.vocabularySize=8192", "data.sequenceLength=512"),
    *("data.batchSize=8", "precision.type=f32"),
)
# What the project aims at, each as (text, whether a result keeps it).
PROMISES: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "llama": ("at least 36 % of the peak, as published neighbours", lambda r: (r["mfu_full"] or 0.0) >= 0.36),
    "gpt2": ("at least as fast as the plain loop, compiled", lambda r: r["time_ratio"]["plain"] <= 1.02),
}


def settings(base: tuple[str, ...], arguments: argparse.Namespace) -> list[str]:
    return [*base, f"backend.device={arguments.device}", *arguments.assignments]


def resolved(assignments: list[str]) -> RunConfig:
    loaded = load_config(assignments=assignments)
    return resolve(loaded, loaded.model.vocabulary_size or 256, 10**6)


def llama(arguments: argparse.Namespace) -> dict[str, Any]:
    config = resolved([*settings(LLAMA, arguments)])
    model = model_config(config)
    began = time.perf_counter()
    session = TorchSession(model, **torch_settings(config))
    set_up = time.perf_counter() - began
    seconds = torch_steps(session, config, arguments.steps)
    described = session.describe()
    tokens = config.data.batch_size * config.data.sequence_length
    speed = tokens / seconds
    peak = peak_flops(described["adapter"], config.precision.type, config.precision.numerics)
    share = None if peak is None else utilisation(model, config.data.sequence_length, speed, peak)
    return {
        "device": described["adapter"],
        "mode": described["mode"],
        "parameters": sum(weight.numel() for weight in session._root.parameters()),
        "set_up_s": set_up,
        "step_s": seconds,
        "tokens_per_second": speed,
        "mfu_full": share and share.full,
        "mfu_causal": share and share.causal,
        "utilisation": share.text() if share else "this device has no known peak",
        "memory": session.memory(),
    }


def torch_steps(session: TrainingSession, config: RunConfig, steps: int) -> float:
    """Seconds of a step, over `steps` that follow each other without waiting."""
    batch = random_batch(session.model.vocabulary_size, config.data.batch_size, config.data.sequence_length)  # type: ignore[attr-defined]
    began = 0.0
    warm = max(3, steps // 5)
    for step in range(1, warm + steps + 1):
        if step == warm + 1:
            session.poll_metrics(wait=True)
            began = time.perf_counter()
        session.begin(StepInfo(step, batch.target_tokens, 1))
        session.accumulate(batch)
        session.apply()
        session.poll_metrics()
    session.poll_metrics(wait=True)
    return (time.perf_counter() - began) / steps


def gpt2(arguments: argparse.Namespace) -> dict[str, Any]:
    return torch_step.run(corpus(arguments.text), arguments.steps, True, [*settings(GPT2, arguments)], arguments.device)


def wgsl(arguments: argparse.Namespace) -> dict[str, Any]:
    assignments = settings(SMALL, arguments)
    config = resolved(assignments)
    ours = open_session(argparse.Namespace(config=None, preset=None, adapter=None, assignments=assignments))
    theirs = TorchSession(model_config(config), **torch_settings(config))
    reports = [bench_step(ours, steps=arguments.steps) for _ in range(3)]
    seconds = []
    for _ in range(3):
        seconds.append(torch_steps(theirs, config, arguments.steps))
        reports.append(bench_step(ours, steps=arguments.steps))
    products = torch_products(ours, theirs.device)
    report = min(reports, key=lambda report: report["step_ms"])
    return {
        "adapter": ours.describe()["gpuAdapter"]["name"],
        "torch": theirs.describe()["adapter"],
        "wgsl": {"step_ms": report["step_ms"], "products_ms": report["products_ms"]},
        "torch_f32": {"step_ms": min(seconds) * 1e3, "products_ms": products},
        "times_torch": report["step_ms"] / (min(seconds) * 1e3),
        "products_times_torch": report["products_ms"] / products,
    }


def torch_products(session: Any, device: torch.device) -> float:
    """Milliseconds of the products of a step, in torch: forward, and both of the backward part."""
    model, shape = session.model, session.plan.shape
    rows, c, f, d = shape["B"] * shape["T"], model.width, model.feed_forward_width, model.head_width
    maps = [(c, model.heads * d), (c, model.kv_heads * d), (c, model.kv_heads * d), (model.heads * d, c)]
    maps += [(c, f)] * (2 if model.gated else 1) + [(f, c)]
    maps = maps * len(model.schedule) + [(c, model.vocabulary_size)]
    held = [(torch.randn(rows, i, device=device), torch.randn(o, i, device=device)) for i, o in maps]
    times = []
    for _ in range(10):
        wait(device)
        began = time.perf_counter()
        for x, weight in held:
            y = x @ weight.T
            y @ weight
            y.T @ x
        wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:]) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PARTS = {"llama": llama, "gpt2": gpt2, "wgsl": wgsl}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", metavar="PART", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--text", type=Path, help="tinyshakespeare.txt (default: where the checkout keeps it)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="assignments")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"torch_cuda: torch {torch.__version__} finds no CUDA device here; --device cpu tries the command"
        )
    result: dict[str, Any] = {}
    for name in parts:
        result[name] = PARTS[name](arguments)
        if arguments.device == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()
    result["promises"] = {
        f"{name}: {text}": bool(keeps(result[name])) for name, (text, keeps) in PROMISES.items() if name in result
    }
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
