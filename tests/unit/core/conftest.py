"""One thread: these tests compare bits, and share the machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
