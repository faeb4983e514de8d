"""Adapters are made by one thread at a time, whichever model tree they are for.

PEFT puts the parameters of a new adapter on the meta device, and for that replaces a method of all
modules of the process (accelerate's `init_on_device`). Two threads that do so at once leave each
other's parameters without values, and the method replaced for good.
"""

from __future__ import annotations

import threading

MAKING_ADAPTERS = threading.Lock()
