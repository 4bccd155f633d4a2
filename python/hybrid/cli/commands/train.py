"""`hybrid train`: train a model, or go on with a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.cli import early
from hybrid.cli.parser import Subparsers, add_backend_options, add_command, add_set_option, flags, path
from hybrid.errors import ConfigError

if TYPE_CHECKING:
    from hybrid.training.outcome import Outcome
    from hybrid.training.signals import StopFlag
    from hybrid.training.start import Request, Services

DESCRIPTION = """\
Train a model. Without arguments: a small Llama-style model on the source files of Python's standard
library, in runs/stdlib-tiny.

Settings come from a preset, then CONFIG (TOML or JSON), then --set, then the options below; docs/configuration.md
lists them. A run folder that holds checkpoints goes on from its newest one; so the same command, given
again after a stop, continues.

exit codes: 0 finished, 1 failed, 2 usage or configuration, 3 refused (the checkpoint disagrees),
4 alert, 75 stopped on request after saving (start it again)"""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "train", "train a model, or go on with a run", DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", nargs="?", type=path, help="settings: a .toml or .json file")
    parser.add_argument(
        "--preset", metavar="NAME",
        help="what the settings start from: stdlib-tiny (the default), llama-tiny, shakespeare-char or gpt2-small",
    )  # fmt: skip
    add_backend_options(parser, "auto, webgpu, reference, torch (on CUDA or the CPU) or browser")
    parser.add_argument(
        "--headless", action="store_true", help="with --backend browser: in a Chromium without a window"
    )
    parser.add_argument("--run-dir", metavar="DIR", type=path, help="the run's folder (default: runs/NAME)")
    parser.add_argument("--steps", metavar="N", type=int, help="optimizer steps of the whole run")
    parser.add_argument("--seed", metavar="N", type=int, help="of initial weights, data order and dropout")
    parser.add_argument(
        "--resume", metavar="auto|never|PATH", default="auto", type=_resume,
        help="go on from the run's newest checkpoint (auto, the default), begin a new run (never), or go on from PATH",
    )  # fmt: skip
    parser.add_argument(
        "--accept-change", metavar="FIELD", action="append", default=[], dest="accepted",
        help="a field in which the run may differ from its checkpoint; can be repeated, and needs --reason",
    )  # fmt: skip
    parser.add_argument("--reason", metavar="TEXT", help="why; it is recorded in the run's lineage")
    add_set_option(parser)
    parser.add_argument(
        "--profile", metavar="STEPS", type=int, help="with --backend torch: record that many steps with its profiler"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check data, settings, resume and memory, and train nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line on standard output, and nothing else"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from hybrid.cli.views import choose_view
    from hybrid.training.signals import StopFlag
    from hybrid.training.start import Services
    from hybrid.training.view import QuietView

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # started by torchrun
    speaks = not several or os.environ.get("RANK") == "0"
    view = choose_view(arguments.json) if speaks else QuietView()
    stop = StopFlag()
    services = Services(view=view, stop=stop)
    train, dry_run = _on_ranks(arguments) if several else _alone(arguments, stop)
    with stop.installed():
        reason = early.hand_over()
        if reason is not None:
            stop.request(reason)
        if not arguments.dry_run:
            return train(services).exit_code
        facts = dry_run(services)
    if arguments.json:
        view.event("dry-run", facts)
    elif speaks:
        from hybrid.training.dry_run import dry_run_text

        print(dry_run_text(facts))
    return 0


Train = Callable[["Services"], "Outcome"]
DryRun = Callable[["Services"], dict[str, Any]]


def _alone(arguments: argparse.Namespace, stop: StopFlag) -> tuple[Train, DryRun]:
    """How to train in this process (or in a browser), and how to look whether that would go well."""
    request = make_request(arguments)
    stop.limit(request.config.run.max_hours)
    if request.config.backend.name == "browser":
        from hybrid.bridge.launch import dry_run_in_browser, train_in_browser

        headless = arguments.headless
        return (
            lambda services: train_in_browser(request, services, headless=headless),
            lambda services: dry_run_in_browser(request, services, headless=headless),
        )
    from hybrid.training.dry_run import dry_run
    from hybrid.training.runner import train

    return partial(train, request), partial(dry_run, request)


def _on_ranks(arguments: argparse.Namespace) -> tuple[Train, DryRun]:
    """The same over all processes that torchrun started, of which the first reads the settings."""
    from hybrid.training.ranks import dry_run_on_ranks, train_on_ranks

    ask = partial(make_request, arguments)
    return partial(train_on_ranks, ask), partial(dry_run_on_ranks, ask)


def make_request(arguments: argparse.Namespace) -> Request:
    """What the command line asks for. Raises ConfigError, CheckpointNotFound and CheckpointCorrupt; makes no folder
    but that of `--resume never`."""
    from hybrid.config.loading import load_config
    from hybrid.training.run_files import RUNS, new_run_dir, saved_settings
    from hybrid.training.start import Request

    resume: Any = arguments.resume
    run_dir: Path | None = arguments.run_dir
    if run_dir is None and isinstance(resume, Path):
        run_dir, resume = place_of(resume)
    config = load_config(
        arguments.config,
        arguments.preset,
        arguments.assignments,
        flags(arguments, backend="backend.name", adapter="backend.adapter", steps="run.steps", seed="run.seed"),
        base=saved_settings(run_dir, resume),
    )
    if arguments.headless and config.backend.name != "browser":
        raise ConfigError(f"--headless goes with --backend browser, not with {config.backend.name}")
    if run_dir is None:
        run_dir = RUNS / config.run.name
        if resume == "never" and not arguments.dry_run:
            run_dir = new_run_dir(run_dir)
    return Request(config, run_dir, resume, tuple(arguments.accepted), arguments.reason, profile=arguments.profile)


def _resume(text: str) -> Any:
    return text if text in ("auto", "never") else path(text)


def place_of(path: Path) -> tuple[Path, Any]:
    """(run folder, what to resume) for `--resume PATH` without --run-dir: the run itself where PATH is its newest
    checkpoint, else a new folder beside it; for an archive a new one among the runs."""
    from hybrid.checkpoint import archive, finding
    from hybrid.training.run_files import RUNS

    ref = finding.resolve(path)
    if archive.is_archive(path):
        return RUNS / f"{path.stem}-from-{ref.step}", path
    # A path such as `.` has no parents that could be named.
    place = ref.path if len(ref.path.parts) > 2 and ".." not in ref.path.parts else ref.path.resolve()
    owner = place.parent.parent
    newest = finding.newest(place.parent)
    if newest is not None and newest.path == place:
        return owner, "auto"
    return owner.with_name(f"{owner.name}-from-{ref.step}"), place
