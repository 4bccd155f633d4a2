"""A training session in torch: the model of `hybrid.models` under autograd, on a CPU or a CUDA device.

A step never waits for the device: losses, norm, loss scale and the optimizer's counter stay there, and one row of
numbers for each step is copied to the host while the next one runs. At most two steps are under way.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, StepInfo, StepResult
from hybrid.backends.row_index import previous_ids
from hybrid.backends.sampling import generate
from hybrid.backends.state_check import check_state
from hybrid.backends.torch.attention import blocks, is_plain
from hybrid.backends.torch.decode import DecodeOps
from hybrid.backends.torch.host_memory import keep_freed_memory
from hybrid.backends.torch.modules import Root, make_root
from hybrid.backends.torch.numerics import choose_device, policy
from hybrid.backends.torch.ops import Microbatch, TorchOps, dropout_sites
from hybrid.backends.torch.ranks import Ranks
from hybrid.backends.torch.sharding import (
    ONE_RANK,
    Held,
    Layout,
    activation_bytes,
    choose_layout,
    find_machines,
    gathered_bytes,
    gathered_type,
    gathered_weights,
    let_go,
    shard,
    stay_whole,
    sum_over_ranks,
)
from hybrid.backends.torch.timing import StepTimes
from hybrid.backends.torch.update import Updater, step_result
from hybrid.backends.torch.warm_up import empty_batches, kept_for_backward, try_layer
from hybrid.backends.validate import validate_batch
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.contracts.names import unknown_name
from hybrid.data.batch import Batch
from hybrid.errors import ConfigError, DataContractError, LimitExceeded
from hybrid.models.config import ModelConfig
from hybrid.models.decoder import Inputs, last_token_logits
from hybrid.models.initial_numpy import initial_rows
from hybrid.models.parameters import parameter_specs
from hybrid.objectives.cross_entropy import cross_entropy
from hybrid.optim.groups import parameter_groups
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.programs import training_graph

PRECISIONS = {"f32": torch.float32, "mixed-bf16": torch.bfloat16, "mixed-f16": torch.float16}
MOST_UNDER_WAY = 2  # steps


@dataclass(frozen=True)
class ShardedState:
    """Weights and moments under the names of `SessionState`: f32 tensors, and DTensors where they are sharded."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass
class _Finished:
    """A step that was applied: its row on its way to the host."""

    info: StepInfo
    row: Tensor
    times: StepTimes

    def result(self) -> StepResult:
        milliseconds = self.times.milliseconds()  # waits for the row, too
        return step_result(self.row.tolist(), self.info, **milliseconds, timing_source="device")


class TorchSession:
    """Implements `backends.protocol.TrainingSession`.

    precision: "f32", "mixed-bf16" or "mixed-f16"; masters, moments, gradients of parameters and norms are f32 in each.
    max_grad_norm: clip the gradient norm to this; None or 0 does not clip. loss_scaling: fields of
    `DynamicLossScaler`. seed: of initial weights and dropout. recompute: run each layer's forward part again in its
    backward part, or ("selective") all of it but products and attention. device: "auto" (CUDA if there is one), "cpu"
    or "cuda". numerics: see `numerics`. compiled: whether torch compiles each layer (None: on CUDA); `note` hears why,
    when it cannot. training: False for a session that only evaluates and samples, eagerly; otherwise one microbatch of
    nothing is run through the model at once, so that compiling is over, and what does not fit is known, before the
    first step. ranks: the processes that train together, each with a session of its own: gradients and losses are
    those of all of them. sharding: how they hold the state (see `sharding`); what `note` hears about it, `describe`
    says, too. Under shards every method that runs the model, or reads or fills whole tensors, is called on every rank.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        batch_size: int,
        sequence_length: int,
        precision: str = "f32",
        optimizer: OptimizerSettings,
        max_grad_norm: float | None = None,
        loss_scaling: dict[str, Any] | None = None,
        seed: int = 1337,
        recompute: bool | str = False,
        device: str = "auto",
        numerics: str = "exact",
        compiled: bool | None = None,
        training: bool = True,
        note: Callable[[str], None] = lambda text: None,
        ranks: Ranks | None = None,
        sharding: str = "auto",
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(unknown_name("precision of the torch backend", precision, PRECISIONS))
        optimizer.validate()
        self.model = model
        self.precision = precision
        self.shape = (batch_size, sequence_length)
        self.device = choose_device(device)
        self.numerics = policy(numerics)
        self.numerics.apply(self.device)
        if training and self.device.type == "cpu":
            keep_freed_memory()
        self._loss_scaling = loss_scaling
        trace = training_graph(model, batch_size, sequence_length)  # checks every shape, too
        self._ops = TorchOps(PRECISIONS[precision], self.device, seed=seed, sites=dropout_sites(trace))
        if model.positions == "rope":
            self._ops.rope_rows(model.context_length, model.head_width, model.rope_base)  # not inside compiled code
        self.ranks = ranks
        self.layout = ONE_RANK if ranks is None else self._choose_layout(sharding, recompute, ranks)
        if ranks is not None:
            note(f"{self.layout.parallel} on {ranks.size} ranks: {self.layout.reason}")
        self._specs = {spec.name: spec for spec in parameter_specs(model)}
        self._info: StepInfo | None = None
        self._under_way: deque[_Finished] = deque()
        self._runs = self._readbacks = 0
        self._activation_bytes = 0
        self.mode = "eager"
        self._joined = False  # whether gradients are those of all ranks
        self._stays_whole = False  # whether a sample keeps gathered weights
        compiled = training and (compiled if compiled is not None else self.device.type == "cuda")
        self._root = self._make_root(recompute)
        self._run: Any = self._root
        with ranks.together("setting up shards") if ranks is not None and self.layout.sharded else nullcontext():
            if self.layout.sharded and compiled:
                self._compile(note, self._warm_up_layers)
            with _limits("weights, gradients and moments"):
                mesh = None
                if self.layout.sharded:
                    mesh = shard(self._root, self.layout, model, PRECISIONS[precision], self.device)
                    self._joined = True
                self._held = Held(self._root.weights(), mesh, ranks)
                self._fill_initial(seed)
                self._updater = Updater(
                    self._held.local,
                    parameter_groups(tuple(self._specs.values())),
                    optimizer,
                    max_grad_norm or 0.0,
                    DynamicLossScaler(loss_scaling),
                    self.device,
                )
            if not self.layout.sharded and compiled:
                self._compile(note, self._warm_up)
            if training:
                self._warm_up()
        if ranks is not None and not self.layout.sharded:
            with ranks.together("setting up DDP"):
                self._run = sum_over_ranks(self._root)
                self._joined = True
        self.compared = ranks is None  # whether the weights have been seen to be those of the other ranks

    def _make_root(self, recompute: bool | str) -> Root:
        """The model, with memory that is not filled; without any where shards are to be made of it."""
        device = torch.device("meta") if self.layout.sharded else self.device
        with _limits("weights"):
            values = {name: torch.empty(spec.shape, device=device) for name, spec in self._specs.items()}
        root = make_root(self.model, values)
        for layer in root.layers:
            layer.recompute = recompute
        return root

    def _choose_layout(self, wanted: str, recompute: bool | str, ranks: Ranks) -> Layout:
        item = torch.finfo(PRECISIONS[self.precision]).bits // 8
        activations = activation_bytes(self.model, self.shape[0] * self.shape[1], item, recompute)
        return choose_layout(wanted, find_machines(ranks, self.device), self.model, activations)

    def _fill_initial(self, seed: int) -> None:
        """Each rank makes the rows that it holds."""
        with torch.no_grad():
            for name, local in self._held.local.items():
                local.copy_(torch.from_numpy(initial_rows(self._specs[name], seed, *self._held.rows(name))))

    def _compile(self, note: Callable[[str], None], warm_up: Callable[[], None]) -> None:
        """Compile the layers; back to eager, on every rank, where that fails on any."""
        self._root.compile_layers()
        reason = ""
        try:
            warm_up()
            self.mode = "compiled"
        except LimitExceeded:
            raise
        except Exception as error:  # whatever a compiler dies of, the model runs without it
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if self.ranks is not None:
            reasons = self.ranks.each("compiling", lambda: reason)
            reason = next((f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text), "")
        if reason:
            self.mode = "eager"
            self._root.run_eagerly()
            self._info = None
            note(f"torch cannot compile this model here, training goes on without: {reason}")

    def _warm_up(self) -> None:
        """Forward and backward of microbatches of nothing. Leaves no trace."""
        batches = empty_batches(self.shape)
        self.begin(StepInfo(1, batches[0].ids.size, len(batches)))
        for batch in batches:
            self.accumulate(batch)
        self._clear()
        self._info = None
        self._runs = 0

    def _warm_up_layers(self) -> None:
        """The same with one layer for each type that layers are gathered in. While there are no shards, nobody waits
        for a rank where this fails."""
        schedule = self.model.schedule
        kinds = {gathered_type(self.model, index, self._ops.act): index for index in set(schedule)}
        self._data_step = torch.zeros(1, dtype=torch.int64, device=self.device)
        for batch in empty_batches(self.shape):
            inputs = self._inputs(batch, torch.zeros(1, device=self.device), training=True)
            for kind, index in kinds.items():
                with _limits("activations"):
                    try_layer(self._ops, self._root.layers[index], index, kind, inputs, self.model)
        self._runs = 0

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """A copy on the device, int64."""
        tensor = torch.from_numpy(array.astype(np.int64))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, info: StepInfo) -> None:
        if self._info is not None:
            raise RuntimeError(f"begin: step {self._info.data_step} was not applied")
        if info.target_tokens < 1:
            raise DataContractError(f"step {info.data_step} has no target tokens: its loss would have no meaning")
        if info.microbatches < 1:
            raise ConfigError(f"step {info.data_step} has {info.microbatches} microbatches: expected at least 1")
        if len(self._under_way) >= MOST_UNDER_WAY:
            self._under_way[-MOST_UNDER_WAY].times.wait()
        if self._stays_whole:
            self._let_go()
        self._info = info
        self._accumulated = 0
        self._times = StepTimes(self.device)
        self._clear()
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._data_step = torch.tensor([info.data_step], device=self.device)
        self._z_loss = torch.tensor([info.z_loss], dtype=torch.float32, device=self.device)
        self._seed = (self._updater.step_scale() / info.target_tokens).float()

    def _clear(self) -> None:
        """Let go of gradients."""
        self._held.clear()
        self._updater.clear()

    def accumulate(self, batch: Batch) -> None:
        info = self._info
        if info is None or self._accumulated == info.microbatches:
            raise RuntimeError("accumulate: more microbatches than `begin` announced, or no `begin`")
        inputs = self._inputs(batch, self._z_loss, training=True)
        last = self._accumulated + 1 == info.microbatches
        with _limits("activations"), self._counting_activations(), self._adding_up(last):
            self._times.skip()
            loss, nll = self._run(self._ops, inputs, self.model, cross_entropy)
            self._times.part("forward")
            loss.backward(self._seed.expand_as(loss))
            self._times.part("backward")
        self._sums += torch.stack([loss.detach().double().sum(), nll.detach().double().sum()])
        self._accumulated += 1
        if last:
            self._complete()
            self._times.part("optimizer")

    @contextmanager
    def _adding_up(self, last: bool) -> Iterator[None]:
        """Forward and backward of one microbatch, after the last of which gradients are those of all ranks."""
        if isinstance(self._root, FSDPModule):
            self._root.set_requires_gradient_sync(last or not self.layout.sync_last)
            self._root.set_requires_all_reduce(last)
        waits = self._run.no_sync() if self._run is not self._root and not last else nullcontext()
        with waits:
            yield

    def _complete(self) -> None:
        """What the whole step adds up to, in one reduction. Gradients that several ranks have are counted on one."""
        self._held.take_gradients()
        counts = self._held.first_replica or not self._joined
        statistics = self._updater.statistics() if counts else torch.zeros(3, dtype=torch.float64, device=self.device)
        self._totals = torch.cat([self._sums, statistics])
        if self._joined and self.ranks is not None:
            dist.all_reduce(self._totals)

    def check(self, batch: Batch) -> None:
        """DataContractError for a batch that `accumulate` would refuse."""
        validate_batch(batch, self.model.vocabulary_size, self.model.context_length, self.shape)

    def _inputs(self, batch: Batch, z_loss: Tensor, *, training: bool) -> Inputs:
        """The batch on the device, and `ops` told about it."""
        self.check(batch)
        ids, positions, segments, targets = (
            self._upload(array) for array in (batch.ids, batch.positions, batch.segment_ids, batch.targets)
        )
        window = self.model.window
        self._ops.training = training
        self._ops.microbatch = Microbatch(
            masks={window: blocks(segments, window, is_plain(batch.segment_ids))},
            sample_ids=self._upload(batch.sample_ids) if training else None,
            data_step=self._data_step if training else None,
        )
        self._runs += 1
        return Inputs(ids, positions, segments, targets, z_loss)

    @contextmanager
    def _counting_activations(self) -> Iterator[None]:
        """On a CPU, the bytes kept for the backward pass, counted in the first microbatch; CUDA counts by itself."""
        if self._activation_bytes or self.device.type == "cuda":
            yield
            return
        with kept_for_backward(self._root) as kept:
            yield
        (self._activation_bytes,) = kept

    def inspect(self) -> StepResult:
        info = self._judged()
        self._readbacks += 1
        return step_result(self._row.tolist(), info)

    def _judged(self) -> StepInfo:
        info = self._info
        if info is None or self._accumulated != info.microbatches:
            raise RuntimeError("inspect or apply: not all microbatches of the step have been accumulated")
        self._row = self._updater.judge(self._totals, info.target_tokens)
        return info

    def apply(self) -> None:
        self._times.skip()
        info = self._judged()
        self._updater.apply(self._row)
        self._clear()  # nobody needs them now, and evaluating or saving needs the room
        row = self._row
        if self.device.type == "cuda":
            row = torch.empty_like(row, device="cpu", pin_memory=True).copy_(row, non_blocking=True)
        self._times.part("optimizer")
        self._under_way.append(_Finished(info, row, self._times))
        self._info = None

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        results = []
        while self._under_way and (wait or self._under_way[0].times.arrived):
            results.append(self._under_way.popleft().result())
            self._readbacks += 1
        return results

    # --- evaluation and sampling -------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch) -> Evaluation:
        with torch.no_grad(), _limits("activations"):
            inputs = self._inputs(batch, torch.zeros(1, device=self.device), training=False)
            _, nll = self._root(self._ops, inputs, self.model, cross_entropy)
            total = nll.double().sum().item()
        self._let_go()
        return Evaluation(total, batch.target_tokens, overflow=not isfinite(total))

    def _let_go(self) -> None:
        """Of the weights that evaluations and samples have gathered: the next ones may differ."""
        if self._stays_whole:
            stay_whole(self._root, self.model.schedule, False)
            self._stays_whole = False
        let_go(self._root)

    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]:
        """See `backends.sampling.generate`. The weights are those of the moment each token is asked for. Under shards
        `decode` is what every rank must call."""
        yield from self.generate_with(self.decode, prompt, options)

    def generate_with(
        self, decode: Callable[[list[int], int], NDArray[np.float32]], prompt: list[int], options: GenerateOptions
    ) -> Iterator[int]:
        """The same with some other way to `decode`."""
        yield from generate(
            lambda ids: decode(ids, 0),
            lambda token, position: decode([token], position),
            prompt,
            options,
            vocabulary_size=self.model.vocabulary_size,
            context_length=self.model.context_length,
        )

    def decode(self, ids: list[int], start: int) -> NDArray[np.float32]:
        """The logits after `ids`, which come after the `start` tokens of earlier calls.

        Under shards the weights are gathered once for a sample, and stay whole until there is something else to do,
        where a step has room for whole gradients, of which there are none now; else they are gathered for each call.
        """
        if start == 0:
            if self.layout.sharded and self.layout.sync_last and self._info is None:
                self._stays_whole = True
                stay_whole(self._root, self.model.schedule, True)
            self._decoding = DecodeOps(PRECISIONS[self.precision], self.device, self.model.context_length)
            self._seen: list[int] = []  # the tokens that its caches hold
        ops = self._decoding
        ops.start = start
        del self._seen[start:]
        ops.previous_ids = self._upload(previous_ids(self._seen, self.model.context_length))
        self._seen += ids
        inputs = Inputs(
            ids=torch.tensor([ids], device=self.device),
            positions=torch.arange(start, start + len(ids), device=self.device)[None],
            last=torch.tensor([len(ids) - 1], device=self.device),
        )
        self._runs += 1
        with torch.no_grad(), _limits("key/value caches"):
            logits: Tensor = self._root(ops, inputs, self.model, last_token_logits)
        if not self._stays_whole:
            self._let_go()
        array: NDArray[np.float32] = logits.cpu().numpy()
        return array

    # --- state -------------------------------------------------------------------------------------------------------

    def export_state(self) -> SessionState:
        if self._info is not None:
            raise RuntimeError(f"export_state: step {self._info.data_step} is under way; apply it first")
        state = self.sharded_state()
        return SessionState(
            model={name: _host_copy(weight) for name, weight in state.model.items()},
            optimizer={name: _host_copy(moment) for name, moment in state.optimizer.items()},
            optimizer_step=self._updater.optimizer_step,
            scaler=self._updater.scaler_state(),
        )

    def help_export(self) -> None:
        """What the other ranks do while rank 0 calls `export_state`: one tensor at a time is whole."""
        state = self.sharded_state()
        for tensor in (*state.model.values(), *state.optimizer.values()):
            if isinstance(tensor, DTensor):
                tensor.full_tensor()

    def import_state(self, state: SessionState) -> None:
        """CheckpointCorrupt when a name, shape, type or scaler field is not what this model needs; nothing has
        changed then."""
        self.check_state(state)
        self.load(state)
        self.reset(state.optimizer_step, state.scaler)

    def check_state(self, state: SessionState) -> None:
        """What `import_state` refuses."""
        check_state(state, {name: spec.shape for name, spec in self._specs.items()})
        if state.scaler:
            DynamicLossScaler(self._loss_scaling).restore(state.scaler)

    def load(self, state: SessionState | None) -> None:
        """Fill weights and moments. Every rank must call this; only rank 0 has the state, the others give None."""
        for name in self._specs:
            self.load_full("model", name, None if state is None else state.model[name])
        for name in self._updater.moments():
            self.load_full("optimizer", name, None if state is None else state.optimizer[name])

    def load_full(self, group: str, name: str, values: NDArray[np.float32] | None) -> None:
        """Fill one tensor of `sharded_state` ("model" or "optimizer") with the whole tensor that rank 0 gives; the
        others give None. Every rank must call this."""
        if self._stays_whole:
            self._let_go()
        tensor = getattr(self.sharded_state(), group)[name]
        with torch.no_grad():
            self._held.fill(tensor, None if values is None else torch.from_numpy(values))

    def sharded_state(self) -> ShardedState:
        """This rank's part of the state: the tensors themselves, which later steps change."""
        whole = self._held.whole
        weights = {name: whole(name, local.detach()) for name, local in self._held.local.items()}
        moments = self._updater.moments()
        return ShardedState(weights, {name: whole(name.split("/", 1)[1], m) for name, m in moments.items()})

    def scalars(self) -> tuple[int, dict[str, Any]]:
        """The rest of the state: updates applied, and the fields of the loss scaler."""
        return self._updater.optimizer_step, self._updater.scaler_state()

    def reset(self, optimizer_step: int, scaler: dict[str, Any]) -> None:
        """Go on from here, with weights and moments that are, or will be, filled by `load`."""
        fresh = DynamicLossScaler(self._loss_scaling)
        if scaler:
            fresh.restore(scaler)
        self._updater.restore(optimizer_step, fresh)
        self._clear()
        self._info = None
        self._under_way.clear()

    def state_tensors(self) -> list[Tensor]:
        """What this rank holds of weights and moments, in one order on every rank."""
        return [*(weight.detach() for weight in self._held.local.values()), *self._updater.moments().values()]

    def checksum(self) -> int:
        """Of the bits of all weights, as this rank computes with them."""
        places = {name: 2 * place + 1 for place, name in enumerate(self._specs)}
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for name, weight in gathered_weights(self._root):
            bits = weight.detach().view(torch.int32 if weight.itemsize == 4 else torch.int16)
            total += places[name] * bits.to(torch.int64).sum()
        return int(total.item()) & (2**64 - 1)

    def describe(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else platform.machine() or "CPU"
        facts: dict[str, Any] = {
            "backend": "torch",
            "adapter": f"torch {torch.__version__} on {name}",
            "device": self.device.type,
            "precision": self.precision,
            "mode": self.mode,
            "kernel_path": f"torch-{self.device.type}-{self.precision}-{self.mode}",
            "numerics": self.numerics.to_dict(),
            "threads": torch.get_num_threads(),
        }
        if self.ranks is not None:
            facts.update(worldSize=self.ranks.size, parallel=self.layout.parallel, sharding=self.layout.to_dict())
        if cuda:
            facts["gpuAdapter"] = {"name": name, "vendor": "nvidia", "backend": "cuda", "driver": torch.version.cuda}
        return facts

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by arena. `gathered`: the most that is here for a time, while others hold it.
        `activations`: on CUDA, the most that was ever allocated beside the others; on a CPU, what one microbatch keeps
        for its backward part (without the products that selective recomputing keeps)."""
        weights = sum(weight.nbytes for weight in self._held.local.values())
        arenas = {"params": weights, "grads": weights, "moment1": weights, "moment2": weights}
        if self.layout.sharded:
            arenas["gathered"] = gathered_bytes(self.model, whole_gradients=self.layout.sync_last)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            arenas["activations"] = max(0, peak - sum(arenas.values()))
        else:
            arenas["activations"] = self._activation_bytes
        return {**arenas, "total": sum(arenas.values())}

    def counters(self) -> dict[str, int]:
        """`submits` counts runs of the model; torch's allocator keeps its buffers to itself."""
        return {"submits": self._runs, "readbacks": self._readbacks, "buffers_created": 0, "pipelines_created": 0}

    def close(self) -> None:
        self._clear()
        self._under_way.clear()


def _host_copy(tensor: Tensor) -> NDArray[np.float32]:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    array: NDArray[np.float32] = tensor.detach().cpu().numpy()
    return array.copy() if tensor.device.type == "cpu" else array


@contextmanager
def _limits(what: str) -> Iterator[None]:
    """LimitExceeded where torch could not allocate memory."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            first_line = str(error).splitlines()[0]
            raise LimitExceeded(
                f"no memory left for {what}: {first_line}; use a smaller data.microbatchSize, backend.recompute or "
                "mixed precision"
            ) from error
        raise
