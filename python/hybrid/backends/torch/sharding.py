"""How the ranks of a run hold weights, gradients and moments: each all of them (DDP), each a part (FSDP2), or each node
all of them in parts (HSDP).

Under FSDP2 and HSDP every layer is a unit: its matrices are gathered before it runs and let go afterwards, in the
element type of the activations where that changes no number. The root is the last unit: embeddings, output projection,
gains and biases, which stay gathered, in f32, from the start of the forward part to the end of the backward part.
Gradients are added up in f32, never averaged: they are parts of one sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hybrid.backends.torch.modules import Leaf, Root
from hybrid.backends.torch.ranks import Ranks
from hybrid.config.machine import machine_memory
from hybrid.config.size import MOST_DEVICE_BYTES, STATE_BYTES, kept_a_row
from hybrid.contracts.names import unknown_name
from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters, parameter_specs

CHOICES = ("auto", "none", "full", "hybrid")
GRADIENT_BYTES = 4  # of a parameter
# What is counted ahead may take this share of a device's memory; the rest is for what is not (buffers of collectives
# and of compiled code, the allocator's gaps).
SHARE = 0.7


@dataclass(frozen=True)
class Layout:
    """How the ranks hold the state.

    name: "none", "full" or "hybrid". reason: why. replicas: how often the whole state is held. shards: in how many
    parts each time. sync_last: gradients of a step are added up over ranks once, in its last microbatch; else shards
    take their part in each, which needs no room for whole gradients.
    """

    name: str
    reason: str
    replicas: int
    shards: int
    sync_last: bool = True

    @property
    def sharded(self) -> bool:
        return self.name != "none"

    @property
    def parallel(self) -> str:
        return {"none": "ddp", "full": "fsdp2", "hybrid": "hsdp"}[self.name]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "reason": self.reason,
            "replicas": self.replicas,
            "shards": self.shards,
            "gradientSync": "last microbatch" if self.sync_last else "every microbatch",
        }


ONE_RANK = Layout("none", "one process", 1, 1)


@dataclass(frozen=True)
class Machines:
    """Where the ranks are. node: ranks of each node, 0 where nodes differ. memory: of a device in bytes, the least."""

    world: int
    node: int
    memory: int


def find_machines(ranks: Ranks, device: torch.device) -> Machines:
    """Every rank must call this."""
    local, size = (int(os.environ.get(name, default)) for name, default in _PLACE.items())
    told = ranks.gather([local, size, _memory(device, size)])
    even = all([place, count] == [rank % size, size] for rank, (place, count, _) in enumerate(told))
    return Machines(ranks.size, size if even and ranks.size % size == 0 else 0, min(memory for _, _, memory in told))


_PLACE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # as torchrun sets them


def _memory(device: torch.device, processes: int) -> int:
    """Bytes for one rank; the ranks of a node share what is not a GPU's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return (machine_memory() or MOST_DEVICE_BYTES) // processes


def choose_layout(wanted: str, machines: Machines, model: ModelConfig, activations: int) -> Layout:
    """The layout that `backend.sharding` means for these machines.

    activations: bytes that one microbatch keeps for its backward part. ConfigError for a name that is none, and for
    "hybrid" where nodes differ or there is but one.
    """
    if wanted not in CHOICES:
        raise ConfigError(unknown_name("backend.sharding", wanted, CHOICES))
    nodes = machines.world // machines.node if machines.node else 0
    if wanted == "hybrid" and (nodes < 2 or machines.node < 2):
        raise ConfigError(
            f"backend.sharding = 'hybrid': {machines.world} ranks, "
            + (f"{machines.node} on each of {nodes} node(s)" if nodes else "not the same number on each node")
            + "; expected two or more nodes with the same number of ranks, at least 2; or use 'full'"
        )
    state = count_parameters(model) * STATE_BYTES
    room = int(SHARE * machines.memory)

    def needs(shards: int, whole_gradients: bool = False) -> int:
        gathered = gathered_bytes(model, whole_gradients) if shards > 1 else 0
        return state // shards + gathered + activations

    def layout(name: str, replicas: int, shards: int, reason: str) -> Layout:
        return Layout(name, reason, replicas, shards, shards == 1 or needs(shards, whole_gradients=True) <= room)

    figures = f"{{}} of state and activations on each rank, {_text(room)} ({SHARE:.0%} of its memory) for them"
    whole = figures.format(_text(needs(1)))
    if wanted == "none" or (wanted == "auto" and needs(1) <= room) or machines.world == 1:
        asked = "asked for" if wanted == "none" else "one rank" if machines.world == 1 else f"it fits: {whole}"
        return layout("none", machines.world, 1, asked)
    within = needs(machines.node) if nodes > 1 and machines.node > 1 else None
    if wanted == "hybrid" or (wanted == "auto" and within is not None and within <= room):
        reason = "asked for" if wanted == "hybrid" else f"replicas do not fit: {whole}; nodes hold one each"
        return layout("hybrid", nodes, machines.node, reason)
    reason = "asked for" if wanted == "full" else f"replicas do not fit: {whole}"
    return layout("full", 1, machines.world, reason)


def activation_bytes(model: ModelConfig, rows: int, item: int, recompute: bool | str) -> int:
    """What `rows` tokens keep for their backward part, at least; item: bytes of an element."""
    return rows * kept_a_row(model, recompute is True) * item


def gathered_bytes(model: ModelConfig, whole_gradients: bool = False) -> int:
    """Bytes of weights and gradients that are whole for a time, at most: the root's, and those of two layers, or all
    gradients."""
    layers = sum(_numel(spec.shape) for spec in parameter_specs(model) if _in_layer(spec.name, spec.shape))
    part = count_parameters(model) - layers + 2 * layers // model.layers
    return 4 * part + GRADIENT_BYTES * (count_parameters(model) if whole_gradients else part)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _in_layer(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("model.layers.") and len(shape) > 1


def _text(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


# --- wrapping --------------------------------------------------------------------------------------------------------


def sum_over_ranks(root: Root) -> DistributedDataParallel:
    """The model under DDP, whose gradients are those of all ranks, added up."""
    wrapped = DistributedDataParallel(root, gradient_as_bucket_view=True, bucket_cap_mb=100)
    wrapped.register_comm_hook(None, lambda state, bucket: _add_up(bucket))
    return wrapped


def _add_up(bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own hook takes the mean."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def gathered_type(model: ModelConfig, index: int, act: torch.dtype) -> torch.dtype:
    """The type in which a layer's matrices are gathered. A layer that runs once rounds them to that of activations
    anyway; the gradients of one that runs again must add up in f32."""
    return act if model.schedule.count(index) == 1 else torch.float32


def shard(root: Root, layout: Layout, model: ModelConfig, act: torch.dtype, device: torch.device) -> DeviceMesh:
    """Turn a model of meta tensors into units that hold shards, of memory not yet filled.

    One layer at a time is whole. The last layer stays gathered where its backward part follows its forward part.
    """
    dims = {"replicate": layout.replicas, "shard": layout.shards}
    used = [name for name, size in dims.items() if layout.name == "hybrid" or name == "shard"]
    mesh = init_device_mesh(device.type, tuple(dims[name] for name in used), mesh_dim_names=tuple(used))
    vectors = {p for layer in root.layers for p in layer.parameters() if p.dim() == 1}
    materials: dict[nn.Parameter, nn.Parameter] = {}
    # A vector's place is in the tree of its layer, where the root does not look: it must find it elsewhere.
    root.others.extend(leaf for layer in root.layers for leaf in _leaves(layer) if vectors & set(leaf.parameters()))
    for index, layer in enumerate(root.layers):
        _materialise(layer, materials, device)
        kind = gathered_type(model, index, act)
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=_is_let_go(index, model.schedule),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if kind == torch.float32 else kind,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            ),
            ignored_params={p for p in layer.parameters() if p.dim() == 1},
        )
    _materialise(root, materials, device)
    matrices = {p for layer in root.layers for p in layer.parameters() if p.dim() > 1}
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=matrices)
    for unit in fsdp_units(root):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _prefetch(root, model.schedule)
    return mesh


def _prefetch(root: Root, schedule: tuple[int, ...]) -> None:
    """Gather the next layer while one runs, in the forward part, too. What torch gathers by itself there, in streams of
    its own, it holds until the next layer is gathered, which makes three; what is asked for (`unshard`) it lets go of.
    Only where a layer is always followed by the same one: weights that nobody takes at once would be outdated later."""
    units = fsdp_units(root)
    after: dict[int, set[int | None]] = {-1: {schedule[0]}}  # the root runs first
    for index, following in zip(schedule, (*schedule[1:], None), strict=True):
        after.setdefault(index, set()).add(following)
    for index, followers in after.items():
        _ask(units[index], units[index], first=True)
        if len(followers) == 1 and (following := followers.pop()) not in (None, index):
            _ask(units[index], units[following])


def _ask(unit: FSDPModule, wanted: FSDPModule, first: bool = False) -> None:
    """Before `unit` runs, ask for the weights of `wanted`, and go on; first: before those of `unit` are waited for."""

    def ask(*_: Any) -> None:
        wanted.unshard(async_op=True)

    cast(nn.Module, unit).register_forward_pre_hook(ask, prepend=first)


def fsdp_units(root: Root) -> list[FSDPModule]:
    """The layers, then the root; none where the model is not sharded."""
    return [module for module in (*root.layers, root) if isinstance(module, FSDPModule)]


def stay_whole(root: Root, schedule: tuple[int, ...], stay: bool) -> None:
    """Whether layers that have run stay gathered, until `let_go`; else only those whose backward part comes next."""
    for index, unit in enumerate(fsdp_units(root)[:-1]):
        unit.set_reshard_after_forward(not stay and _is_let_go(index, schedule), recurse=False)


def _is_let_go(index: int, schedule: tuple[int, ...]) -> bool:
    return index != schedule[-1] or schedule.count(index) > 1


def let_go(root: Root) -> None:
    """Hold shards alone, where no backward part comes to do so: what is gathered may be outdated the next time."""
    for unit in fsdp_units(root):
        unit.reshard()


def gathered_weights(root: Root) -> Iterator[tuple[str, Tensor]]:
    """Every weight as the model computes with it, whole, one unit after the other. Every rank must do the same."""
    units = fsdp_units(root)
    if not units:
        yield from root.weights().items()
    given = set()
    for unit in units:
        unit.unshard()
        for name, weight in root.weights().items():
            if name not in given and not isinstance(weight, DTensor):
                given.add(name)
                yield name, weight
        unit.reshard()


def _leaves(module: nn.Module) -> Iterator[Leaf]:
    return (leaf for leaf in module.modules() if isinstance(leaf, Leaf))


def _materialise(module: nn.Module, made: dict[nn.Parameter, nn.Parameter], device: torch.device) -> None:
    """Memory for the module's meta parameters; one that is in two places stays one."""
    for leaf in _leaves(module):
        for name, parameter in leaf._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
                leaf.register_parameter(name, made[parameter])


# --- what a rank holds -----------------------------------------------------------------------------------------------


class Held:
    """The parameters of a model as this rank holds them: whole ones, or shards of dimension 0 (DTensors on `mesh`).

    parameters: those of the model, by name. local: plain parameters on the same memory, for the optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None = None, ranks: Ranks | None = None
    ) -> None:
        self.parameters = dict(parameters)
        self.mesh = mesh
        self._ranks = ranks
        self.local = {
            name: nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p
            for name, p in self.parameters.items()
        }
        place = None if mesh is None else mesh.get_coordinate()
        self._shards, self._shard = (1, 0) if mesh is None or place is None else (mesh.size(mesh.ndim - 1), place[-1])
        self._replica = 0 if place is None or len(place) == 1 else place[0]

    @property
    def first_replica(self) -> bool:
        """Whether this rank's part counts where parts are added up over all ranks."""
        if self.mesh is None:
            return self._ranks is None or self._ranks.rank == 0
        return self._replica == 0

    def rows(self, name: str) -> tuple[int, int]:
        """The rows of a tensor that this rank holds: first, and the one after the last."""
        whole = self.parameters[name].shape[0]
        size = self._chunk(whole)
        return min(self._shard * size, whole), min((self._shard + 1) * size, whole)

    def _chunk(self, rows: int) -> int:
        return -(-rows // self._shards)

    def whole(self, name: str, local: Tensor) -> Tensor:
        """A part that belongs to that parameter, as a DTensor where it is sharded."""
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return local
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def take_gradients(self) -> None:
        """Give the plain parameters the gradients of their shards."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                gradient = parameter.grad
                self.local[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else None

    def clear(self) -> None:
        for parameter in (*self.parameters.values(), *self.local.values()):
            parameter.grad = None

    def fill(self, tensor: Tensor, values: Tensor | None) -> None:
        """Give each rank its part of one tensor (f32 on the host), which only rank 0 has. Every rank must call this."""
        if self.mesh is None:
            if values is not None:
                tensor.copy_(values)
            if self._ranks is not None:
                dist.broadcast(tensor, src=0)
            return
        assert isinstance(tensor, DTensor)
        size = self._chunk(tensor.shape[0])
        mine = torch.empty((size, *tensor.shape[1:]))
        parts = None
        if values is not None:
            parts = [_part(values, (rank % self._shards) * size, size) for rank in range(dist.get_world_size())]
        dist.scatter(mine, parts, src=0)
        local = tensor.to_local()
        local.copy_(mine[: local.shape[0]])


def _part(values: Tensor, first: int, size: int) -> Tensor:
    """Rows from `first` on; zeros where there are fewer."""
    rows = values[first : first + size]
    if rows.shape[0] == size:
        return rows.contiguous()
    return torch.cat([rows, values.new_zeros((size - rows.shape[0], *values.shape[1:]))])
