"""`compile_plan`: from a model, a shape and optimizer settings to the plan that trains it.

Steps: lay out the fixed arenas; trace the graphs a run needs; lower each to dispatches (`plan.rules`); colour and pack
temporaries (`plan.memory`); settle the access mode of every binding; write the document and check it against the
device's limits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.errors import ConfigError
from hybrid.graph.ir import Graph, Value
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs
from hybrid.optim.groups import parameter_groups
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan import kernels
from hybrid.plan.document import BoundSlice, Choice, Clear, Command, Dispatch, Plan, PlanKernel, PlanTensor, check_plan
from hybrid.plan.kernels import optimizer as optimizer_kernels
from hybrid.plan.kernels import state as state_kernels
from hybrid.plan.kernels.base import Kernel, source_hash
from hybrid.plan.layout import MIRRORS, ParameterLayout, lay_out_parameters, place_all
from hybrid.plan.lowering import TEMPORARY, Lowering, Spec, Tensor
from hybrid.plan.memory import COLOURS, Temporary, colour, pack
from hybrid.plan.profile import DeviceProfile
from hybrid.plan.programs import decode_graph, evaluation_graph, training_graph
from hybrid.plan.rules import lower_node

RING_ROWS = 256  # rows of the metrics ring: steps between two readbacks at most
RING_WORDS = 16
SCHEDULE_ROWS = 1024  # optimizer steps per refill of the schedule table
SCHEDULE_HEADER = 8


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is compiled for.

    batch_size, sequence_length: B and T of one microbatch. max_grad_norm: None or 0 for no clipping. loss_scaling:
    mirrored configuration of the loss scaler. recompute: recompute each block in the backward pass. cache_length:
    positions of the key/value cache (None: the model's context length); 0 leaves out the decoding programs.
    """

    model: ModelConfig
    batch_size: int
    sequence_length: int
    precision: str = "f32"
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    max_grad_norm: float | None = None
    loss_scaling: dict[str, Any] | None = None
    recompute: bool = False
    cache_length: int | None = None
    prefill_tokens: int = 64
    variants: Mapping[str, str] = field(default_factory=dict)
    tune: bool = False
    training: bool = True


class _Compiler:
    def __init__(self, settings: PlanSettings, profile: DeviceProfile) -> None:
        self.settings = settings
        self.profile = profile
        self.half = settings.precision == "mixed-f16"
        self.specs = parameter_specs(settings.model)
        self.groups = parameter_groups(self.specs)
        self.parameters: ParameterLayout = lay_out_parameters(self.specs, self.groups, profile, half=self.half)
        self.fixed: dict[str, Tensor] = dict(self.parameters.tensors)
        self.arenas: dict[str, list[int]] = {
            name: list(self.parameters.pages) for name in ("params", "grads", "moment1", "moment2")
        }
        if self.half:
            self.arenas["half"] = [page // 2 for page in self.parameters.pages]
        self.lowered: dict[str, Lowering] = {}
        self.constants: dict[str, str] = {}
        self.constant_data: dict[str, bytes] = {}

    # Fixed arenas

    def place(self, arena: str, tensors: Sequence[tuple[str, Sequence[int], str]]) -> None:
        if tensors:
            placed, pages = place_all(arena, tensors, self.profile)
            self.fixed.update(placed)
            self.arenas[arena] = pages

    def place_state(self, partials: int) -> None:
        width = 2 + 2 * len(self.groups)
        self.place(
            "state",
            [
                ("step_state", (64,), "u32"),
                ("loss_seed", (1,), "f32"),
                ("z_loss", (1,), "f32"),
            ],
        )
        self.place(
            "flags", [("overflow_flags", (2,), "u32")]
        )  # alone on its page: writable in dispatches that read other state
        self.place(
            "step",
            [
                ("step_input", (64,), "u32"),
                ("schedule", (SCHEDULE_HEADER + SCHEDULE_ROWS * width,), "f32"),
            ],
        )
        self.place("partials", [("partials", (partials, state_kernels.PARTIAL_WORDS), "u32")])
        self.place("metrics", [("ring", (RING_ROWS, RING_WORDS), "u32")])
        self.place("evaluation", [("eval_state", (64,), "u32")])

    def place_graph(self, graphs: dict[str, tuple[str, Graph]]) -> None:
        """Inputs, constants, caches and outputs of all graphs. `graphs`: program -> (input prefix, graph)."""
        inputs: dict[str, tuple[str, Sequence[int], str]] = {}
        tables: dict[str, tuple[str, Sequence[int], str]] = {}
        caches: dict[str, tuple[str, Sequence[int], str]] = {}
        outputs: dict[str, tuple[str, Sequence[int], str]] = {}
        act = "f16" if self.half else "f32"

        def add(into: dict[str, tuple[str, Sequence[int], str]], name: str, value: Value) -> None:
            entry = (name, value.shape, act if value.dtype == "act" else value.dtype)
            if into.setdefault(name, entry) != entry:
                raise ValueError(f"{name}: two programs disagree on its shape")

        for program, (prefix, graph) in graphs.items():
            for name, value in graph.inputs.items():
                if name == "dropout_keys":
                    self.place("dropout", [(name, value.shape, "u32")])
                elif name not in ("loss_seed", "z_loss", "data_step"):
                    add(inputs, prefix + name, value)
            for name, value in graph.constants.items():
                add(tables, "tables/" + name, value)
                data = graph.constant_data[name]
                sha = hashlib.sha256(data).hexdigest()
                self.constants["tables/" + name] = sha
                self.constant_data[sha] = data
            for name, value in graph.caches.items():
                add(caches, "cache/" + name, value)
            if program in ("prefill", "decode"):
                add(outputs, "logits", graph.outputs["logits"])
        self.place("inputs", list(inputs.values()))
        self.place("tables", list(tables.values()))
        self.place("caches", list(caches.values()))
        self.place("outputs", list(outputs.values()))
        # The step counter that keys dropout is the first word of what the host writes before each step.
        step_input = self.fixed["step_input"]
        self.fixed["data_step"] = Tensor("data_step", (1,), "u32", step_input.arena, step_input.page, step_input.offset)

    # Programs

    def lower(self, program: str, graph: Graph, prefix: str) -> Lowering:
        lowering = Lowering(
            graph,
            program,
            self.settings.precision,
            self.profile,
            self.fixed,
            input_prefix=prefix,
            preferred=self.settings.variants,
            tune=self.settings.tune,
        )
        if program in ("prefill", "decode"):
            lowering.bind_output(graph.outputs["logits"], self.fixed["logits"])
        lowering.plan_fusions()
        for node in graph.nodes:
            lowering.node = node
            if not lowering.is_deferred(node):
                lower_node(lowering, node)
        lowering.node = None
        self.lowered[program] = lowering
        return lowering

    def empty(self, program: str) -> Lowering:
        self.lowered[program] = Lowering(Graph(), program, self.settings.precision, self.profile, self.fixed)
        return self.lowered[program]

    def accumulate_losses(self, lowering: Lowering, state: str) -> None:
        outputs = lowering.graph.outputs
        rows = outputs["loss_rows"].type.elements
        launch = state_kernels.loss_accumulate(rows, precision=self.settings.precision)
        lowering.emit(launch, [outputs["loss_rows"], outputs["nll_rows"], self.fixed[state]], what="loss_accumulate")

    def load_program(self) -> None:
        """f16 copies from the masters, after weights were uploaded."""
        load = self.empty("load")
        for piece in self.parameters.pieces(self.profile.binding_bytes):
            master, copy = (self.parameters.range_slice(arena, piece) for arena in ("params", "half"))
            launch = optimizer_kernels.to_half(master.size // 4, precision=self.settings.precision)
            load.emit(launch, [master, copy], what="to_half")

    def step_programs(self) -> None:
        """What a step runs before and after its microbatches."""
        precision = self.settings.precision
        begin = self.empty("begin")
        begin.emit(
            state_kernels.step_begin(precision=precision),
            [self.fixed[n] for n in ("step_input", "step_state", "loss_seed", "z_loss", "overflow_flags")],
            what="step_begin",
        )
        binding = self.profile.binding_bytes
        stats = self.empty("optimizer_stats")
        offset = 0
        for piece in self.parameters.pieces(binding):
            part = self.parameters.range_slice("grads", piece)
            launch = state_kernels.grad_stats(part.size // 4, partial_offset=offset, precision=precision)
            stats.emit(launch, [part, self.fixed["partials"]], what=f"grad_stats.{offset}")
            offset += state_kernels.partials_of(part.size // 4)
        scaler = DynamicLossScaler(self.settings.loss_scaling)
        finalize = state_kernels.step_finalize(
            offset, ring_rows=RING_ROWS, max_norm=self.settings.max_grad_norm or 0.0, scaler=scaler, precision=precision
        )
        stats.emit(
            finalize,
            [self.fixed[n] for n in ("partials", "step_state", "overflow_flags", "ring")],
            what="step_finalize",
        )

        apply = self.empty("optimizer_apply")
        for piece in self.parameters.pieces(binding):
            slices = [self.parameters.range_slice(arena, piece) for arena in ("params", "grads", "moment1", "moment2")]
            count = slices[0].size // 4
            launch = optimizer_kernels.adamw(
                count,
                group=piece.group,
                groups=len(self.groups),
                beta1=self.settings.optimizer.beta1,
                beta2=self.settings.optimizer.beta2,
                eps=self.settings.optimizer.eps,
                precision=precision,
                half=self.half,
            )
            state = [self.fixed["schedule"], self.fixed["step_state"]]
            copy = [self.parameters.range_slice("half", piece)] if self.half else []
            apply.emit(launch, [*slices, *state, *copy], what=f"adamw.{self.groups[piece.group].name}")

    def compile(self) -> Plan:
        s = self.settings
        cache = s.model.context_length if s.cache_length is None else s.cache_length
        graphs: dict[str, tuple[str, Graph]] = {
            "evaluate": ("", evaluation_graph(s.model, s.batch_size, s.sequence_length))
        }
        if s.training:
            training = training_graph(s.model, s.batch_size, s.sequence_length, recompute=s.recompute)
            graphs = {"forward_backward": ("", training), **graphs}
        if cache:
            graphs["prefill"] = ("prefill/", decode_graph(s.model, min(s.prefill_tokens, cache), cache))
            graphs["decode"] = ("decode/", decode_graph(s.model, 1, cache))
        partials = sum(
            state_kernels.partials_of((piece.end - piece.begin) // 4)
            for piece in self.parameters.pieces(self.profile.binding_bytes)
        )
        self.place_state(partials)
        self.place_graph(graphs)
        for program, (prefix, graph) in graphs.items():
            lowering = self.lower(program, graph, prefix)
            if program == "forward_backward":
                self.accumulate_losses(lowering, "step_state")
            elif program == "evaluate":
                self.accumulate_losses(lowering, "eval_state")
        if self.half:
            self.load_program()
        if s.training:
            self.step_programs()
        else:
            self.drop_training_arenas()
        self.place_temporaries()
        sites = graphs["forward_backward"][1].dropout_sites if s.training else []
        return self.assemble(sites)

    def drop_training_arenas(self) -> None:
        """Weights without gradients and moments, for evaluation and sampling."""
        for arena, prefix in MIRRORS.items():
            del self.arenas[arena]
            self.fixed = {name: tensor for name, tensor in self.fixed.items() if not name.startswith(prefix)}

    # Placement

    def place_temporaries(self) -> None:
        heights: list[list[int]] = [[] for _ in range(COLOURS)]
        for lowering in self.lowered.values():
            _set_lifetimes(lowering)
            alive = [t.temporary for t in lowering.temporaries if t.temporary]
            for c in range(COLOURS):
                pages = pack([t for t in alive if t.colour == c], self.profile.page_bytes)
                heights[c] += [0] * (len(pages) - len(heights[c]))
                heights[c][: len(pages)] = [max(a, b) for a, b in zip(heights[c], pages, strict=False)]
        first = [sum(len(heights[k]) for k in range(c)) for c in range(COLOURS)]
        self.arenas["activations"] = [page for pages in heights for page in pages]
        for lowering in self.lowered.values():
            for tensor in lowering.temporaries:
                if tensor.temporary:
                    tensor.arena = "activations"
                    tensor.page, tensor.offset = (
                        first[tensor.temporary.colour] + tensor.temporary.page,
                        tensor.temporary.offset,
                    )

    def writable_positions(self) -> dict[str, frozenset[int]]:
        """For each kernel the read bindings that must be declared writable, closed over all its dispatches."""
        upgraded: dict[str, frozenset[int]] = {}
        changed = True
        while changed:
            changed = False
            for lowering in self.lowered.values():
                for spec in lowering.specs:
                    for launch in spec.launches:
                        kernel = launch.kernel
                        current = upgraded.get(kernel.name, frozenset())
                        wanted = current | _read_positions_on_written_pages(kernel, spec, current)
                        if wanted != current:
                            upgraded[kernel.name] = wanted
                            changed = True
        return upgraded

    def assemble(self, dropout_sites: Sequence[str]) -> Plan:
        writable = self.writable_positions()
        plan_kernels: dict[str, PlanKernel] = {}
        sources: dict[str, str] = {}
        seen: dict[str, Kernel] = {}

        def name_of(kernel: Kernel) -> str:
            if seen.setdefault(kernel.name, kernel) != kernel:
                raise ValueError(f"two kernels are called {kernel.name!r}")
            if kernel.name not in plan_kernels:
                text = kernel.source(self.settings.precision, writable.get(kernel.name, frozenset()))
                sha = source_hash(text)
                sources[sha] = text
                positions = writable.get(kernel.name, frozenset())
                plan_kernels[kernel.name] = PlanKernel.of(kernel, sha, self.settings.precision, positions)
            return kernel.name

        flags = self.fixed["overflow_flags"]

        def command(spec: Spec) -> Dispatch:
            choices = tuple(
                Choice(name_of(x.kernel), tuple(x.uniforms), x.workgroups, variant)
                for x, variant in spec.launches.items()
            )
            bindings = [
                BoundSlice(s.tensor.arena, s.tensor.page, s.tensor.offset + s.offset, s.size) for s in spec.slices
            ]
            if self.half and spec.kernel.stores_activations:
                bindings.append(BoundSlice(flags.arena, flags.page, flags.offset, flags.bytes))
            return Dispatch(choices, tuple(bindings), spec.label, spec.phase, spec.product_class)

        s = self.settings
        programs: dict[str, list[Command]] = {}
        for name, lowering in self.lowered.items():
            programs[name] = [command(spec) for spec in lowering.specs]
        if s.training:
            programs["begin"].insert(0, Clear("grads"))
        programs["evaluate"].insert(0, Clear("evaluation"))
        features = ["shader-f16"] if self.half else []
        features += sorted({feature for kernel in plan_kernels.values() for feature in kernel.features})
        largest = max(
            (b.size for p in programs.values() for c in p if isinstance(c, Dispatch) for b in c.bindings), default=0
        )
        tensors = dict(self.fixed)
        plan = Plan(
            model=s.model.to_dict(),
            shape={"B": s.batch_size, "T": s.sequence_length},
            precision=s.precision,
            requires={
                "features": features,
                "limits": {
                    "maxStorageBufferBindingSize": largest,
                    "maxBufferSize": max(page for pages in self.arenas.values() for page in pages),
                },
            },
            arenas=self.arenas,
            tensors={
                name: PlanTensor(t.arena, t.page, t.offset, t.shape, t.dtype, t.group) for name, t in tensors.items()
            },
            kernels=plan_kernels,
            sources=sources,
            constants=self.constants,
            programs=programs,
            settings={
                "optimizer": s.optimizer.to_dict(),
                "groups": [{"name": g.name, "decay": g.decay, "names": list(g.names)} for g in self.groups],
                "initial": {spec.name: {"init": spec.init, "std": spec.std} for spec in self.specs},
                "maxGradNorm": s.max_grad_norm,
                "lossScaling": s.loss_scaling,
                "recompute": s.recompute,
                "dropoutSites": list(dropout_sites),
                "ringRows": RING_ROWS,
                "scheduleRows": SCHEDULE_ROWS,
                "prefillTokens": min(s.prefill_tokens, s.model.context_length),
            },
            constant_data=self.constant_data,
        )
        check_plan(plan, self.profile)
        return plan


def compile_plan(settings: PlanSettings, profile: DeviceProfile | None = None) -> Plan:
    """The checked plan for these settings on a device like `profile` (WebGPU's default limits if None).

    Raises ConfigError for inconsistent settings and LimitExceeded (tensor, limit, remedy) for what cannot fit.
    """
    settings.model.validate()
    if settings.precision not in kernels.base.PRECISIONS:
        raise ConfigError(
            f"precision {settings.precision!r}: expected one of {', '.join(kernels.base.PRECISIONS)}; "
            "only the torch backend computes in others"
        )
    if settings.batch_size < 1 or not 1 <= settings.sequence_length <= settings.model.context_length:
        raise ConfigError(
            f"batch {settings.batch_size} x {settings.sequence_length}: both must be at least 1, and the sequence at "
            f"most the model's "
            f"context length {settings.model.context_length}"
        )
    return _Compiler(settings, profile or DeviceProfile()).compile()


def _set_lifetimes(lowering: Lowering) -> None:
    """Give every temporary its first and last command, and colours in order of first use."""
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for index, spec in enumerate(lowering.specs):
        for part in spec.slices:
            if part.tensor.arena == TEMPORARY:
                first.setdefault(part.tensor, index)
                last[part.tensor] = index
    lowering.temporaries = [t for t in lowering.temporaries if t in first]
    for tensor in lowering.temporaries:
        tensor.temporary = Temporary(tensor.name, tensor.bytes, first[tensor], last[tensor])
    written: list[tuple[Temporary, list[Temporary]]] = []
    for tensor in sorted(lowering.temporaries, key=lambda t: first[t]):
        spec = lowering.specs[first[tensor]]
        reads = [
            part.tensor.temporary
            for binding, part in zip(spec.kernel.bindings, spec.slices, strict=True)
            if binding.access == "read" and part.tensor.temporary and part.tensor is not tensor
        ]
        assert tensor.temporary is not None
        written.append((tensor.temporary, [t for t in reads if t is not None]))
    colour(written, COLOURS)


def _read_positions_on_written_pages(kernel: Kernel, spec: Spec, upgraded: frozenset[int]) -> frozenset[int]:
    pages = [(s.tensor.arena, s.tensor.page) for s in spec.slices]
    written = {pages[i] for i, b in enumerate(kernel.bindings) if b.access == "read_write" or i in upgraded}
    return frozenset(
        i for i, b in enumerate(kernel.bindings) if b.access == "read" and i not in upgraded and pages[i] in written
    )


def launches_used(plan: Plan) -> int:
    """How many distinct pipelines the default choices of all programs need."""
    return len({d.choices[0].kernel for program in plan.programs for d in plan.dispatches(program)})
