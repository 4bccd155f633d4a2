"""The live view of a terminal: a progress bar, the numbers, a small loss curve and the latest sample."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from hybrid.training.plot import sparkline
from hybrid.training.view import Facts, QuietView, View, bytes_text, duration, event_text, printable

CURVE_POINTS = 4096  # losses kept for the curve; halved by joining neighbours when full


class LiveView(QuietView):
    """Redraws four times a second at most; notes, validation and checkpoints scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"), console=console, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=None, eta="")
        self._numbers: Facts | None = None
        self._losses: list[float] = []
        self._validation: float | None = None
        self._sample: Facts | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def event(self, kind: str, facts: Facts) -> None:
        if kind == "phase":
            self._progress.update(self._task, description=facts["phase"])
        elif kind == "progress":
            total = f" of {facts['total']:,}" if facts["total"] else ""
            self._progress.update(self._task, description=f"{facts['stage']} {facts['done']:,}{total}")
        elif kind == "step":
            self._numbers = facts
            self._losses.append(facts["loss"])
            if len(self._losses) > CURVE_POINTS:
                self._losses = [sum(pair) / 2 for pair in zip(self._losses[::2], self._losses[1::2], strict=False)]
            eta = "" if facts["etaSeconds"] is None else f"{duration(facts['etaSeconds'])} left"
            self._progress.update(self._task, completed=facts["step"], total=facts["steps"], eta=eta)
            for name in facts["alerts"]:
                self._console.print(Text(f"alert at step {facts['step']}: {name}", style="bold red"))
        elif kind == "sample":
            self._sample = facts
        else:
            if kind == "run":
                self._progress.update(self._task, completed=facts["step"], total=facts["steps"])
            if kind == "validation":
                self._validation = facts["loss"]
            text = event_text(kind, facts)
            if text:
                self._console.print(Text(text))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self._numbers is not None:
            parts.append(self._table(self._numbers))
            parts.append(Text(sparkline(self._losses, max(10, self._console.width - 4)), style="cyan"))
        if self._sample is not None:
            text = Text(printable(self._sample["prompt"]), style="bold") + Text(printable(self._sample["text"]))
            parts.append(Panel(text, title=f"sample at step {self._sample['step']}", title_align="left", height=8))
        return Group(*parts)

    def _table(self, facts: Facts) -> Table:
        cells = {
            "loss": f"{facts['loss']:.4f}",
            "validation": "" if self._validation is None else f"{self._validation:.4f}",
            "lr": f"{facts['lr']:.2e}",
            "grad norm": "" if facts["gradNorm"] is None else f"{facts['gradNorm']:.2f}",
            "tokens/s": f"{facts['tokensPerSecond']:,.0f}",
            "step": f"{facts['stepMs']:.0f} ms",
            "memory": bytes_text(facts["memoryBytes"]),
        }
        table = Table(box=None, expand=True, show_header=True, header_style="dim")
        for name in cells:
            table.add_column(name, justify="left")
        table.add_row(*cells.values())
        return table
