"""`hybrid_tab` lies outside the package: it is packed for the tab, and runs under any Python."""

import sys

from hybrid.resources import resource

sys.path.insert(0, str(resource("bridge/pyodide")))
