"""The typed tree of a run's configuration.

Keys in files, on the command line and in JSON are camelCase (`model.kvHeads`); the attributes here are the same names
in snake_case (`config.model.kv_heads`). An unknown key or a value of another type is an error, nothing is coerced. A
key that may be null says what null means. The text under each attribute is its description in the JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

LARGEST_INTEGER = 2**53 - 1  # that every runtime and every file holds exactly
FLOAT32_LEAST, FLOAT32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers; devices flush smaller ones to 0

# What a program of kernels is made for in seconds: each executed layer is a few dozen nodes, and each position a row of
# the rotary table.
MOST_LAYERS = 1024
MOST_POSITIONS = 2**20
MOST_WINDOW = 10_000  # steps; each is in the manifest of every checkpoint, which must stay readable


def _exact(value: int) -> int:
    if value > LARGEST_INTEGER:
        raise ValueError("a whole number of at most 2^53 - 1")
    return value


def _uint32(value: int) -> int:
    if value >= 2**32:
        raise ValueError("a whole number that 32 bits hold, at most 4294967295")
    return value


def _float32(value: float) -> float:
    """Devices compute in float32: 1e-300 would be 0 there, and 1e300 infinite."""
    if value and not FLOAT32_LEAST <= value <= FLOAT32_MOST:
        raise ValueError(f"a number that float32 can hold, {FLOAT32_LEAST:.3g} to {FLOAT32_MOST:.3g}")
    return value


def _text(value: str) -> str:
    """Python makes lone surrogates of bytes that are not UTF-8; no file of a run could hold them."""
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("a text of whole characters, in UTF-8")
    return value


def _path(value: str) -> str:
    if "\0" in value:
        raise ValueError("a path without NUL characters")
    return value


Count = Annotated[int, Field(ge=1), AfterValidator(_exact)]
DeviceCount = Annotated[int, Field(ge=1), AfterValidator(_uint32)]
Whole = Annotated[int, Field(ge=0), AfterValidator(_exact)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_float32)]
NotNegative = Annotated[float, Field(ge=0), AfterValidator(_float32)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, AfterValidator(_text)]
FilePath = Annotated[Text, AfterValidator(_path)]
Name = Annotated[FilePath, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
Positions = Annotated[int, Field(ge=1, le=MOST_POSITIONS)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
LayerOrder = Annotated[tuple[Whole, ...], Field(strict=False, min_length=1, max_length=MOST_LAYERS)]


class Section(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        validate_by_name=False,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelSection(Section):
    """The decoder: its shape and its parts."""

    vocabulary_size: Count | None = None
    """Rows of the embedding table. null: what the tokenizer needs."""
    context_length: Positions | None = None
    """The longest position the model can see. null: data.sequenceLength."""
    layers: Layers = 4
    """Blocks with weights of their own."""
    width: Count = 128
    """Model width C."""
    heads: Count = 4
    """Query heads H."""
    kv_heads: Count | None = None
    """Key/value heads K; heads must be a multiple of it. null: as many as heads."""
    head_width: Count | None = None
    """Width of one head D. null: width / heads."""
    feed_forward_width: Count | None = None
    """Hidden width F. null: 4 * width, or 8/3 * width rounded up to a multiple of 32 for swiglu."""
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    """Which normalisation."""
    norm_eps: Positive = 1e-5
    """Added to the variance inside the norms."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions or a learned table."""
    rope_base: Positive = 10000.0
    """Base of the rotary frequencies."""
    activation: Literal["swiglu", "gelu", "relu2", "silu"] = "swiglu"
    """The feed-forward non-linearity."""
    bias: bool = False
    """Biases in linear layers and layer norms."""
    tied_embeddings: bool = True
    """The output head is the embedding table."""
    window: Count | None = None
    """A token sees this many tokens, itself included. null: all before it."""
    dropout: Share = 0.0
    """Probability that an element of a residual branch is dropped in training."""
    schedule: LayerOrder | None = None
    """Layer indices in order of execution; repeat some for a looped model. null: each once."""
    initializer_range: Positive = 0.02
    """Standard deviation of the initial matrices."""


class TokenizerSection(Section):
    """How text becomes ids."""

    type: Literal["bytes", "characters", "bpe"] = "bytes"
    """bytes: the 256 byte values. characters: those of the corpus. bpe: trained on the corpus, or loaded from path."""
    path: FilePath | None = None
    """A tokenizer.json to load (bpe only). null: train one on the corpus."""
    vocabulary_size: Count = 4096
    """Entries of a tokenizer that is trained here (bpe only)."""


class SplitSection(Section):
    """What is held out for validation."""

    by: Literal["document", "share"] = "document"
    """document: whole documents, drawn by their number. share: the last part of the token stream, in one piece."""
    validation_share: Share = 0.1
    """Share of the documents, or of the tokens, that is held out. 0: no validation."""


class SamplesSection(Section):
    """How the token stream becomes samples of sequenceLength tokens."""

    mode: Literal["windows", "packed"] = "windows"
    """windows: cut the stream at equal distances. packed: fit whole documents together, splitting only the longer
    ones."""
    stride: Count | None = None
    """Distance between the starts of two windows, at most sequenceLength; 1 has a window at every token. null: as long
    as a sample."""
    isolate_documents: bool = True
    """In windows, a document does not see the one before it (in packed samples it never does)."""


class DataSection(Section):
    """Text, tokens and batches."""

    source: Name | Names = "stdlib"
    """`stdlib` (the sources of the running Python's standard library), or a text file, folder or list of them."""
    store: FilePath | None = None
    """A token store made by `hybrid data build`, instead of source and tokenizer. null: build one, kept in cacheDir."""
    cache_dir: FilePath | None = None
    """Where built token stores are kept. null: `hybrid` in the user's cache folder."""
    field: Text = "text"
    """The key of the text in the objects of a JSON Lines file."""
    max_bytes: Count | None = None
    """Read at most this many bytes of the corpus. null: all."""
    tokenizer: TokenizerSection = TokenizerSection()
    split: SplitSection = SplitSection()
    samples: SamplesSection = SamplesSection()
    sequence_length: Positions = 64
    """Tokens of one sample, T."""
    batch_size: Count = 8
    """Samples of one optimizer step: the global batch, over all microbatches and ranks."""
    microbatch_size: Count | None = None
    """Samples that are on the device at once. null: the whole batch. Changes rounding, not what is learned."""
    prefetch: Whole = 2
    """Steps whose batches are made ahead by another thread. 0: none."""


class ObjectiveSection(Section):
    """What is minimised."""

    type: Literal["cross_entropy"] = "cross_entropy"
    """The mean cross-entropy of the target tokens of a step."""
    z_loss: NotNegative = 0.0
    """Weight of the mean squared log-partition, added to the loss."""
    z_loss_steps: Whole | None = None
    """The z-loss applies to this many first steps. null: to all."""


class OptimizerSection(Section):
    """AdamW and clipping."""

    type: Literal["adamw", "adam"] = "adamw"
    """Two names of one rule with decoupled weight decay."""
    lr: NotNegative = 1e-3
    """Learning rate at the top of the schedule."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices and embedding tables; biases and norm weights have none."""
    max_norm: NotNegative = 1.0
    """Gradients are scaled down to this global norm. 0: not clipped."""


class ScheduleSection(Section):
    """The learning rate by optimizer step."""

    type: Literal["constant", "step_decay", "cosine", "cosine_to_min", "wsd"] = "cosine_to_min"
    """step_decay: times gamma every stepSize. cosine: to zero, cut off at minLr. cosine_to_min: ends in minLr. wsd:
    warm-up, stable, decay to minLr."""
    warmup_steps: Whole = 0
    """Steps of linear warm-up to lr."""
    total_steps: Count | None = None
    """Steps after the warm-up over which the cosines and wsd run. null: the rest of the run, fixed when it begins."""
    step_size: Count = 1000
    """Steps between two decays (step_decay)."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Factor of one decay (step_decay)."""
    decay_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The final decay's share of totalSteps (wsd)."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the final decay (wsd)."""
    min_lr: NotNegative = 0.0
    """The learning rate never falls below this."""


class PrecisionSection(Section):
    """Number formats."""

    type: Literal["f32", "mixed-f16", "mixed-bf16"] = "f32"
    """mixed-f16 keeps activations and weight copies in f16; master weights, gradients and sums stay f32. mixed-bf16 the
    same in bf16, with which only the torch backend computes."""
    numerics: Literal["exact", "fast"] = "exact"
    """fast: torch on CUDA may use TF32, sums in half precision and kernels that do not repeat bit for bit. Other
    backends are always exact."""


class LossScalingSection(Section):
    """Dynamic loss scaling, as in the runner we mirror."""

    enabled: bool | None = None
    """null: on exactly in mixed-f16."""
    initial_scale: Positive = 1024.0
    min_scale: Positive = 1.0
    max_scale: Positive = 65536.0
    scale_factor: Annotated[float, Field(ge=1)] = 2.0
    """Growth after growthInterval steps without overflow."""
    backoff_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Change after an overflow."""
    growth_interval: DeviceCount = 2000
    overflow_check: bool = True
    """Change the scale after an overflow. Non-finite gradients never reach the weights, whatever this says."""


class ThresholdsSection(Section):
    """Limits of the alerts; null switches one off."""

    max_step_time_ms: float | None = None
    max_gradient_norm: float | None = None
    max_nan_count: Annotated[float | None, Field(alias="maxNaNCount")] = None
    max_inf_count: float | None = None
    max_saturation_count: float | None = None
    min_effective_lr: float | None = None


class AlertsSection(Section):
    """Which telemetry is judged."""

    enabled: bool = False
    fail_on_alert: bool = False
    """End the run (exit code 4) at the first alert. Each step is judged before it is applied: a round trip a step."""
    thresholds: ThresholdsSection = ThresholdsSection()


class TelemetrySection(Section):
    """What the metrics say besides the loss."""

    mode: Literal["step", "window", "epoch"] = "step"
    window_size: Annotated[int, Field(ge=1, le=MOST_WINDOW)] = 8
    """Steps in the rolling averages."""
    emit_nan_inf_counters: Annotated[bool, Field(alias="emitNaNInfCounters")] = True
    alerts: AlertsSection = AlertsSection()
    tensorboard: bool = False
    """Also write TensorBoard events to the run folder (needs the `tensorboard` extra)."""
    wandb: bool = False
    """Also log to Weights & Biases, as its environment variables say (needs the `wandb` extra)."""


class CheckpointSection(Section):
    """When the run is saved, and what is kept."""

    every: Whole = 200
    """Save every so many steps, and at the end. 0: only at the end and on a stop signal."""
    every_hours: Positive | None = None
    """Also save when so many hours have passed since the last time."""
    keep_last: Whole = 3
    """The newest this many checkpoints are kept. 0: all."""
    keep_every: Whole = 0
    """Also keep each checkpoint whose step is a multiple of this; keepLast must not be 0 then. 0: none."""
    keep_hours: Positive | None = None
    """Also keep the first checkpoint, and each that is at least so many hours younger than the one kept before it;
    keepLast must not be 0 then."""


class EvaluationSection(Section):
    """Validation while training."""

    every: Whole = 100
    """Evaluate every so many steps, and at the end. 0: never."""
    batches: Whole = 20
    """Batches of one evaluation, each of data.microbatchSize samples. 0: the whole validation split."""


class SamplingSection(Section):
    """Text samples while training, and the defaults of `hybrid sample`."""

    every: Whole = 0
    """Write a sample every so many steps. 0: never."""
    prompt: Text = "\n"
    """What the sample continues."""
    tokens: Count = 160
    temperature: NotNegative = 0.8
    """0: always the most likely token."""
    top_k: Whole = 0
    """Sample among the k most likely tokens. 0: among all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that together reach this probability."""
    seed: Whole = 1337


class BackendSection(Section):
    """What computes. Nothing here changes what is learned."""

    name: Literal["auto", "webgpu", "reference", "torch", "browser"] = "auto"
    """auto: webgpu if there is an adapter, else torch if it is installed, else reference; under torchrun, torch. torch:
    PyTorch on CUDA or the CPU (needs the `torch` extra). reference: NumPy, slow. browser: `hybrid train` opens a tab
    that trains (needs the `web` extra); other commands take it as auto."""
    adapter: Text | None = None
    """Part of the name of the GPU to use. null: the system's choice."""
    device_profile: Literal["adapter", "default"] = "adapter"
    """adapter: use what the GPU offers. default: stay within WebGPU's default limits and features."""
    recompute: bool | Literal["selective"] = False
    """Recompute each block in the backward pass: less memory, more time. selective: with torch, all but the products of
    matrices and attention; elsewhere the same as true."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where torch computes. auto: on CUDA if there is a device, else on the CPU."""
    compile: bool | None = None
    """Let torch compile each layer before the first step. null: on CUDA."""
    sharding: Literal["auto", "none", "full", "hybrid"] = "auto"
    """How several torch processes hold weights, gradients and moments. none: each has all of them. full: each has a
    part. hybrid: each node has all of them, in parts. auto: none where that fits a device with room to spare, else
    hybrid on several nodes if a node is enough, else full."""
    max_recoveries: Whole = 3
    """How often a lost device is replaced before the run fails."""


class RunSection(Section):
    """The run itself."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Names the run folder `runs/NAME` when no --run-dir is given, and the model in the metrics."""
    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] = 1337
    """Fixes initial weights, data order and dropout."""
    steps: Count | None = 600
    """Optimizer steps of the run. null: `epochs`."""
    epochs: Count = 1
    """Passes over the training split, when steps is null."""
    log_every: Count = 10
    """Fetch metrics from the device and print a line every so many steps; the metrics file has every step."""
    max_hours: Positive | None = None
    """Stop as on a signal (save, exit code 75) after this many hours in this process."""


class RunConfig(Section):
    """Everything that describes one training run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    loss_scaling: LossScalingSection = LossScalingSection()
    telemetry: TelemetrySection = TelemetrySection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    sampling: SamplingSection = SamplingSection()
    backend: BackendSection = BackendSection()
    run: RunSection = RunSection()
