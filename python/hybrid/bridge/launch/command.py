"""`hybrid train` in a tab, from the request to the outcome. Imports no optional package before it is known to be
there."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from hybrid.bridge.job import plan_settings
from hybrid.bridge.launch.browser import Browser, HeadlessChromium, UserBrowser, find_chromium
from hybrid.checkpoint.store import CheckpointStore
from hybrid.config.tree import RunConfig
from hybrid.errors import ConfigError, MissingDependency
from hybrid.plan.compiler import compile_plan
from hybrid.plan.profile import DeviceProfile
from hybrid.training.dry_run import dry_run
from hybrid.training.outcome import Outcome
from hybrid.training.run_files import RunFile
from hybrid.training.runner import train
from hybrid.training.start import Prepared, Request, Services

BACKEND = "browser"
Opener = Callable[[str], Browser]


def train_in_browser(
    request: Request, services: Services, *, headless: bool = False, opener: Opener | None = None
) -> Outcome:
    """Train as requested, in a tab, and say how it ended.

    headless: in a Chromium without a window that is started for it; else in the user's browser. opener: shows an
    address, in their place. Errors: those of `training.runner.train`; TabLost; TabFailed; NoAdapter; MissingDependency.
    """
    check_browser(request.config, headless and opener is None)
    opener = opener or (HeadlessChromium if headless else partial(UserBrowser, note=services.note))
    return train(request, services, partial(_in_a_tab, opener))


def dry_run_in_browser(request: Request, services: Services, *, headless: bool = False) -> dict[str, Any]:
    """What `training.dry_run` reports, for a browser that offers WebGPU's default limits. Opens none."""
    check_browser(request.config, headless)

    def look(config: RunConfig) -> tuple[dict[str, Any], dict[str, int]]:
        half = config.precision.type == "mixed-f16"
        plan = compile_plan(plan_settings(config), DeviceProfile(features=frozenset(["shader-f16"] if half else [])))
        memory = {arena: sum(pages) for arena, pages in plan.arenas.items()}
        return {"backend": BACKEND, "precision": config.precision.type}, {**memory, "total": sum(memory.values())}

    return dry_run(request, services, look)


def check_browser(config: RunConfig, headless: bool) -> None:
    """Refuse what cannot be done in a tab, or not here. Errors: ConfigError, MissingDependency, HybridError."""
    if config.backend.adapter is not None:
        raise ConfigError(
            f"backend.adapter = {config.backend.adapter!r}: a browser chooses the adapter itself; leave --adapter out, "
            "or --set backend.adapter=null"
        )
    check_installation()
    if headless:
        find_chromium()


def check_installation() -> None:
    """Whether a page can be served from here. Errors: MissingDependency; HybridError when the page is not built."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "web")
    from hybrid.bridge.server.files import web_build

    web_build()


def _in_a_tab(
    opener: Opener, request: Request, services: Services, prepared: Prepared, store: CheckpointStore, record: RunFile
) -> Outcome:
    from hybrid.bridge.launch.app import MOST_BYTES, launch_app
    from hybrid.bridge.launch.desk import Desk
    from hybrid.bridge.launch.run import TabRun
    from hybrid.bridge.launch.watch import wait_for_end
    from hybrid.bridge.server.files import is_outdated, web_build
    from hybrid.bridge.server.plans import PlanShelf
    from hybrid.bridge.server.serving import Serving

    site = web_build()
    if is_outdated(site):
        services.note("the page is older than its sources: `make web` builds it anew")
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(TabRun(request, services, prepared, store, record))
        shelf = PlanShelf()
        stack.callback(shelf.close)
        desk = Desk(run.apply, services.stop, services.clock)
        serving = stack.enter_context(Serving(launch_app(desk, run, site, shelf), MOST_BYTES))
        browser = opener(serving.url)
        stack.callback(browser.close)
        end = wait_for_end(desk, browser, services.stop, services.clock, run.where_it_goes_on)
        return run.outcome(end)
