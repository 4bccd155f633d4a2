"""Sessions of the torch backend for its tests."""

from __future__ import annotations

from typing import Any

from backends.sessions import arguments
from hybrid.backends.torch.session import TorchSession
from hybrid.models.config import ModelConfig
from models.small import LLAMA


def session(cfg: ModelConfig = LLAMA, b: int = 3, t: int = 16, **settings: Any) -> TorchSession:
    return TorchSession(cfg, device="cpu", **arguments(b, t, settings))
