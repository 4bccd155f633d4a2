"""A whole training step of tinygrad's WEBGPU backend (Dawn) at the model size that hybrid is measured at.

4 layers, width 128, 4 heads, vocabulary 256, batch 4 x 64: forward, backward and AdamW, captured by TinyJit. It prints
the median of warm steps, and the first step, which compiles. tinygrad and Dawn live in an environment of their own:

    make benchmark-env
    .venv-benchmarks/bin/python benchmarks/tinygrad_step.py [--steps 20] [--json]

The Vulkan driver is the machine's (lavapipe where there is no GPU); VK_ICD_FILENAMES chooses another.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, TIME = 4, 128, 4, 256, 4, 64


def point_to_dawn() -> None:
    """tinygrad takes the path of Dawn's library from the environment, before it is imported."""
    spec = importlib.util.find_spec("pydawn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("tinygrad_step: dawn-python is not installed here; run `make benchmark-env`")
    library = {
        ("Linux", "x86_64"): "libwebgpu_dawn_x86_64.so",
        ("Linux", "aarch64"): "libwebgpu_dawn_aarch64.so",
        ("Darwin", "x86_64"): "libwebgpu_dawn_x86_64.dylib",
        ("Darwin", "arm64"): "libwebgpu_dawn_arm64.dylib",
    }[platform.system(), platform.machine()]
    os.environ.setdefault("WEBGPU_PATH", str(Path(spec.submodule_search_locations[0]) / "lib" / library))
    os.environ["DEV"] = "WEBGPU"
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())


def adapter() -> str:
    """What Dawn calls the adapter that tinygrad takes: driver and version."""
    from tinygrad.runtime import ops_webgpu as backend

    api = backend.webgpu
    options = api.WGPURequestAdapterOptions(powerPreference=api.WGPUPowerPreference_HighPerformance)
    info = api.WGPUAdapterInfo()
    api.wgpuAdapterGetInfo(backend.InstanceRequestAdapter(backend.instance, options), info)
    return backend.from_wgpu_str(info.description)


def measure(steps: int) -> dict[str, object]:
    from tinygrad import Context, Device, Tensor, TinyJit, dtypes
    from tinygrad.nn.optim import AdamW

    Tensor.manual_seed(1337)

    def matrix(rows: int, columns: int) -> Tensor:
        return (Tensor.randn(rows, columns) * 0.02).realize()

    def gain() -> Tensor:
        return Tensor.ones(WIDTH).realize()

    tokens, places, last = matrix(VOCABULARY, WIDTH), matrix(TIME, WIDTH), gain()
    layers = [
        {
            "norm1": gain(), "qkv": matrix(3 * WIDTH, WIDTH), "out": matrix(WIDTH, WIDTH),
            "norm2": gain(), "up": matrix(4 * WIDTH, WIDTH), "down": matrix(WIDTH, 4 * WIDTH),
        }
        for _ in range(LAYERS)
    ]  # fmt: skip
    parameters = [tokens, places, last, *(leaf for layer in layers for leaf in layer.values())]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        x = tokens[ids] + places
        for layer in layers:
            qkv = norm(x, layer["norm1"]).linear(layer["qkv"].T)
            q, k, v = (part.reshape(BATCH, TIME, HEADS, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
            attended = q.scaled_dot_product_attention(k, v, is_causal=True)
            x = x + attended.transpose(1, 2).reshape(BATCH, TIME, WIDTH).linear(layer["out"].T)
            x = x + norm(x, layer["norm2"]).linear(layer["up"].T).gelu().linear(layer["down"].T)
        logits = norm(x, last).linear(tokens.T)
        return logits.reshape(-1, VOCABULARY).sparse_categorical_crossentropy(targets.reshape(-1))

    optimizer = AdamW(parameters, lr=1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

    @TinyJit
    def step(ids: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(ids, targets)
        value.backward()
        optimizer.step()
        return value.realize()

    # One fixed batch, so that the loss has to fall.
    stream = Tensor.randint(BATCH, TIME + 1, high=VOCABULARY, dtype=dtypes.int32).realize()
    ids, targets = stream[:, :-1].contiguous().realize(), stream[:, 1:].contiguous().realize()
    seconds, losses = [], []
    with Context(TRAINING=1):
        for _ in range(steps + 3):  # tinygrad runs plainly, then captures, then replays
            began = time.perf_counter()
            value = step(ids, targets)
            Device[Device.DEFAULT].synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(float(value.item()))
    if not losses[-1] < losses[0]:
        raise SystemExit(f"tinygrad_step: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}: it does not learn")
    warm = seconds[3:]
    return {
        "name": "tinygrad WEBGPU",
        "versions": {"tinygrad": version("tinygrad"), "dawn-python": version("dawn-python")},
        "adapter": adapter(),
        "model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY, "batch": [BATCH, TIME]},
        "parameters": sum(int(leaf.numel()) for leaf in parameters),
        "first_step_s": seconds[0],
        "set_up_s": sum(seconds[:3]),
        "step_s": statistics.median(warm),
        "steps_s": warm,
        "losses": [losses[0], losses[-1]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="warm steps to time (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    point_to_dawn()
    result = measure(arguments.steps)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'':24}{'first step':>12}{'warm step':>12}{'parameters':>12}")
    print(f"{result['name']:24}{result['first_step_s']:>10.2f} s{result['step_s']:>10.3f} s{result['parameters']:>12,}")
    print(f"adapter: {result['adapter']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
