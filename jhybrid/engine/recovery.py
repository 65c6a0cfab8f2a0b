"""How a hit becomes an active state: one decision for each admission (design section 5).

    dense        the first piece of the suffix reads the tree's native slot, writes the request's
    dasc-nr      the compressed state is restored into the request's slot, omitted units zero
    dasc-wr      the last W_replay tokens before the checkpoint run from zeros in the request's
                 slot, then the kept units are restored over them: omitted units stay refreshed
    tail-replay  the last ceil(r m) group inputs of the m matched tokens are replayed from zeros
    anchored     the group inputs from the checkpoint on are replayed from its state; what a
                 compressed one omits is refreshed as in dasc-wr, but from group inputs, too
    zero         KV is reused and no state

A dense checkpoint is read as it is, whichever of the first three was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pallas_kernels import NO_SLOT

from ..cache.admission import Admission
from .request import PrefixCacheUsage, RecoveryName

Move = tuple[int, int]  # a compressed slot to be restored into a native one
Span = tuple[int, int]  # tokens [start, end)

# Recoveries that only take what is exact. Without reuse, a prompt still meets what is cached when
# it is committed.
STRICT: tuple[RecoveryName, ...] = ("dense", "off")
REPLAYING: tuple[RecoveryName, ...] = ("tail-replay", "anchored")  # they need group inputs


@dataclass(frozen=True)
class Recovery:
    """Tokens [start, ...) of the sequence run, from the state in `load_slot` (NO_SLOT: zeros).

    `restore` is done before the first of them, or, where `replay` tokens are run only to refresh
    what the checkpoint omits, after those. `spans` are group inputs to be replayed first, from
    `load_slot` and then from one another's states; with `restore_after`, `restore` is done when
    the first of them has been. `cacheable`: what is computed may go to the tree, and `exact` says
    if nothing in the state is approximate.
    """

    start: int
    load_slot: int
    usage: PrefixCacheUsage
    restore: Move | None = None
    replay: int = 0
    spans: tuple[Span, ...] = ()
    restore_after: bool = False
    cacheable: bool = True
    exact: bool = True


@dataclass(frozen=True)
class ReplayRules:
    """`kept` says whether the group inputs of matched tokens [start, end) are there, `exact`
    whether they are as they were computed. `ratio` is the share of a match that may be replayed."""

    ratio: float
    kept: Callable[[Admission, int, int], bool]
    exact: bool


def replay_length(ratio: float, matched: int) -> int:
    """ceil(ratio * matched), where 0.1 * 30 is 3."""
    return min(matched, math.ceil(round(ratio * matched, 6)))


def choose(asked: RecoveryName, lease: Admission, window: int, rules: ReplayRules) -> Recovery:
    """What to do for a lease. `window` bounds a refresh: max W_u of dasc eq. 7 in tokens."""
    if asked in REPLAYING and lease.matched:
        replayed = None
        if asked == "anchored":
            replayed = _anchored(lease, window, rules)
        replayed = replayed or _tail_replay(asked, lease, rules)
        return replayed or _without_inputs(lease, window, rules)
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


def _tail_replay(asked: RecoveryName, lease: Admission, rules: ReplayRules) -> Recovery | None:
    """The end of the match from zeros; None where its group inputs are not all there."""
    matched = lease.matched
    length = replay_length(rules.ratio, matched)
    if not rules.kept(lease, matched - length, matched):
        return None
    reason = None if asked == "tail-replay" else "far_checkpoint"
    used = PrefixCacheUsage("tail-replay", matched, 0, length, reason, matched)
    spans = ((matched - length, matched),) if length else ()
    exact = rules.exact and length == matched
    return Recovery(matched, NO_SLOT, used, spans=spans, exact=exact)


def _anchored(lease: Admission, window: int, rules: ReplayRules) -> Recovery | None:
    """From the checkpoint (none: from zeros) to the end of the match; None where that is further
    than the ratio allows, or the group inputs are not all there."""
    source, depth, matched = lease.source, lease.restored, lease.matched
    compressed = source is not None and source.representation == "compressed"
    refresh = min(depth, window) if compressed else 0
    gap = matched - depth
    far = gap > replay_length(rules.ratio, matched)
    if far or not rules.kept(lease, depth - refresh, matched):
        return None
    used = PrefixCacheUsage("anchored", matched, depth, gap + refresh, None, matched)
    spans = tuple((a, b) for a, b in ((depth - refresh, depth), (depth, matched)) if a < b)
    if source is None or not compressed:
        load = NO_SLOT if source is None else source.slot
        return Recovery(matched, load, used, spans=spans, exact=rules.exact or not gap)
    return Recovery(
        matched,
        load_slot=NO_SLOT if refresh else lease.slot,
        usage=used,
        restore=(source.slot, lease.slot),
        spans=spans,
        restore_after=refresh > 0,
        exact=rules.exact or not spans,
    )


def _without_inputs(lease: Admission, window: int, rules: ReplayRules) -> Recovery:
    """The checkpoint and a prefill of what is behind it."""
    compressed = lease.source is not None and lease.source.representation == "compressed"
    found = choose("dasc-wr" if compressed else "dense", lease, window, rules)
    reason = "no_group_inputs" if lease.restored < lease.matched else None
    return replace(found, usage=replace(found.usage, reason=reason))
