"""Errors that a tab reports, as the errors they are here."""

from __future__ import annotations

from hybrid import errors
from hybrid.bridge.launch.events import ErrorEvent
from hybrid.errors import AlertRaised, ContractMismatch, HybridError
from hybrid.training.view import printable

_TYPES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, HybridError) and value is not HybridError
}


class TabFailed(HybridError):
    """Something in the tab went wrong that nobody there had a name for."""


class NoAdapter(HybridError):
    """The browser has no WebGPU adapter to use; the message says what to do there."""


def error_of(event: ErrorEvent) -> HybridError:
    """The typed error that ends the command: same class, same message, same exit code as in the tab."""
    message = printable(event.message)
    kind = NoAdapter if event.name == "NoAdapter" else _TYPES.get(event.name)
    if kind is None:
        prefix = "" if event.name == "HybridError" else f"the tab failed: {event.name}: "
        error: HybridError = TabFailed(prefix + message)
    else:
        # Their constructors compose a message out of parts; this one is composed already.
        error = kind.__new__(kind)
        Exception.__init__(error, message)
    if isinstance(error, ContractMismatch):
        error.differences = tuple((str(field), saved, current) for field, saved, current in event.differences)
    if isinstance(error, AlertRaised):
        error.alerts, error.step = tuple(event.alerts), event.step
    if event.stack:
        error.add_note(f"in the tab:\n{printable(event.stack)}")
    return error
