"""One training step of the torch backend beside a plain torch loop, on the same batches, taken in turns.

The plain loop is that of torch_shakespeare.py. Both train at the shakespeare-char setting, or at the widths given; a
pair of steps is one measurement, so that whatever else the machine does meets both alike.

    python benchmarks/torch_step.py [--text FILE] [--steps 200] [--compile] [--device cuda] [--set KEY=VALUE] [--json]

Prints the median time of a step, the losses of the last steps, tokens per second and, where the device's peak is known,
the share of it that is used; and whether the torch backend is as fast and as good as the loop. Both compute the same
model; they differ in their initial weights and in what dropout leaves out. With --compile both are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import corpus
from hybrid.backends.protocol import StepInfo
from hybrid.backends.torch.session import TorchSession
from hybrid.config.loading import load_config
from hybrid.config.resolve import model_config, resolve
from hybrid.data.batch import Batch
from hybrid.data.loader import BatchPlan, DataLoader
from hybrid.data.prepare import prepare
from hybrid.training.sessions import torch_settings
from hybrid.training.utilisation import flops_per_token, peak_flops, utilisation
from torch_shakespeare import Transformer, loss_sum, rate

# What the project promises, each as (text, whether a result keeps it). The ratio is of the two steps of a pair; a
# fiftieth is what its median is uncertain by, and initial weights alone make that much difference to a loss.
PROMISES = {
    "at least as fast as the plain loop": lambda r: r["time_ratio"] <= 1.02,
    "as good as the plain loop": lambda r: r["last_losses"]["hybrid"] <= r["last_losses"]["plain"] + 0.02,
}


def run(text: Path, steps: int, compiled: bool, assignments: list[str], device: str = "cpu") -> dict[str, Any]:
    given = [f'data.source="{text}"', f"backend.device={device}", f"backend.compile={str(compiled).lower()}"]
    given += assignments
    loaded = load_config(preset="shakespeare-char", assignments=given)
    data = prepare(loaded.data)
    config = resolve(loaded, data.tokenizer.vocabulary_size, len(data.train))
    model = model_config(config)
    session = TorchSession(model, **torch_settings(config))

    settings, schedule = config.optimizer, config.schedule
    torch.manual_seed(1337)
    plain = Transformer(model.vocabulary_size, model.context_length, model.layers, model.width, model.heads).to(device)
    matrices = [weight for weight in plain.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in plain.parameters() if weight.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True,
    )  # fmt: skip
    model_of_plain = torch.compile(plain) if compiled else plain

    def plain_step(step: int, batch: Batch) -> float | torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, settings, schedule)
        with torch.autocast(device, torch.bfloat16, enabled=config.precision.type == "mixed-bf16"):
            loss = loss_sum(model_of_plain, batch, device) / batch.target_tokens
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), settings.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def hybrid_step(step: int, batch: Batch) -> float | torch.Tensor:
        session.begin(StepInfo(step, batch.target_tokens, 1))
        session.accumulate(batch)
        session.apply()
        return session.poll_metrics(wait=True)[0].loss

    taken = {"plain": plain_step, "hybrid": hybrid_step}
    times: dict[str, list[float]] = {"plain": [], "hybrid": []}
    losses: dict[str, list[float]] = {"plain": [], "hybrid": []}
    with DataLoader(
        data.train, BatchPlan(len(data.train), config.data.batch_size, 1337), config.data.batch_size
    ) as loader:
        for step in range(1, steps + 1):
            (batch,) = loader.step(step)
            # Whoever comes second finds the batch in the caches: they take turns.
            for name in sorted(taken, reverse=bool(step % 2)):
                began = time.perf_counter()
                loss = float(taken[name](step, batch))  # it waits for the device
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
            "plain": sum(weight.numel() for weight in plain.parameters()),
            "hybrid": sum(weight.numel() for weight in session._root.parameters()),
        },
        "step_s": medians,
        "time_ratio": statistics.median(h / p for h, p in zip(warm["hybrid"], warm["plain"], strict=True)),
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
    for name in ("plain", "hybrid"):
        print(f"{name:8}{result['step_s'][name] * 1e3:>9.2f} ms a step   loss {result['last_losses'][name]:.4f}")
    for text, kept in result["promises"].items():
        print(f"  {'kept' if kept else 'NOT KEPT'}: {text}")
    print(f"{result['tokens_per_second']:,.0f} tokens/s; {result['utilisation'] or 'this device has no known peak'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
