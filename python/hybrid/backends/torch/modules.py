"""The parameter tree of a model as torch modules: what optimizers, wrappers for sharding and compilers expect.

Each block of a model is one `Unit`, and calling the unit is how its function runs. A tied table is one parameter that
two units hold; every unit is held once by the root, so a looped model calls the same unit again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hybrid.models.config import ModelConfig
from hybrid.models.decoder import Head, Inputs, decoder
from hybrid.models.parameters import DecoderParameters, parameter_specs, parameter_tree
from hybrid.ops import Linear, Norm, Ops, Table

Result = TypeVar("Result")


class Leaf(nn.Module):
    """A leaf of the tree (`Linear`, `Norm` or `Table`): `weight` and, if there is one, `bias`."""

    def __init__(self, leaf: Linear | Norm | Table) -> None:
        super().__init__()
        for field in fields(leaf):
            self.register_parameter(field.name, getattr(leaf, field.name))


class Unit(nn.Module):
    """The parameters of one block, under the names of its dataclass; optional leaves that a model lacks are None.

    recompute: run the block again in the backward pass instead of keeping what it computed; "selective" keeps the
    products of matrices and attention, which are most of its work and less than half of its memory.
    """

    recompute: bool | str = False

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        for field in fields(parameters):
            leaf = getattr(parameters, field.name)
            setattr(self, field.name, None if leaf is None else Leaf(leaf))

    def forward(self, function: Callable[..., Result], ops: Ops, arguments: tuple[Any, ...]) -> Result:
        if self.recompute and torch.is_grad_enabled():
            # Masks of dropout are functions of the step: there is no state of a generator to put back.
            result: Result = checkpoint(function, ops, self, *arguments, use_reentrant=False, preserve_rng_state=False)
            return result
        return function(ops, self, *arguments)


KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def _keep_products() -> Any:
    def choose(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]


class Root(nn.Module):
    """The whole model. `weights()` gives its parameters by their names in checkpoints."""

    def __init__(self, tree: DecoderParameters) -> None:
        super().__init__()
        self.embed = Unit(tree.embed)
        self.layers = nn.ModuleList(Unit(layer) for layer in tree.layers)
        self.head = Unit(tree.head)
        self._places: dict[str, tuple[nn.Module, str]] = {}

    def forward(self, ops: Ops, inputs: Inputs, cfg: ModelConfig, head: Head[Result]) -> Result:
        return decoder(ops, self, inputs, cfg, head)  # type: ignore[arg-type]

    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter once, in the order of `parameter_specs`."""
        return {name: getattr(module, attribute) for name, (module, attribute) in self._places.items()}

    def compile_layers(self) -> None:
        """Compile each layer when it first runs; layers of equal shape share the code. The head stays as it is: it is
        chunks of matrix products already."""
        for layer in self.layers:
            layer.compile(dynamic=False, fullgraph=True)

    def run_eagerly(self) -> None:
        """Undo `compile_layers`."""
        for layer in self.layers:
            layer._compiled_call_impl = None

    def units(self) -> dict[str, Unit]:
        """Every unit once, by the label of its (first) block."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embed": self.embed, **layers, "head": self.head}  # type: ignore[dict-item]


def make_root(cfg: ModelConfig, values: Mapping[str, Tensor]) -> Root:
    """A model with these values (float32, by name in `parameter_specs`), which become its parameters."""
    parameters = {spec.name: nn.Parameter(values[spec.name]) for spec in parameter_specs(cfg)}
    root = Root(parameter_tree(cfg, parameters.__getitem__))
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, tuple[nn.Module, str]] = {}
    for module in root.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(names[id(parameter)], (module, attribute))
    root._places = {name: found[name] for name in parameters}
    return root
