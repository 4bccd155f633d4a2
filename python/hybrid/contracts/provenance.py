"""Which build is running: commit, build id and time, from options and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.contracts.javascript import optional_text, parse_time

COMMIT_VARIABLES = (
    "HYBRID_BUILD_COMMIT",
    "DOPPLER_BUILD_COMMIT",
    "GIT_COMMIT",
    "COMMIT_SHA",
    "SOURCE_VERSION",
    "VERCEL_GIT_COMMIT_SHA",
)
ID_VARIABLES = ("HYBRID_BUILD_ID", "DOPPLER_BUILD_ID", "BUILD_ID", "VERCEL_BUILD_ID", "GITHUB_RUN_ID")
TIMESTAMP_VARIABLES = (
    "HYBRID_BUILD_TIMESTAMP",
    "DOPPLER_BUILD_TIMESTAMP",
    "BUILD_TIMESTAMP",
    "VERCEL_GIT_COMMIT_TIMESTAMP",
)


def build_provenance(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str | None]:
    """{commitHash, buildId, buildTimestamp}: each from the first place that is set, or None.

    Places, in order: options.buildProvenance.<field>; options.buildCommitHash, buildId or buildTimestamp; the
    variables above in `environment` (pass `os.environ`). Empty text, 0 and None count as not set; blank text is set,
    and gives None. The timestamp is epoch milliseconds or an ISO date, and becomes ISO in UTC; None when it is neither.
    """
    given = options.get("buildProvenance")
    nested: Mapping[str, Any] = given if isinstance(given, Mapping) else {}

    def first(field: str, option: str, variables: tuple[str, ...]) -> Any:
        places = [nested.get(field), options.get(option), *(environment.get(name) for name in variables)]
        return next((value for value in places if value), None)

    return {
        "commitHash": optional_text(first("commitHash", "buildCommitHash", COMMIT_VARIABLES)),
        "buildId": optional_text(first("buildId", "buildId", ID_VARIABLES)),
        "buildTimestamp": parse_time(first("buildTimestamp", "buildTimestamp", TIMESTAMP_VARIABLES)),
    }
