"""Plans asked for in JSON, as a page does, under the Python of this machine. What Pyodide makes of them is tested from
JavaScript (web/test/pyodide.test.js)."""

import json
from pathlib import Path
from typing import Any

import pytest
from hybrid_tab.compiling import compile_files, compiled, parse_profile

from hybrid.errors import ConfigError
from hybrid.graph.ir import Graph
from hybrid.models import decoder
from hybrid.ops import OpError
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.folder import write_plan
from hybrid.plan.programs import training_graph
from hybrid.training.parity.workload import MODELS
from tab_python.cases import F16, cases, facts, request, settings


def as_javascript_writes_it(value: Any) -> Any:
    """JSON.parse and JSON.stringify of JavaScript: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {key: as_javascript_writes_it(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_javascript_writes_it(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize(("chosen", "profile"), [pytest.param(s, p, id=name) for name, s, p in cases()])
def test_a_plan_asked_for_in_json_has_the_bytes_of_write_plan(
    chosen: PlanSettings, profile: Any, tmp_path: Path
) -> None:
    write_plan(compile_plan(chosen, profile), tmp_path)
    asked = json.dumps(as_javascript_writes_it(request(chosen)))
    files = compile_files(asked, json.dumps(facts(profile)))
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


REFUSED = [
    ({"batchSzie": 1}, "unknown plan setting 'batchSzie': did you mean 'batchSize'"),
    ({"batchSize": True}, "batchSize is True: expected a whole number"),
    ({"batchSize": None}, "batchSize is None: expected a whole number"),
    ({"batchSize": 0}, "both must be at least 1"),
    ({"model": []}, r"model is \[\]: expected an object"),
    ({"model": {"layers": 1}}, "plan settings: model: .*vocabulary_size"),
    ({"model": {**MODELS["llama"].to_dict(), "colour": 1}}, "model has unknown key"),
    ({"optimizer": {"lrr": 1}}, "unknown optimizer field 'lrr'"),
    ({"precision": "f64"}, "precision 'f64'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_settings_that_make_no_plan_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    asked = {**request(settings(MODELS["llama"], "f32")), **changes}
    with pytest.raises(ConfigError, match=message):
        compile_files(json.dumps(asked), json.dumps(facts(F16)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"limits": {}}', '{"limits": 1, "features": 2}', '{"colour": 1}'])
def test_a_profile_that_describes_no_device_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="device profile"):
        parse_profile(text)


def test_a_block_is_replaced_for_one_plan_only() -> None:
    def mine(ops: Any, p: Any, h: Any, cfg: Any) -> Any:
        return ops.linear(ops.relu2(ops.linear(h, p.up)), p.down)

    chosen = settings(MODELS["gpt2"], "f32")
    own = decoder.feed_forward
    found = compiled(chosen, F16, {"feed_forward": mine}).plan
    assert decoder.feed_forward is own
    assert found.to_json()["programs"] != compile_plan(chosen, F16).to_json()["programs"]
    assert ops_of(training_graph(chosen.model, 2, 32)) >= {"gelu", "gelu_grad"}


def ops_of(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


def test_a_block_that_nobody_calls_or_that_is_wrong_is_refused() -> None:
    chosen = settings(MODELS["gpt2"], "f32")
    with pytest.raises(ConfigError, match="unknown block 'feedforward': did you mean 'feed_forward'"):
        compiled(chosen, F16, {"feedforward": print})
    with pytest.raises(ConfigError, match=r"expected a function like hybrid\.models\.decoder\.attend"):
        compiled(chosen, F16, {"attend": 3})  # type: ignore[dict-item]
    own = decoder.feed_forward
    with pytest.raises(OpError, match=r"linear in block 'layers\.0'"):
        compiled(chosen, F16, {"feed_forward": lambda ops, p, h, cfg: ops.linear(h, p.down)})
    assert decoder.feed_forward is own
