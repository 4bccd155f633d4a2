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
Change = Callable[[nn.Parameter], Tensor]


class Leaf(nn.Module):
    """A leaf of the tree (`Linear`, `Norm` or `Table`): `weight` and, if there is one, `bias`."""

    def __init__(self, leaf: Linear | Norm | Table) -> None:
        super().__init__()
        self._kind = type(leaf)
        for field in fields(leaf):
            self.register_parameter(field.name, getattr(leaf, field.name))

    def tensors(self, change: Change | None = None) -> Any:
        """The leaf with the tensors that this module holds now, or what `change` makes of them."""
        values = self._parameters.values()  # in the order of the leaf's fields
        if change is None:  # in every block of every step
            return self._kind(*values)
        return self._kind(*(None if value is None else change(value) for value in values))


class Unit(nn.Module):
    """The parameters of one block, under the names of its dataclass; optional leaves that a model lacks are None.

    recompute: run the block again in the backward pass instead of keeping what it computed; "selective" keeps the
    products of matrices and attention, which are most of its work and less than half of its memory.
    compiled: what runs the block when gradients are wanted. It gets plain tensors, no modules: so whatever wraps the
    unit is outside the compiled code, and one code serves all units of equal shape.
    """

    recompute: bool | str = False
    compiled: Callable[..., Any] | None = None

    def __init__(self, parameters: Any) -> None:
        super().__init__()
        self._kind = type(parameters)
        self._names = [field.name for field in fields(parameters)]
        for name in self._names:
            leaf = getattr(parameters, name)
            setattr(self, name, None if leaf is None else Leaf(leaf))

    def forward(self, function: Callable[..., Result], ops: Ops, arguments: tuple[Any, ...]) -> Result:
        return self.run(function, ops, self.tensors(), arguments)

    def run(self, function: Callable[..., Result], ops: Ops, parameters: Any, arguments: tuple[Any, ...]) -> Result:
        """The block on parameters that need not be the unit's own."""
        if not torch.is_grad_enabled():
            return function(ops, parameters, *arguments)
        result: Result = (self.compiled or run_block)(function, ops, parameters, arguments, self.recompute)
        return result

    def tensors(self, change: Change | None = None) -> Any:
        """The block's dataclass with the tensors that this module holds now, or what `change` makes of them."""
        leaves: list[Any] = [self._modules.get(name) for name in self._names]
        return self._kind(*(None if leaf is None else leaf.tensors(change) for leaf in leaves))


def run_block(
    function: Callable[..., Result], ops: Ops, parameters: Any, arguments: tuple[Any, ...], recompute: bool | str
) -> Result:
    """A block of the model on its parameters."""
    if not recompute:
        return function(ops, parameters, *arguments)
    contexts: dict[str, Any] = {"context_fn": _keep_products} if recompute == "selective" else {}
    # Masks of dropout are functions of the step: there is no state of a generator to put back.
    result: Result = checkpoint(
        function, ops, parameters, *arguments, use_reentrant=False, preserve_rng_state=False, **contexts
    )
    return result


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
        self.layers: list[Unit] = nn.ModuleList(Unit(layer) for layer in tree.layers)  # type: ignore[assignment]
        self.head = Unit(tree.head)
        self.others = nn.ModuleList()  # leaves of layers that wrappers are to find here, too
        self._places: dict[str, tuple[nn.Module, str]] = {}

    def forward(self, ops: Ops, inputs: Inputs, cfg: ModelConfig, head: Head[Result]) -> Result:
        return decoder(ops, self, inputs, cfg, head)  # type: ignore[arg-type]

    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter once, in the order of `parameter_specs`."""
        return {name: getattr(module, attribute) for name, (module, attribute) in self._places.items()}

    def compile_layers(self) -> None:
        """Compile each layer when it first runs; layers of equal shape share the code. The head stays as it is: it is
        chunks of matrix products already."""
        compiled = torch.compile(run_block, dynamic=False, fullgraph=True)
        for layer in self.layers:
            layer.compiled = compiled

    def run_eagerly(self) -> None:
        """Undo `compile_layers`."""
        for layer in self.layers:
            layer.compiled = None

    def units(self) -> dict[str, Unit]:
        """Every unit once, by the label of its (first) block."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embed": self.embed, **layers, "head": self.head}


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
