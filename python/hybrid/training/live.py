"""The live view of a terminal: a progress bar, the numbers, a small loss curve and the latest sample."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from hybrid.training.plot import sparkline
from hybrid.training.view import WORTH_SAYING, Facts, QuietView, View, bytes_text, duration, event_text, printable

CURVE_POINTS = 4096  # losses kept for the curve; halved by joining neighbours when full


class LiveView(QuietView):
    """Redraws four times a second at most; notes, validation and checkpoints scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None),
            TextColumn("{task.fields[count]}"), TextColumn("{task.fields[eta]}"), console=console, expand=True,
        )  # fmt: skip
        self._begun = False  # whether the bar is that of the run, and no longer of its set-up
        self._set_up("starting", 0, None)
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
            self._begun = self._begun and facts["phase"] != "warm-up"  # again after a lost device
            if self._begun:
                self._progress.update(self._progress.task_ids[0], description=facts["phase"])
            else:
                self._set_up(facts["phase"], 0, None)
        elif kind == "progress":
            total = f" of {facts['total']:,}" if facts["total"] else ""
            self._set_up(f"{facts['stage']} {facts['done']:,}{total}", facts["done"], facts["total"])
        elif kind == "step":
            self._numbers = facts
            self._losses.append(facts["loss"])
            if len(self._losses) > CURVE_POINTS:
                self._losses = [sum(pair) / 2 for pair in zip(self._losses[::2], self._losses[1::2], strict=False)]
            eta = "" if facts["etaSeconds"] is None else f"{duration(facts['etaSeconds'])} left"
            self._stand(facts, eta)
            for name in facts["alerts"]:
                self._console.print(Text(f"alert at step {facts['step']}: {name}", style="bold red"))
        elif kind == "sample":
            self._sample = facts
        else:
            if kind in ("run", "end"):
                self._stand(facts)
            if kind == "validation":
                self._validation = facts["loss"]
            text = event_text(kind, facts)
            if text:
                self._console.print(Text(text))

    def _stand(self, facts: Facts, eta: str = "") -> None:
        """The bar shows how far the run is."""
        if not self._begun:
            self._set_up(facts.get("status", "train"), 0, facts["steps"])
            self._begun = True
        step, steps = facts["step"], facts["steps"]
        self._progress.update(
            self._progress.task_ids[0], description=facts.get("status"), completed=step, count=f"{step}/{steps}",
            eta=eta,
        )  # fmt: skip

    def _set_up(self, what: str, done: int, total: int | None) -> None:
        """The bar shows how far something is, and moves to and fro where nobody knows."""
        for old in self._progress.task_ids:
            self._progress.remove_task(old)
        self._progress.add_task(what, completed=done, total=total, count="", eta="")

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
        if facts.get("mfu") is not None:
            cells["MFU"] = f"{facts['mfu']:.1%}"
        if facts.get("dataWaitShare", 0) >= WORTH_SAYING:
            cells["data wait"] = f"{facts['dataWaitShare']:.0%}"
        table = Table(box=None, expand=True, show_header=True, header_style="dim")
        for name in cells:
            table.add_column(name, justify="left")
        table.add_row(*cells.values())
        return table
