"""Plans and their sizes from JSON, as the page asks for them, and from settings and blocks, as a script does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from hybrid.contracts.names import unknown_name
from hybrid.errors import ConfigError
from hybrid.models import decoder
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.document import Plan
from hybrid.plan.folder import write_plan
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile

# What a script may put in the place of the decoder's own functions of these names, with their parameters.
BLOCKS = ("normalise", "embed", "attend", "feed_forward", "layer", "finish")

# The numbers of the loss scaler that are floats in a configuration.
SCALES = ("initialScale", "minScale", "maxScale", "scaleFactor", "backoffFactor")

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class CompiledPlan:
    """A plan and what can be said about it before any device holds it.

    parameters: their number. memory: bytes by arena, and `total`.
    """

    plan: Plan
    parameters: int
    memory: dict[str, int]


def compiled(
    settings: PlanSettings, profile: DeviceProfile, blocks: Mapping[str, Callable[..., Any]] | None = None
) -> CompiledPlan:
    """The plan of a model, some of whose blocks are those given here. Errors: ConfigError, LimitExceeded, OpError."""
    with replaced(blocks or {}):
        plan = compile_plan(settings, profile)
    memory = {arena: sum(pages) for arena, pages in plan.arenas.items()}
    return CompiledPlan(plan, count_parameters(settings.model), {**memory, "total": sum(memory.values())})


@contextmanager
def replaced(blocks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """The decoder with other functions in the place of its own, and as it was afterwards."""
    for name, block in blocks.items():
        if name not in BLOCKS:
            raise ConfigError(unknown_name("block", name, BLOCKS))
        if not callable(block):
            raise ConfigError(f"blocks[{name!r}] is {block!r}: expected a function like hybrid.models.decoder.{name}")
    own = {name: getattr(decoder, name) for name in blocks}
    try:
        for name, block in blocks.items():
            setattr(decoder, name, block)
        yield
    finally:
        for name, block in own.items():
            setattr(decoder, name, block)


def plan_files(plan: Plan) -> dict[str, bytes]:
    """The files of the plan's folder, as `write_plan` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        write_plan(plan, Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def compile_files(settings: str, profile: str) -> dict[str, bytes]:
    """The files of a plan's folder for settings and a device that are given as JSON texts."""
    return plan_files(compiled(parse_settings(settings), parse_profile(profile)).plan)


def estimate(settings: str, profile: str) -> str:
    """{parameters, memory: {arena: bytes, total}} as JSON, for settings and a device that are given as JSON texts."""
    found = compiled(parse_settings(settings), parse_profile(profile))
    return json.dumps({"parameters": found.parameters, "memory": found.memory})


def parse_settings(text: str) -> PlanSettings:
    """`PlanSettings` from JSON: its fields in camelCase; `model` as in a plan, `optimizer` as in a configuration.

    What is absent has its default. JavaScript writes 1.0 as 1: what a configuration holds as a float is one here, too,
    so that the plan is the same to the byte. ConfigError for what is unknown, missing or of another kind.
    """
    values = _members(text, "plan settings")
    names = {_camel(item.name): item.name for item in fields(PlanSettings)}
    for key in values:
        if key not in names:
            raise ConfigError(unknown_name("plan setting", key, names))
    for key in ("model", "batchSize", "sequenceLength"):
        if key not in values:
            raise ConfigError(f"plan settings: {key} is missing")
    given = {names[key]: value for key, value in values.items()}
    for key in ("model", "optimizer", "variants"):
        if not isinstance(given.get(key, {}), dict):
            raise ConfigError(f"plan settings: {key} is {given[key]!r}: expected an object")
    for key in ("batch_size", "sequence_length", "prefill_tokens", "cache_length"):
        value = given.get(key, 1)
        if not (isinstance(value, int) and not isinstance(value, bool)) and not (
            key == "cache_length" and value is None
        ):
            raise ConfigError(f"plan settings: {_camel(key)} is {value!r}: expected a whole number")
    try:
        given["model"] = _with_floats(ModelConfig.from_dict(given["model"]))
    except TypeError as error:
        raise ConfigError(f"plan settings: model: {str(error).removeprefix('ModelConfig.__init__() ')}") from None
    if "optimizer" in given:
        optimizer = OptimizerSettings.from_dict(given["optimizer"])
        given["optimizer"] = replace(_with_floats(optimizer), scheduler=_with_floats(optimizer.scheduler))
    if isinstance(given.get("loss_scaling"), dict):
        given["loss_scaling"] = {
            key: _float(value) if key in SCALES else value for key, value in given["loss_scaling"].items()
        }
    return _with_floats(PlanSettings(**given))


def parse_profile(text: str) -> DeviceProfile:
    """The profile that web/runtime/subgroups.js makes of a device: {limits, features, subgroup_size, cpu}.

    ConfigError for what is unknown, missing or of another kind.
    """
    values = _members(text, "device profile")
    known = ("limits", "features", "subgroup_size", "cpu")
    for key in values:
        if key not in known:
            raise ConfigError(unknown_name("device profile field", key, known))
    limits, features = values.get("limits"), values.get("features", [])
    if not isinstance(limits, dict) or not isinstance(features, list):
        raise ConfigError("device profile: expected limits, an object, and features, a list")
    for name in DEFAULT_LIMITS:
        if not isinstance(limits.get(name), int) or not 1 <= limits[name] < 2**53:
            raise ConfigError(f"device profile: limits.{name} is {limits.get(name)!r}: expected a positive number")
    size, cpu = values.get("subgroup_size", 0), values.get("cpu")
    if not isinstance(size, int) or not 0 <= size <= 1024 or cpu not in (None, True, False):
        raise ConfigError(
            f"device profile: subgroup_size is {size!r} and cpu {cpu!r}: expected 0 to 1024, and yes or no"
        )
    return DeviceProfile(limits, frozenset(features), subgroup_size=size, cpu=cpu)


def _with_floats(settings: Settings) -> Settings:
    """The same, with floats where a dataclass says so and JSON had a whole number."""
    floats = [item.name for item in fields(settings) if item.type in ("float", "float | None")]  # type: ignore[arg-type]
    return replace(settings, **{name: _float(getattr(settings, name)) for name in floats})  # type: ignore[type-var]


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _members(text: str, what: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: expected an object, got {values!r}")
    return values


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
