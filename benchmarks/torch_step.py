"""One training step of the torch backend beside a plain torch loop, on the same batches, taken in turns.

The plain loop is that of torch_shakespeare.py, with the optimizer that such loops take: torch's AdamW as it comes,
fused on CUDA only. On a CPU a third one joins, the same loop with a fused AdamW, which is what the torch backend has.
All train at the shakespeare-char setting, or at the widths given; a round of steps is one measurement, so that whatever
else the machine does meets all alike.

    python benchmarks/torch_step.py [--text FILE] [--steps 200] [--compile] [--device cuda] [--set KEY=VALUE] [--json]

Prints the median time of a step, the losses of the last steps, tokens per second and, where the device's peak is known,
the share of it that is used; and whether the torch backend is as fast and as good as the loop. All compute the same
model; they differ in their initial weights and in what dropout leaves out. With --compile all are compiled.
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
from torch import nn

from common import corpus
from hybrid.backends.protocol import StepInfo
from hybrid.backends.torch.session import TorchSession
from hybrid.config.loading import load_config
from hybrid.config.resolve import model_config, resolve
from hybrid.config.tree import RunConfig
from hybrid.data.batch import Batch
from hybrid.data.loader import BatchPlan, DataLoader
from hybrid.data.prepare import prepare
from hybrid.models.config import ModelConfig
from hybrid.training.sessions import torch_settings
from hybrid.training.utilisation import flops_per_token, peak_flops, utilisation
from torch_shakespeare import Transformer, loss_sum, rate

# What the project promises, each as (text, whether a result keeps it). A ratio is of two steps of one round; initial
# weights alone make a fiftieth of difference to a loss.
PROMISES = {
    "at least as fast as the plain loop": lambda r: r["time_ratio"]["plain"] <= 1.0,
    "as good as the plain loop": lambda r: r["last_losses"]["hybrid"] <= r["last_losses"]["plain"] + 0.02,
}


class Plain:
    """The plain loop, step by step."""

    def __init__(self, config: RunConfig, shape: ModelConfig, device: str, compiled: bool, *, fused: bool) -> None:
        torch.manual_seed(1337)
        self.config, self.device = config, device
        self.model = Transformer(
            shape.vocabulary_size, shape.context_length, shape.layers, shape.width, shape.heads
        ).to(device)
        weights, settings = list(self.model.parameters()), config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for w in weights if w.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=fused or None,
        )
        self._run: Any = torch.compile(self.model) if compiled else self.model

    def __call__(self, step: int, batch: Batch) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, self.config.optimizer, self.config.schedule)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.config.precision.type == "mixed-bf16"):
            loss = loss_sum(self._run, batch, self.device) / batch.target_tokens
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def run(text: Path, steps: int, compiled: bool, assignments: list[str], device: str = "cpu") -> dict[str, Any]:
    given = [f'data.source="{text}"', f"backend.device={device}", f"backend.compile={str(compiled).lower()}"]
    given += assignments
    loaded = load_config(preset="shakespeare-char", assignments=given)
    data = prepare(loaded.data)
    config = resolve(loaded, data.tokenizer.vocabulary_size, len(data.train))
    model = model_config(config)
    session = TorchSession(model, **torch_settings(config))

    plain = {"plain": Plain(config, model, device, compiled, fused=device == "cuda")}
    if device == "cpu":
        plain["plain, fused"] = Plain(config, model, device, compiled, fused=True)

    def hybrid_step(step: int, batch: Batch) -> float | torch.Tensor:
        session.begin(StepInfo(step, batch.target_tokens, 1))
        session.accumulate(batch)
        session.apply()
        return session.poll_metrics(wait=True)[0].loss

    steppers: dict[str, Callable[[int, Batch], float | torch.Tensor]] = {**plain, "hybrid": hybrid_step}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    losses: dict[str, list[float]] = {name: [] for name in steppers}
    with DataLoader(
        data.train, BatchPlan(len(data.train), config.data.batch_size, 1337), config.data.batch_size
    ) as loader:
        for step in range(1, steps + 1):
            (batch,) = loader.step(step)
            # Whoever comes later finds the batch in the caches: they take turns.
            for turn in range(len(steppers)):
                name = list(steppers)[(step + turn) % len(steppers)]
                began = time.perf_counter()
                loss = float(steppers[name](step, batch))  # it waits for the device
                times[name].append(time.perf_counter() - began)
                losses[name].append(loss)
    described = session.describe()
    tokens = config.data.batch_size * config.data.sequence_length
    warm = {name: values[steps // 10 :] for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in warm.items()}
    speed = tokens / medians["hybrid"]
    peak = peak_flops(described["adapter"], config.precision.type, config.precision.numerics)
    result = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "mode": described["mode"],
        "steps": steps,
        "parameters": {
            "plain": sum(weight.numel() for weight in plain["plain"].model.parameters()),
            "hybrid": sum(weight.numel() for weight in session._root.parameters()),
        },
        "step_s": medians,
        "time_ratio": {
            name: statistics.median(h / p for h, p in zip(warm["hybrid"], warm[name], strict=True)) for name in plain
        },
        "last_losses": {name: statistics.fmean(values[-20:]) for name, values in losses.items()},
        "tokens_per_second": speed,
        "flop_per_token": flops_per_token(model, config.data.sequence_length).full,
        "utilisation": None if peak is None else utilisation(model, config.data.sequence_length, speed, peak).text(),
    }
    result["promises"] = {text: bool(keeps(result)) for text, keeps in PROMISES.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="tinyshakespeare.txt (default: where the checkout keeps it)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="let torch compile the layers, and the plain model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="assignments")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    result = run(corpus(arguments.text), arguments.steps, arguments.compile, arguments.assignments, arguments.device)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"torch {result['torch']}, {result['threads']} thread(s), torch backend {result['mode']}")
    for name, seconds in result["step_s"].items():
        print(f"{name:14}{seconds * 1e3:>9.2f} ms a step   loss {result['last_losses'][name]:.4f}")
    for name, ratio in result["time_ratio"].items():
        print(f"  hybrid takes {ratio:.3f} times as long as {name}")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    print(f"{result['tokens_per_second']:,.0f} tokens/s; {result['utilisation'] or 'this device has no known peak'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
