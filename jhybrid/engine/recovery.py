"""How a hit becomes an active state: one decision for each admission (design section 5).

    dense     the first piece of the suffix reads the tree's native slot and writes the request's
    dasc-nr   the compressed state is restored into the request's slot, omitted units zero
    dasc-wr   the last W_replay tokens before the checkpoint run from zeros in the request's slot,
              then the kept units are restored over them: omitted units stay as refreshed
    zero      KV is reused and no state

A dense checkpoint is read as it is, whichever of these was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels import NO_SLOT

from ..cache.admission import Admission
from .request import PrefixCacheUsage, RecoveryName

Move = tuple[int, int]  # a compressed slot to be restored into a native one

# Recoveries that only take what is exact. Without reuse, a prompt still meets what is cached when
# it is committed.
STRICT: tuple[RecoveryName, ...] = ("dense", "off")


@dataclass(frozen=True)
class Recovery:
    """Tokens [start, ...) of the sequence run, from the state in `load_slot` (NO_SLOT: zeros).

    `restore` is done before the first of them, or, where `replay` tokens are run only to refresh
    what the checkpoint omits, after those. `cacheable`: what is computed may go to the tree.
    """

    start: int
    load_slot: int
    usage: PrefixCacheUsage
    restore: Move | None = None
    replay: int = 0
    cacheable: bool = True


def choose(asked: RecoveryName, lease: Admission, window: int) -> Recovery:
    """What to do for a lease. `window` bounds a refresh: max W_u of dasc eq. 7 in tokens."""
    source, depth = lease.source, lease.restored

    def usage(name: RecoveryName, restored: int, cached: int, replayed: int) -> PrefixCacheUsage:
        return PrefixCacheUsage(name, lease.matched, restored, replayed, lease.reason, cached)

    if asked == "zero" and lease.matched:
        used = usage(asked, 0, lease.matched, 0)
        return Recovery(lease.matched, NO_SLOT, used, cacheable=False)
    if source is None:
        return Recovery(0, NO_SLOT, usage(asked, 0, 0, 0))
    if source.representation != "compressed":
        return Recovery(depth, source.slot, usage("dense", depth, depth, 0))
    restore = (source.slot, lease.slot)
    replay = min(depth, window) if asked == "dasc-wr" else 0
    used = usage(asked, depth, depth, replay)
    load = NO_SLOT if replay else lease.slot
    return Recovery(depth - replay, load, used, restore, replay)
