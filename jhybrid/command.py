"""What the commands share that work on files and need no accelerator: convert and plan."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable

import jax


def run_on_host(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """0 when `run` is done; 2 with one message on stderr when the input is not usable.

    Runs on the CPU unless JAX_PLATFORMS, JAX's own setting, says otherwise.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates what it does not do
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    try:
        run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
