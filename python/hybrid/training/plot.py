"""The loss curve as a small SVG: training and validation loss over steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from hybrid.training import metrics_log
from hybrid.training.metrics_log import read_rows

FILE = "loss.svg"

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 36, 46
TRAIN, VALIDATION, INK, GRID = "#2563eb", "#dc2626", "#374151", "#e5e7eb"
FONT = 'font-family="sans-serif" font-size="12"'
MOST_POINTS = 600


def draw_losses(run_dir: Path, name: str) -> None:
    """Write the loss curve of the run in `run_dir`, if it has any."""
    entries = read_rows(run_dir / metrics_log.METRICS)
    train = [(row["step"], row["total_loss"]) for row in entries if not row["loss_overflow"]]
    validation = [(row["step"], row["loss"]) for row in read_rows(run_dir / metrics_log.VALIDATION)]
    if train:
        (run_dir / FILE).write_text(loss_plot(name, train, validation), encoding="utf-8")


def loss_plot(title: str, train: Sequence[Point], validation: Sequence[Point]) -> str:
    """SVG text of two polylines of (step, loss) points with axes. Without points, axes alone."""
    everything = [*train, *validation]
    xs, ys = [p[0] for p in everything], [p[1] for p in everything]
    x_low, x_high = 0.0, max(xs, default=1.0) or 1.0
    y_low, y_high = min(ys, default=0.0), max(ys, default=1.0)
    y_ticks = _ticks(y_low, y_high)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def place(point: Point) -> str:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = TOP + (y_high - point[1]) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    def text(x: float | str, y: float | str, words: str, style: str) -> str:
        return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'

    ink, right = f'fill="{INK}"', WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 20, title, f'font-size="14" {ink}'),
    ]
    for tick in y_ticks:
        y = place((x_low, tick)).split(",")[1]
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 8, y, f"{tick:g}", f'dy="4" text-anchor="end" {ink}'))
    for tick in _ticks(x_low, x_high):
        if tick <= x_high:
            x = place((tick, y_low)).split(",")[0]
            parts.append(text(x, HEIGHT - BOTTOM + 18, f"{tick:g}", f'text-anchor="middle" {ink}'))
    parts.append(text((LEFT + right) / 2, HEIGHT - 8, "step", f'text-anchor="middle" {ink}'))
    for points, colour, width in ((_thinned(train), TRAIN, 1.5), (validation, VALIDATION, 2)):
        if points:
            line = " ".join(place(point) for point in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for index, (label, colour) in enumerate((("training loss", TRAIN), ("validation loss", VALIDATION))):
        parts.append(text(right - 240 + 120 * index, 20, label, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line of block characters, at most `width` of them, each the mean of its share."""
    blocks = "▁▂▃▄▅▆▇█"
    if not values:
        return ""
    means = [point[1] for point in _thinned([(index, value) for index, value in enumerate(values)], width)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in means)


def _thinned(points: Iterable[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points, each the mean of equally many neighbours."""
    points = list(points)
    size = ceil(len(points) / most) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that cover the range."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** floor(log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = floor(low / step), ceil(high / step)
    if first == last:
        last += 1
    return [round(index * step, 12) for index in range(first, last + 1)]
