"""The page as a folder of files that any file host can serve: the built page, a small text, and plans for a few sizes
of model.

    index.html  app.js  app_worker.js  app.css ...
    site.json                        the sizes: settings, small files of a checkpoint, and their plans; and who compiles
                                     the plans of other models
    plans/SIZE-PRECISION-PROFILE/    a plan (`plan.folder`)
    text/stories.txt
    pyodide/                         Python in the tab, where it goes along

A plan is made for WebGPU's default limits, without subgroup operations and with those of eight lanes or more. It holds
for any text, number of steps and learning rate: what the device is given of those comes from the run. A server that
compiles plans has none in the folder: it makes those that a page asks for, for its very device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid.bridge.job import plan_settings
from hybrid.bridge.stories import stories
from hybrid.checkpoint.store import small_files
from hybrid.config.contract import contract
from hybrid.config.loading import merge, to_settings
from hybrid.config.problems import parse_config
from hybrid.config.resolve import model_config, resolve
from hybrid.config.tree import RunConfig
from hybrid.data.tokenizers import ByteTokenizer
from hybrid.errors import ConfigError, HybridError
from hybrid.models.parameters import count_parameters
from hybrid.plan.compiler import compile_plan
from hybrid.plan.document import Plan
from hybrid.plan.folder import write_plan
from hybrid.plan.profile import DeviceProfile
from hybrid.resources import resource

FORMAT = "hybrid.site"
VERSION = 2
PAGE = "web/dist/app"
PYTHON = "web/dist/pyodide"
SITE = "site.json"
TEXT = "stories.txt"
STORIES = 1200
PRECISIONS = ("f32", "mixed-f16")
SUBGROUP_SIZES = (0, 8)

Sizes = Mapping[str, dict[str, Any]]

COMMON: dict[str, Any] = {
    "data": {
        "source": TEXT,
        "tokenizer": {"type": "bytes"},
        "split": {"by": "share", "validationShare": 0.1},
    },
    "schedule": {"type": "cosine_to_min", "warmupSteps": 20, "minLr": 1e-4},
    "checkpoint": {"every": 100, "keepLast": 2},
    "evaluation": {"every": 50, "batches": 8},
    "sampling": {"every": 50, "prompt": "Once upon a time", "tokens": 200, "temperature": 0.7},
}

SIZES: Sizes = {
    "tiny": {
        "title": "Tiny",
        "about": "For a first look, on any device.",
        "settings": {
            "model": {"layers": 2, "width": 64, "heads": 4},
            "data": {"sequenceLength": 64, "batchSize": 16},
            "optimizer": {"lr": 4e-3},
            "run": {"name": "tiny", "steps": 600, "logEvery": 5},
        },
    },
    "small": {
        "title": "Small",
        "about": "Writes better sentences; a laptop's graphics will do.",
        "settings": {
            "model": {"layers": 4, "width": 128, "heads": 4},
            "data": {"sequenceLength": 128, "batchSize": 16},
            "optimizer": {"lr": 2e-3},
            "run": {"name": "small", "steps": 1000, "logEvery": 5},
        },
    },
    "medium": {
        "title": "Medium",
        "about": "For a graphics card of its own.",
        "settings": {
            "model": {"layers": 6, "width": 256, "heads": 8},
            "data": {"sequenceLength": 128, "batchSize": 32, "microbatchSize": 16},
            "optimizer": {"lr": 1e-3},
            "run": {"name": "medium", "steps": 2000, "logEvery": 5},
        },
    },
    "large": {
        "title": "Large",
        "about": "For a strong graphics card, a long text and patience.",
        "settings": {
            "model": {"layers": 8, "width": 512, "heads": 8},
            "data": {"sequenceLength": 256, "batchSize": 32, "microbatchSize": 8},
            "optimizer": {"lr": 6e-4},
            "run": {"name": "large", "steps": 5000, "logEvery": 5},
        },
    },
}


def export_site(
    out: Path,
    sizes: Sizes = SIZES,
    note: Callable[[str], None] = lambda text: None,
    *,
    python: Path | None = None,
    server: str | None = None,
) -> None:
    """Write the folder, which must be new or empty. The same sources write the same bytes.

    sizes: name to title, about (a sentence) and settings, which lie on top of `COMMON`. note: told of each part.
    python: the folder of Python in the tab (`built_python`), if it is to go along. server: where whoever serves the
    page compiles plans, relative to it, such as `api/plans`: then none are written; None: nowhere.
    Whatever ends it before the end, nothing of the page is left there. Raises ConfigError for a folder that holds
    something, HybridError when the page is not built or the disk refuses.
    """
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: expected a new or empty folder; choose another one, or remove it")
    page = resource(PAGE)
    with _all_or_nothing(out):
        _write(page, out, sizes, note, python, server)


@contextlib.contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """Empty the folder if it cannot be filled. HybridError when the disk refuses."""
    was_there = out.exists()
    try:
        yield
    except BaseException as error:
        for path in list(out.iterdir()) if was_there else [out]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        if not isinstance(error, OSError):
            raise
        # Where several files were copied, each has a reason; the disk's are all the same.
        reason = error.args[0][-1][-1] if isinstance(error, shutil.Error) else error.strerror or error
        raise HybridError(f"{out}: the page cannot be written there: {reason}") from error


def _write(
    page: Path, out: Path, sizes: Sizes, note: Callable[[str], None], python: Path | None, server: str | None
) -> None:
    shutil.copytree(page, out, dirs_exist_ok=True)
    text = out / "text" / TEXT
    text.parent.mkdir()
    text.write_bytes(stories(STORIES).encode())
    note(f"{TEXT}: {text.stat().st_size:,} bytes")
    plans = out / "plans" if server is None else None
    document = {
        "format": FORMAT,
        "version": VERSION,
        "text": {"file": f"text/{TEXT}", "name": TEXT, "bytes": text.stat().st_size},
        "planners": {"server": server, "python": python and _export_python(python, out / "pyodide", note)},
        "sizes": [_export_size(plans, name, sizes[name], note) for name in sizes],
    }
    (out / SITE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def built_python(wanted: bool | None = None) -> Path | None:
    """The folder of Python in the tab (19 MB, which a page loads on demand); None if it is not wanted, or, unless it is
    wanted (None), not built. Raises ConfigError."""
    if wanted is False:
        return None
    try:
        return resource(f"{PYTHON}/worker.js").parent
    except HybridError:
        if wanted is None:
            return None
        raise ConfigError(
            "Python in the tab is not built here: `make pyodide` builds it in a checkout (a wheel does not hold it)"
        ) from None


def _export_python(built: Path, out: Path, note: Callable[[str], None]) -> dict[str, str]:
    """What site.json says of it. version: of the compiler, so that a browser knows whose plans it kept."""
    shutil.copytree(built, out)
    size = sum(path.stat().st_size for path in out.iterdir())
    note(f"Python in the tab: {size / 2**20:,.1f} MiB, loaded on demand")
    version = hashlib.sha256((out / "hybrid.zip").read_bytes()).hexdigest()[:16]
    return {"folder": f"{out.name}/", "version": version}


def _export_size(plans: Path | None, name: str, size: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """What site.json says of it. plans: where its plans are written; None: they are not."""
    tokenizer = ByteTokenizer()
    settings = merge(COMMON, size["settings"])
    variants = {}
    for precision in PRECISIONS:
        given = parse_config(merge(settings, {"precision": {"type": precision}}))
        config = resolve(given, tokenizer.vocabulary_size, 1)
        variants[precision] = {
            "config": to_settings(config),
            "contract": contract(config),
            "plans": [_export_plan(plans, name, config, lanes, note) for lanes in SUBGROUP_SIZES] if plans else [],
        }
    model = model_config(config)
    return {
        "name": name,
        "title": size["title"],
        "about": size["about"],
        "parameters": count_parameters(model),
        "tokenizer": {
            "kind": tokenizer.kind,
            "hash": tokenizer.hash,
            "vocabularySize": tokenizer.vocabulary_size,
        },
        "checkpointFiles": {
            file: data.decode("utf-8") for file, data in small_files(model, {}, tokenizer.to_json()).items()
        },
        "precisions": variants,
    }


def _export_plan(plans: Path, name: str, config: RunConfig, lanes: int, note: Callable[[str], None]) -> dict[str, Any]:
    half = config.precision.type == "mixed-f16"
    features = frozenset({*(["shader-f16"] if half else []), *(["subgroups"] if lanes else [])})
    plan = compile_plan(plan_settings(config), DeviceProfile(features=features, subgroup_size=lanes))
    folder = f"{name}-{config.precision.type}-{f'subgroups{lanes}' if lanes else 'plain'}"
    write_plan(plan, plans / folder)
    memory = _memory(plan)
    note(f"{folder}: {memory / 2**20:,.1f} MiB on the device")
    return {"folder": f"plans/{folder}", "subgroupSize": lanes, "requires": plan.requires, "memoryBytes": memory}


def _memory(plan: Plan) -> int:
    """Bytes of all buffers that a session makes for this plan."""
    return sum(sum(pages) for pages in plan.arenas.values())
