"""A plain torch training loop at the shakespeare-char setting, fed the very batches that hybrid's loader makes.

The model and the loop are written from scratch in the usual way (one module per part, autograd, torch.optim.AdamW);
only text, batches and settings come from hybrid, so that a difference in loss is a difference in training.

    python benchmarks/torch_shakespeare.py [--text FILE] [--steps 2000] [--seed 1337] [--json]

Prints the validation loss over the whole split (sum over sum) and the median time of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import corpus
from hybrid.config.loading import load_config
from hybrid.data.batch import Batch
from hybrid.data.loader import BatchPlan, DataLoader, evaluation_batches
from hybrid.data.prepare import prepare


class Block(nn.Module):
    """Pre-norm attention and feed-forward, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(c, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Learned positions, tied head."""

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_sum(model: Transformer, batch: Batch, device: str = "cpu") -> Tensor:
    """Cross-entropy summed over the targets. Rows are one segment each at this setting, so the causal mask is all there
    is."""
    ids, positions, targets = (
        torch.from_numpy(array.astype(np.int64)).to(device) for array in (batch.ids, batch.positions, batch.targets)
    )
    targets = targets.where(targets != 0xFFFFFFFF, -100)
    return F.cross_entropy(model(ids, positions).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def rate(step: int, settings: Any, schedule: Any) -> float:
    """Linear warm-up, then half a cosine from lr to minLr. `step` counts from 1."""
    if step <= schedule.warmup_steps:
        return settings.lr * step / schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps - 1) / schedule.total_steps)
    return schedule.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (settings.lr - schedule.min_lr)


def run(text: Path, steps: int, seed: int) -> dict[str, Any]:
    config = load_config(preset="shakespeare-char", assignments=[f'data.source="{text}"', f"run.seed={seed}"])
    data = prepare(config.data)
    if data.validation is None:
        raise SystemExit("torch_shakespeare: the preset holds nothing out")
    torch.manual_seed(seed)
    model = Transformer(
        data.tokenizer.vocabulary_size,
        config.data.sequence_length,
        config.model.layers,
        config.model.width,
        config.model.heads,
    )
    settings = config.optimizer
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    plan = BatchPlan(len(data.train), config.data.batch_size, seed)
    seconds = []
    with DataLoader(data.train, plan, config.data.batch_size) as loader:
        for step in range(1, steps + 1):
            (batch,) = loader.step(step)
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate(step, settings, config.schedule)
            loss = loss_sum(model, batch) / batch.target_tokens
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            if step % 200 == 0:
                print(f"step {step}: {loss.item():.4f}", file=sys.stderr)
    model.eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for batch in evaluation_batches(data.validation, 128):
            total += loss_sum(model, batch).item()
            targets += batch.target_tokens
    return {
        "name": "torch",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dataset": data.fingerprint,
        "steps": steps,
        "seed": seed,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "validation_loss": total / targets,
        "validation_targets": targets,
        "step_s": statistics.median(seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="tinyshakespeare.txt (default: where the checkout keeps it)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    result = run(corpus(arguments.text), arguments.steps, arguments.seed)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{'':8}{'parameters':>12}{'steps':>8}{'validation loss':>18}{'step':>12}")
        print(
            f"{result['name']:8}{result['parameters']:>12,}{result['steps']:>8}"
            f"{result['validation_loss']:>18.4f}{result['step_s'] * 1e3:>9.1f} ms"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
