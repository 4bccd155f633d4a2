"""The torch backend: the models of `hybrid.models` under autograd, on the CPU and on CUDA, in one process or many.
May import: everything below `backends`, `backends`' own shared modules, and torch, which only this folder imports.
"""

import os
from importlib.util import find_spec

from hybrid.errors import MissingDependency

if find_spec("torch") is None:
    raise MissingDependency("torch", "torch")

# Before torch is loaded: its store warns of every second that a rank waits for an order.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
