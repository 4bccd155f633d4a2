"""What a run shows: JSON lines, plain lines, the live display, the curve."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid.config.tree import RunConfig
from hybrid.training.live import LiveView
from hybrid.training.plot import loss_plot, sparkline
from hybrid.training.runner import train
from hybrid.training.start import Request, Services
from hybrid.training.view import JsonView, PlainView, View, bytes_text, duration
from training.micro import Recorder, micro_config

STEP = {
    "loss": 4.5, "lr": 1e-3, "gradNorm": 1.5, "lossScale": 1.0, "skipped": 0, "tokensPerSecond": 900.0, "stepMs": 12.0,
    "memoryBytes": 2**20, "epoch": 0, "alerts": [],
}  # fmt: skip
SETTINGS = ("run.steps=8", "evaluation.every=4", "sampling.every=8", "sampling.tokens=4")


def show(folder: Path, view: View) -> None:
    train(Request(micro_config(folder, *SETTINGS), folder / "run"), Services(view=view))


def test_json_is_one_object_a_line(tmp_path: Path) -> None:
    out = io.StringIO()
    show(tmp_path, JsonView(out))
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all(isinstance(event, dict) and event["event"] for event in events)
    kinds = [event["event"] for event in events if event["event"] not in ("phase", "progress", "checkpoint")]
    assert kinds == ["run", "step", "validation", "step", "validation", "sample", "end"]
    assert sorted(event["step"] for event in events if event["event"] == "checkpoint") == [5, 8]


def test_each_stage_of_the_set_up_is_shown_however_short() -> None:
    view = Recorder()

    def make(config: RunConfig, note: Any, progress: Any) -> Any:
        for stage, done in (("timing", 0), ("timing", 1), ("compiling", 0), ("compiling", 1)):
            progress(stage, done, 2)

    services = Services(view=view, make_session=make, clock=lambda: 5.0)
    services.new_session(RunConfig())
    assert [(event["stage"], event["done"]) for event in view.of("progress")] == [("timing", 0), ("compiling", 0)]


def test_plain_lines_say_the_same_in_words(tmp_path: Path) -> None:
    out = io.StringIO()
    show(tmp_path, PlainView(out))
    text = out.getvalue()
    assert text.startswith("reading the data\npreparing the device\nrun micro in ")
    for part in (
        "run micro in ",
        "step 4/8  loss ",
        " tokens/s",
        "validation at step 8: loss ",
        "sample at step 8:\n  | the ",
    ):
        assert part in text
    assert f"saved step 8 to {tmp_path / 'run' / 'checkpoints' / 'step-00000008'}" in text
    assert text.endswith(f"finished at step 8: {tmp_path / 'run'}\n")


def test_the_live_view_shows_numbers_curve_and_sample(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40, color_system=None)
    show(tmp_path, LiveView(console))
    text = out.getvalue()
    for part in (
        "8/8",
        "tokens/s",
        "grad norm",
        "memory",
        "sample at step 8",
        "validation at step 8",
        "finished at step 8",
    ):
        assert part in text
    assert any(block in text for block in "▁▂▃▄▅▆▇█")


def test_the_live_view_leaves_how_far_a_stopped_run_came() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40, color_system=None)
    with LiveView(console) as view:
        view.event("phase", {"phase": "warm-up"})
        view.event("progress", {"stage": "compiling kernels", "done": 3, "total": 25})
        view.event("step", {**STEP, "step": 10, "steps": 60, "etaSeconds": 77.0})
        view.event("phase", {"phase": "save"})
        view.event("end", {"status": "stopped", "step": 14, "steps": 60, "message": "stopped, saved at step 14"})
    bar = next(line for line in reversed(out.getvalue().splitlines()) if "14/60" in line)
    assert "stopped" in bar and "left" not in bar and "kernels" not in bar


def test_the_live_view_takes_markup_in_a_sample_as_text() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=40, color_system=None)
    with LiveView(console) as view:
        view.event("sample", {"step": 3, "prompt": "[red]", "text": "[/nonsense] \x1b[2J [bold"})
        view.event("note", {"text": "[/oops]"})
    assert "[red][/nonsense]" in out.getvalue() and "[/oops]" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue(), "a sample cannot command the terminal"


def test_the_plot_is_xml_with_a_line_for_each_series() -> None:
    train_points = [(step, 5.0 / step) for step in range(1, 2000)]
    root = ElementTree.fromstring(loss_plot("a <run> & more", train_points, [(100, 0.3), (200, 0.2)]))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2
    points = [tuple(map(float, pair.split(","))) for pair in lines[0].attrib["points"].split()]
    assert 500 <= len(points) <= 600
    assert all(60 <= x <= 700 and 36 <= y <= 354 for x, y in points), "inside the axes"
    assert points[0][1] < points[-1][1], "a falling loss falls on the page"


@pytest.mark.parametrize(
    "points", [[], [(1.0, 2.0)], [(1.0, 3.0), (2.0, 3.0)], [(5.0, 0.0)], [(1.0, 1e-9), (2.0, 1e9)]]
)
def test_the_plot_takes_any_number_of_points(points: list[tuple[float, float]]) -> None:
    ElementTree.fromstring(loss_plot("run", points, []))
    ElementTree.fromstring(loss_plot("run", [], points))


def test_a_sparkline_is_as_wide_as_it_may_be() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert 5 <= len(sparkline([float(n) for n in range(97)], 10)) <= 10


def test_units() -> None:
    assert [duration(s) for s in (0.4, 59.4, 61, 3599, 3600, 90061)] == [
        "0s",
        "59s",
        "1m01s",
        "59m59s",
        "1h00m",
        "25h01m",
    ]
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "3072.0 GiB",
    ]
