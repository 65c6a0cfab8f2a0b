"""Tiny models: more threads than one only wait for each other."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
