"""What the tests of the bridge share."""

from bridge.replay import recording, site
from bridge.served import asked, built, served

__all__ = ["asked", "built", "recording", "served", "site"]
