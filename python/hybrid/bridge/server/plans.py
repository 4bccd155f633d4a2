"""Plans for a device that a page describes."""

from __future__ import annotations

import shutil
import threading
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid.bridge.server.temporary import TemporaryFolder
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import ConfigError
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.folder import write_plan
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile

MOST_PLANS = 4


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
    """Compiled plans in a temporary folder, each in a folder named by its hash; the newest few are kept, and one that
    is asked for again is among them."""

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._most = most
        self._temporary = TemporaryFolder("hybrid-plans-")
        self.folder = self._temporary.path
        self._names: list[str] = []
        self._lock = threading.Lock()

    def compile(self, settings: PlanSettings, profile: DeviceProfile) -> str:
        """The folder's name of the plan for these settings on such a device. Errors: ConfigError, LimitExceeded."""
        plan = compile_plan(settings, profile)
        name = stable_hash(plan.to_json())
        with self._lock:
            if name in self._names:
                self._names.remove(name)
            else:
                write_plan(plan, self.folder / name)
            self._names.append(name)
            while len(self._names) > self._most:
                shutil.rmtree(self.folder / self._names.pop(0), ignore_errors=True)
        return name

    def close(self) -> None:
        self._temporary.close()
