"""From a resolved configuration to a training session on some backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from hybrid.backends.protocol import TrainingSession
from hybrid.config.loading import to_settings
from hybrid.config.resolve import model_config, optimizer_settings
from hybrid.config.tree import RunConfig
from hybrid.errors import MissingDependency

Progress = Callable[[str, int, int], None]  # what, done, total
Note = Callable[[str], None]


def choose_backend(config: RunConfig, note: Note = lambda text: None) -> str:
    """The backend that `backend.name` means here: for `auto`, webgpu if it has an adapter, else torch where that is
    installed, else reference, with a note that says why. A run that is trained in a browser is evaluated and sampled as
    with `auto`."""
    if config.backend.name not in ("auto", "browser"):
        return config.backend.name
    from hybrid.backends.webgpu.device import NoAdapter, choose_adapter, list_adapters

    try:
        choose_adapter(list_adapters(), config.backend.adapter)
    except NoAdapter as error:
        backend = "reference" if find_spec("torch") is None else "torch"
        note(f"the {backend} backend computes, because there is no WebGPU adapter: {error}")
        return backend
    return "webgpu"


def check_backend(config: RunConfig) -> None:
    """What a run needs of this machine and can be told before its data is read: the packages, and a GPU that is named.

    Errors: MissingDependency, NoAdapter.
    """
    needed = {
        "torch": config.backend.name == "torch",
        "tensorboard": config.telemetry.tensorboard,
        "wandb": config.telemetry.wandb,
    }
    for package, is_needed in needed.items():
        if is_needed and find_spec(package) is None:
            raise MissingDependency(package, package)
    if config.backend.adapter is not None and config.backend.name in ("auto", "webgpu"):
        from hybrid.backends.webgpu.device import NoAdapter, choose_adapter, list_adapters

        try:
            choose_adapter(list_adapters(), config.backend.adapter)
        except NoAdapter:
            if config.backend.name == "webgpu":  # `auto` goes on without one
                raise


def make_session(
    config: RunConfig, note: Note = lambda text: None, progress: Progress | None = None, *, training: bool = True
) -> TrainingSession:
    """A session with fresh weights. One microbatch is what a batch of the session holds.

    progress(what, done, total) reports the set-up of a device. training: False for a session that only evaluates and
    samples, and starts faster. Errors: ConfigError, LimitExceeded, MissingDependency, NoAdapter.
    """
    arguments = {**session_settings(config), "seed": config.run.seed}
    backend = choose_backend(config, note)
    if backend == "torch":
        from hybrid.backends.torch.session import TorchSession

        return TorchSession(model_config(config), **torch_settings(config), training=training, note=note)
    if backend == "reference":
        from hybrid.backends.reference.session import ReferenceSession

        return ReferenceSession(model_config(config), **arguments)
    from hybrid.backends.webgpu.session import WebGPUSession

    session = WebGPUSession(
        model_config(config),
        **arguments,
        adapter=config.backend.adapter,
        default_limits=config.backend.device_profile == "default",
        metrics_interval=_interval(config),
        training=training,
        progress=progress,
    )
    info = session.device.info
    if training and info.is_software and config.backend.name == "auto":
        note(f"{info.name} is a software driver: on a processor, --backend torch trains several times as fast")
    return session


def session_settings(config: RunConfig) -> dict[str, Any]:
    """What a session is made for, beside the model: these are arguments of every session, and of `PlanSettings`."""
    return {
        "batch_size": config.data.microbatch_size,
        "sequence_length": config.data.sequence_length,
        "precision": config.precision.type,
        "optimizer": optimizer_settings(config),
        "max_grad_norm": config.optimizer.max_norm or None,
        "loss_scaling": to_settings(config)["lossScaling"],
        "recompute": bool(config.backend.recompute),
    }


def torch_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a session of the torch backend."""
    return {
        **session_settings(config),
        "seed": config.run.seed,
        "recompute": config.backend.recompute,
        "device": config.backend.device,
        "numerics": config.precision.numerics,
        "compiled": config.backend.compile,
        "sharding": config.backend.sharding,
    }


def _interval(config: RunConfig) -> int:
    """Steps between readbacks of metrics. Runs that judge every step read every step anyway."""
    return 1 if config.telemetry.alerts.fail_on_alert else min(config.run.log_every, MOST_STEPS_BETWEEN_READBACKS)


# Half of the rows in a session's metrics ring (plan.compiler.RING_ROWS).
MOST_STEPS_BETWEEN_READBACKS = 128
