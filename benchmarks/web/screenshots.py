"""The pictures of the page in docs/images, taken anew: the exported page in Chromium on SwiftShader, trained for real.

make web pyodide
.venv/bin/python benchmarks/web/screenshots.py [--out docs/images] [--steps 600]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from browser.app_page import PATH, App  # noqa: E402
from browser.harness import Chromium, StaticServer  # noqa: E402
from common import ROOT  # noqa: E402
from hybrid.bridge.site import built_python, export_site  # noqa: E402

DESKTOP = {"width": 1100, "height": 860}
PHONE = {"width": 360, "height": 740}
MOST_BYTES = 150_000
PANEL_STEPS = 40
PHONE_STEP = 60  # by which there is a sample
PATIENCE_MS = 3_600_000


class Camera:
    """Takes pictures into a folder, each below `MOST_BYTES`."""

    def __init__(self, out: Path) -> None:
        self._out = out
        out.mkdir(parents=True, exist_ok=True)

    def take(self, app: App, name: str, *, full: bool = False, part: str = "") -> None:
        """What is seen of the page; all of it; or one part."""
        path = self._out / f"{name}.png"

        def shoot(page: Any) -> None:
            page.evaluate("document.activeElement?.blur()")
            if part:
                page.locator(part).screenshot(path=path, animations="disabled")
            else:
                page.screenshot(path=path, full_page=full, animations="disabled")

        app.do(shoot)
        size = path.stat().st_size
        print(f"{path}: {size:,} bytes")
        if size > MOST_BYTES:
            raise SystemExit(f"{path}: {size} bytes, more than {MOST_BYTES}")


def _step_reached(app: App, step: int) -> None:
    while int(re.sub(r"\D", "", app.text("#step").split(" of ")[0]) or 0) < step:
        time.sleep(0.1)


def take_all(chromium: Chromium, server: StaticServer, camera: Camera, steps: int) -> None:
    def page(**options: Any) -> App:
        return App(chromium, server, reduced_motion="reduce", **options).ready()

    with page(viewport=DESKTOP) as app:
        camera.take(app, "start")
        app.drop("my-run.hybrid", b"this is no run, whatever its name says")
        app.wait("#alert-text")
        app.do(lambda page: page.evaluate("scrollTo(0, 0)"))
        camera.take(app, "error")
        app.press("Dismiss")
        app.begin(steps)
        _step_reached(app, steps // 2)
        camera.take(app, "training")
        app.do(lambda page: page.locator("#new").wait_for(timeout=PATIENCE_MS))
        camera.take(app, "finished", full=True)
    with page(viewport=PHONE, color_scheme="dark") as app:
        app.begin(steps)
        _step_reached(app, PHONE_STEP)
        app.wait("#sample")
        camera.take(app, "phone")
        app.press("Save and stop")
        app.finish()
    with page(viewport=DESKTOP) as app:
        app.do(lambda page: page.get_by_text("Python: change the model itself").click())
        app.do(lambda page: page.get_by_label("Example").select_option(index=2))
        source = app.do(lambda page: page.get_by_label("Script").input_value())
        shown = source.replace("STEPS = 60", f"STEPS = {PANEL_STEPS}")
        app.do(lambda page: page.get_by_label("Script").fill(shown))
        app.press("Run")
        app.wait("#script-status:text-matches('^Finished')")
        app.do(lambda page: page.evaluate("document.getElementById('source').scrollTop = 0"))
        camera.take(app, "python", part="#python")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "images", help="where they go (default: docs/images)"
    )
    parser.add_argument("--steps", type=int, default=600, help="of the run that is shown (default: 600)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "page"
        export_site(folder, python=built_python(True))
        with StaticServer({PATH: folder}) as server, Chromium() as chromium:
            take_all(chromium, server, Camera(arguments.out), arguments.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
