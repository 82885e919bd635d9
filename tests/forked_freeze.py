"""Imported last by the process that becomes the daemons: what it has imported by then is no daemon's garbage.

Each daemon collects its garbage once it is set up. Looking through PyTorch's objects for it, and copying
their memory for that, took each a third of a second.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
