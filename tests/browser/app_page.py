"""The page where anybody trains, as a person uses it: pressing, reading, dropping."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from browser.harness import BrowserPage, Chromium, StaticServer

PATIENCE = 90_000.0  # milliseconds; a busy machine compiles slowly
PATH = "/some/where/"  # a sub-folder of a plain file server


class App:
    """The page, and what a person does with it."""

    def __init__(
        self,
        chromium: Chromium,
        site: StaticServer | str,
        script: str = "",
        in_worker: str = "",
        path: str = f"{PATH}index.html",
        **options: Any,
    ) -> None:
        """site: what serves it, or its origin. script, in_worker: code of ours with which the page, or its worker,
        begins."""
        self.requests: list[str] = []

        def new_context() -> Any:
            context = chromium.browser.new_context(**options)
            context.set_default_timeout(PATIENCE)
            context.on("request", lambda request: self.requests.append(request.url))

            def answer(route: Any) -> None:
                response = route.fetch()
                route.fulfill(response=response, body=in_worker + response.text())

            if in_worker:
                context.route("**/app_worker.js", answer)
            if script:
                context.add_init_script(script)
            return context

        self.origin = site if isinstance(site, str) else site.url
        self.page = BrowserPage(chromium, self.origin + path, new_context)
        self.do = self.page.do
        self.violations = self.page.violations

    def press(self, name: str) -> None:
        self.do(lambda page: page.get_by_role("button", name=name, exact=True).click())

    def ready(self) -> App:
        self.do(lambda page: page.locator("#train:enabled").wait_for())
        return self

    def begin(self, steps: int) -> App:
        self.ready()
        self.do(lambda page: page.get_by_label("Steps").fill(str(steps)))
        self.press("Train")
        return self

    def wait(self, selector: str) -> str:
        """The text of an element, once it is seen."""
        return str(self.do(lambda page: (page.locator(selector).wait_for(), page.locator(selector).inner_text())[1]))

    def text(self, selector: str) -> str:
        return str(self.do(lambda page: page.locator(selector).inner_text()))

    def saved(self) -> int:
        """The step of the newest save, once there is one."""
        return int(re.sub(r"\D", "", self.wait("#saved:text-matches('step')")))

    def finish(self) -> str:
        self.wait("#new")
        return self.text("#status")

    def drop(self, name: str, content: bytes) -> None:
        script = """([name, bytes]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], name));
          for (const kind of ["dragenter", "dragover", "drop"])
            document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
        }"""
        self.do(lambda page: page.evaluate(script, [name, list(content)]))

    def download(self, folder: Path) -> Path:
        def save(page: Any) -> Path:
            with page.expect_download() as download:
                page.get_by_role("button", name="Download the run").click()
            path = folder / download.value.suggested_filename
            download.value.save_as(path)
            return path

        return Path(self.do(save))

    def overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        return int(self.do(lambda page: page.evaluate("document.documentElement.scrollWidth - innerWidth")))

    def close(self) -> None:
        foreign = [url for url in self.requests if not url.startswith((self.origin, "blob:", "data:"))]
        self.page.close()
        assert foreign == [], "a request left the origin of the page"

    def __enter__(self) -> App:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
