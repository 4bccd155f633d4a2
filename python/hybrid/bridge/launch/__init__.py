"""A run whose steps are done by a tab: `command` (from the request to the outcome), `run` (the run folder's side),
`desk` and `events` (what the tab reports), `app` (the addresses), `browser` (what is opened), `watch` (is the tab still
there?). May import everything below `bridge`, `bridge.server`, fastapi and uvicorn.
"""

from hybrid.bridge.launch.command import check_installation, dry_run_in_browser, train_in_browser

__all__ = ["check_installation", "dry_run_in_browser", "train_in_browser"]
