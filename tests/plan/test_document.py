"""A plan survives JSON unchanged, and a plan that a device would refuse is refused before anything is allocated."""

import copy
import json

import jsonschema
import pytest

from hybrid.errors import ConfigError, LimitExceeded
from hybrid.models.config import ModelConfig
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.document import BoundSlice, Dispatch, Plan, access_conflict, check_plan
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile
from hybrid.resources import resource

MODEL = ModelConfig(
    vocabulary_size=40, context_length=16, layers=2, width=32, heads=4, kv_heads=2, feed_forward_width=48, dropout=0.1
)
F16 = DeviceProfile(features=frozenset({"shader-f16"}))


@pytest.fixture(scope="module", params=["f32", "mixed-f16"])
def plan(request) -> Plan:
    return compile_plan(PlanSettings(MODEL, 2, 16, request.param), F16)


def test_json_round_trip_keeps_every_field_and_the_hash(plan):
    text = json.dumps(plan.to_json())
    again = Plan.from_json(json.loads(text), plan.constant_data)
    assert again == plan
    assert again.hash() == plan.hash()


def test_the_document_fits_its_schema(plan):
    schema = json.loads(resource("bridge/schemas/plan.schema.json").read_text())
    jsonschema.validate(json.loads(json.dumps(plan.to_json())), schema)


def test_compiling_twice_gives_the_same_document(plan):
    again = compile_plan(PlanSettings(MODEL, 2, 16, plan.precision), F16)
    assert again.to_json() == plan.to_json()


def test_a_foreign_version_or_a_changed_constant_or_source_is_refused(plan):
    document = json.loads(json.dumps(plan.to_json()))
    with pytest.raises(ConfigError, match="version 2"):
        Plan.from_json({**document, "version": 2}, plan.constant_data)
    sha = next(iter(plan.constant_data))
    with pytest.raises(ConfigError, match="constant"):
        Plan.from_json(document, {**plan.constant_data, sha: plan.constant_data[sha][:-1] + b"\x01"})
    changed = copy.deepcopy(document)
    changed["sources"][next(iter(changed["sources"]))] += " "
    with pytest.raises(ConfigError, match="sha256"):
        Plan.from_json(changed, plan.constant_data)
    del changed["programs"]
    with pytest.raises(ConfigError, match="malformed"):
        Plan.from_json(changed, plan.constant_data)


def _first_dispatch(plan: Plan) -> tuple[list, int, Dispatch]:
    commands = plan.programs["forward_backward"]
    index = next(i for i, c in enumerate(commands) if isinstance(c, Dispatch))
    return commands, index, commands[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: BoundSlice(b.arena, b.page, b.offset + 4, b.size), "aligned|outside"),
        (lambda b: BoundSlice(b.arena, b.page, 1 << 40, b.size), "outside"),
        (lambda b: BoundSlice("nowhere", b.page, b.offset, b.size), "outside"),
        (lambda b: BoundSlice(b.arena, b.page, b.offset, 0), "outside"),
    ],
)
def test_bindings_outside_or_unaligned_are_refused(plan, change, message):
    broken = copy.deepcopy(plan)
    commands, index, dispatch = _first_dispatch(broken)
    bindings = (change(dispatch.bindings[0]), *dispatch.bindings[1:])
    commands[index] = Dispatch(dispatch.choices, bindings, dispatch.label, dispatch.phase, dispatch.product_class)
    with pytest.raises(ConfigError, match=message):
        check_plan(broken, F16)


def test_a_missing_feature_names_the_remedy():
    plan = compile_plan(PlanSettings(MODEL, 2, 16, "mixed-f16"), F16)
    with pytest.raises(LimitExceeded, match=r"shader-f16.*f32"):
        check_plan(plan, DeviceProfile())


def test_a_device_with_a_smaller_binding_limit_refuses_the_plan(plan):
    small = DeviceProfile({**DEFAULT_LIMITS, "maxStorageBufferBindingSize": 1024}, F16.features)
    with pytest.raises(LimitExceeded, match="maxStorageBufferBindingSize"):
        check_plan(plan, small)


READ, WRITE = (1, "read"), (2, "read_write")


def test_the_access_rule_of_one_dispatch():
    a, b, c = BoundSlice("x", 0, 0, 256), BoundSlice("x", 0, 256, 256), BoundSlice("x", 0, 128, 256)
    assert access_conflict((READ, WRITE), (a, b))  # one page read and written
    assert access_conflict((READ, WRITE), (a, BoundSlice("x", 1, 256, 256))) is None
    assert access_conflict((READ, READ), (a, a)) is None
    assert access_conflict((WRITE, WRITE), (a, b)) is None
    assert access_conflict((WRITE, WRITE), (a, c))  # writable ranges overlap
