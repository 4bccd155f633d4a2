"""Plans for a device that a page describes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import hybrid
from hybrid.bridge.server.refusals import no_room
from hybrid.bridge.server.temporary import TemporaryFolder
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import ConfigError
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.document import Plan
from hybrid.plan.folder import DOCUMENT, read_plan, write_plan
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile
from hybrid.resources import resource

MOST_PLANS = 4
LEFT_SECONDS = 3600.0
LAYERS = ("contracts", "random", "graph", "models", "objectives", "optim", "plan")  # what the compiler is made of

_NAME = re.compile(r"[0-9a-f]{64}\Z")
_UNFINISHED = ".half-"


class ProfileFacts(BaseModel):
    """What web/runtime/subgroups.js says about a device: see `plan.profile.DeviceProfile`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    limits: dict[str, int]
    features: list[str] = Field(max_length=100)
    subgroup_size: int = Field(ge=0, le=1024)
    cpu: bool | None = None


def profile_of(facts: Any) -> DeviceProfile:
    """The profile in what a page sent. ConfigError naming what is missing or of another kind."""
    try:
        parsed = ProfileFacts.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ConfigError(f"device profile: {place}: {first['msg']}") from None
    for name in DEFAULT_LIMITS:
        if not 1 <= parsed.limits.get(name, 0) < 2**53:
            raise ConfigError(f"device profile: limits.{name} is {parsed.limits.get(name)}: expected a positive number")
    return DeviceProfile(
        limits=dict(parsed.limits),
        features=frozenset(parsed.features),
        subgroup_size=parsed.subgroup_size,
        cpu=parsed.cpu,
    )


class PlanShelf:
    """Compiled plans, each in a folder named by the hash of all that it follows from: the settings, the device, and the
    compiler. So a name always means the same bytes, and a plan that is there is not compiled again.

    The newest few are kept. folder: one that stays, also for the next process, and that several processes may use; None
    for one that goes with this shelf.
    """

    def __init__(self, most: int = MOST_PLANS, folder: Path | None = None) -> None:
        self._most = most
        self._temporary: TemporaryFolder | None = None
        if folder is None or not _is_writable(folder):
            self._temporary = TemporaryFolder("hybrid-plans-")
            folder = self._temporary.path
        self.folder = folder
        self._read: set[str] = set()
        self._lock = threading.Lock()

    def compile(self, settings: PlanSettings, profile: DeviceProfile) -> str:
        """The folder's name of the plan for these settings on such a device. Errors: ConfigError, LimitExceeded;
        Refusal 507 when the disk has no room."""
        facts = [asdict(settings), {**asdict(profile), "features": sorted(profile.features)}, compiler_version()]
        name = stable_hash(facts)
        if not self._is_here(name):
            plan = compile_plan(settings, profile)
            try:
                self._put(name, plan)
            except OSError as error:
                reason = error.strerror or error
                raise no_room(f"{self.folder}: the plan could not be written there: {reason}") from error
        with self._lock, contextlib.suppress(OSError):
            os.utime(self.folder / name)
            self._clean()
        return name

    def close(self) -> None:
        """Remove the plans that go with this shelf."""
        if self._temporary is not None:
            self._temporary.close()

    def _put(self, name: str, plan: Plan) -> None:
        made, place = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.folder)), self.folder / name
        try:
            write_plan(plan, made)
            with self._lock:
                try:
                    made.rename(place)
                except OSError:  # something is there
                    if not self._is_here(name):
                        shutil.rmtree(place, ignore_errors=True)
                        made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)  # what did not get a name
        self._read.add(name)

    def _is_here(self, name: str) -> bool:
        """Whether the plan is there; one that another process has left is read first, for it may be damaged."""
        if not (self.folder / name / DOCUMENT).is_file():
            return False
        if name not in self._read:
            try:
                read_plan(self.folder / name)
            except Exception:  # whatever is wrong with it, it is compiled again
                return False
            self._read.add(name)
        return True

    def _clean(self) -> None:
        """Keep the newest few, and nothing that a process has left which was killed as it wrote."""
        ages = {path: path.stat().st_mtime for path in self.folder.iterdir() if path.is_dir()}
        plans = sorted((path for path in ages if _NAME.match(path.name)), key=lambda path: ages[path])
        halves = [path for path in ages if path.name.startswith(_UNFINISHED)]
        left = [path for path in halves if time.time() - ages[path] > LEFT_SECONDS]
        for path in [*plans[: -self._most], *left]:
            # Under another name first: no one takes what is half gone for a plan.
            gone = path.with_name(f"{_UNFINISHED}{path.name}")
            with contextlib.suppress(OSError):
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


@functools.cache
def compiler_version() -> str:
    """A hash of everything here that a plan follows from."""
    package = Path(hybrid.__file__).parent
    files = [*package.glob("*.py"), *resource("shaders").glob("*.wgsl")]
    for layer in LAYERS:
        files += (package / layer).rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.parts[-2:]):
        data = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
