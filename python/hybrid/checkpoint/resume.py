"""May this run go on from that checkpoint? Only if everything that decides its trajectory is what it was, or if each
change was accepted by name and with a reason, which is then part of the lineage for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hybrid.checkpoint.manifest import Fingerprints
from hybrid.contracts.fingerprint import require_agreement
from hybrid.contracts.javascript import iso_time
from hybrid.errors import ConfigError


def check_resume(
    saved: Fingerprints,
    current: Fingerprints,
    accepted: Mapping[str, str],
    *,
    source: str = "command",
    operator: str | None = None,
    now: Callable[[], float] = time.time,
) -> tuple[dict[str, Any], ...]:
    """Audit records of the accepted changes, one for each field that differs, to be added to those of the checkpoint.

    accepted: reason by dotted field, such as `contract.optimizer.learning_rate`; a field stands for everything below
    it. source, operator: who accepted. now: Unix time in seconds. Errors: ContractMismatch with a table of what
    differs and is not accepted; ConfigError for a reason that is empty, or a field that does not differ.
    """
    for path, reason in accepted.items():
        if not reason.strip():
            raise ConfigError(
                f"the accepted change {path!r} has no reason: say why, it is recorded in the run's lineage"
            )
    timestamp = iso_time(now() * 1000)
    return tuple(
        {
            "field": field,
            "saved": before,
            "current": after,
            "reason": _reason(field, accepted),
            "timestamp": timestamp,
            "source": source,
            "operator": operator,
        }
        for field, before, after in require_agreement(saved.to_json(), current.to_json(), accepted)
    )


def _reason(field: str, accepted: Mapping[str, str]) -> str:
    """The reason of the longest accepted path that covers `field`; `require_agreement` made sure that there is one."""
    return accepted[max((path for path in accepted if f"{field}.".startswith(f"{path}.")), key=len)]
