"""hybrid: one training run, three runtimes, the same numbers.

`docs/` describes the formats; `hybrid.training.runner` is the training loop; `python -m hybrid train` runs it.
"""

__version__ = "0.1.0"
