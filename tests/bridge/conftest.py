"""What the tests of the bridge share."""

from bridge.replay import recording, site

__all__ = ["recording", "site"]
