"""What the scheduler asks of the cache: admit, grow, checkpoint, commit, finish.

Who owns the KV of a request admitted with a match of m tokens and a checkpoint at c:

    [0, m // page_size full pages)   the tree; the request holds references and only reads
    rest of [0, m)                   copied into the request's own page (`page_copies`)
    [m, ...)                         the request; positions below `write_from` = m stay as they are

Tokens c..m run again for the state only. What is committed is shared from then on, and the
request writes only behind it.

A page that the request may write has group inputs beside its KV where `inputs` gives it a companion
(see `input_pages`), from before its first token on.

With a compressed pool the manager decides what is demoted and somebody else packs it:
`slots.take_demotions`, then `commit_demotion` or `abort_demotion` of each. Native slots that are on
their way to being free are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from jhybrid.cache.accounting import CacheStats, check_integrity, pool_stats
from jhybrid.cache.admission import Admission, Commit
from jhybrid.cache.allocator import PageAllocator, SlotAllocator
from jhybrid.cache.cache_pools import CachePools
from jhybrid.cache.host_store import HostMatch, HostStore
from jhybrid.cache.input_pages import InputPages, InputPolicy
from jhybrid.cache.lease import joined, take_lease
from jhybrid.cache.lease_inputs import inputs_kept, slide_inputs
from jhybrid.cache.native_slots import NativeSlots
from jhybrid.cache.offload import Offload, StateOffload, offloads
from jhybrid.cache.radix_cache import RadixCache, as_tokens
from jhybrid.cache.radix_node import Checkpoint, Insertion, Tokens
from jhybrid.cache.tiers import CheckpointTiers, Demotion


class CacheManager:
    """Pages, slots and the prefix tree of one server. Not thread-safe: the scheduler owns it."""

    def __init__(
        self,
        total_pages: int,
        page_size: int,
        total_slots: int,
        checkpoint_interval: int,
        *,
        compressed_slots: int = 0,
        lossless: bool = False,
        watermark: int = 0,
        inputs: InputPolicy | None = None,
        host: HostStore | None = None,
    ) -> None:
        """`lossless`: compressed states restore exactly. `watermark`: native slots kept free.
        `inputs`: which group inputs are kept; None for none. `host` takes what is evicted."""
        if checkpoint_interval < 1:
            raise ValueError(f"checkpoint_interval must be at least 1, got {checkpoint_interval}")
        self.page_size, self.checkpoint_interval = page_size, checkpoint_interval
        self.inputs = InputPages(inputs, total_pages) if inputs is not None else None
        pages = PageAllocator(total_pages, self.inputs)
        compressed = SlotAllocator(compressed_slots) if compressed_slots else None
        tiers = CheckpointTiers(SlotAllocator(total_slots), compressed, lossless=lossless)
        self.slots = NativeSlots(tiers, watermark)
        tree = RadixCache(page_size, pages, tiers)
        self.pools = CachePools(page_size, pages, tiers, self.slots, tree, self.inputs, host)
        self._offloads = list[Offload | StateOffload]()
        if host is not None:
            tree.on_evict = lambda node: self._offloads.extend(offloads(self.pools, node))
        self._leases: set[Admission] = set()

    def admit(
        self,
        tokens: Sequence[int] | Tokens,
        limit: int,
        reuse: bool = True,
        tokens_total: int = 0,
        *,
        strict: bool = False,
    ) -> Admission | None:
        """Matches at most `limit` tokens and takes a slot and pages for [0, tokens_total).

        `strict` matches only what is exact. All or nothing: None when there is no room now, with
        nothing held. When nothing else runs and no demotion is under way it fails only if
        `tokens_total` does not fit the pool or every slot is reserved; then rather than wait for
        its own hit to get out of the way it does without (`no_room`).
        """
        tokens = as_tokens(tokens)
        match = self.pools.tree.match(tokens, limit if reuse else 0, strict=strict)
        reason = match.reason if reuse else "disabled"
        host = HostMatch(match.length)
        if self.pools.host is not None and reuse:
            host = self.pools.host.match(tokens[: max(limit, 0)], match.length, strict=strict)
        wanted = tokens, tokens_total
        lease = take_lease(self.pools, match, host, *wanted, reason, strict)
        alone = not self._leases and not self.pools.tiers.demoting
        if lease is None and match.length and alone:
            match = self.pools.tree.match(tokens, 0)
            lease = take_lease(self.pools, match, HostMatch(0), *wanted, "no_room", strict)
        if lease is not None:
            self._leases.add(lease)
        return lease

    def grow(self, lease: Admission, tokens_total: int) -> bool:
        """Gets pages for the positions [0, tokens_total): all of them, or none and False.

        Evicts least recently used leaves when needed. When nothing else runs and the source is
        released, it fails only if the tokens do not fit the pool.
        """
        self._check_live(lease)
        total = self.pools.pages_for(tokens_total)
        needed = total - len(lease.page_table)
        if needed <= 0:
            return True
        pages = self.pools.take_pages(needed)
        last_resort = len(self._leases) == 1 and lease.lock.checkpoint_node is None
        if pages is None and last_resort and total <= self.pools.pages.total:
            # The request's own prefix is in the way, where the tree has other pages for it than
            # the request. Its references keep what it reads, so the tree may lose it.
            self.pools.tree.unlock(lease.lock)
            lease.shared = 0
            pages = self.pools.take_pages(needed)
        if pages is None:
            return False
        lease.page_table = joined(lease.page_table, pages)
        if self.inputs is not None:
            slide_inputs(self.pools, lease, pages, tokens_total)
        return True

    def inputs_kept(self, lease: Admission, start: int, end: int) -> bool:
        """Whether the group inputs of the matched tokens [start, end) can be replayed.

        Those that are in host memory get pages to come back to, be their KV there or here.
        """
        return inputs_kept(self.pools, lease, start, end)

    def take_offloads(self) -> list[Offload | StateOffload]:
        """What has been evicted since: to be copied before anything writes there."""
        taken, self._offloads = self._offloads, []
        return taken

    def offload(self) -> None:
        """Moves everything cached that no running request uses to host memory."""
        while self.pools.tree.evict_leaf() is not None:
            pass

    def release_source(self, lease: Admission) -> None:
        """The first step is dispatched: the checkpoint read and the pages copied may go.

        The device runs in order, so whoever gets them next writes after the read.
        """
        self._check_live(lease)
        self.pools.tree.unlock_checkpoint(lease.lock)
        self.pools.pages.release([src for src, _ in lease.page_copies], "running")
        lease.page_copies = []

    def checkpoint_depths(
        self, lease: Admission, start: int, end: int, prompt_len: int
    ) -> list[int]:
        """Depths in (start, end] where a state is worth keeping, in order.

        The grid; where the tree branches off; and one short of the prompt, the deepest state
        from which the very same prompt can go on, since one token must run to give logits.
        """
        step = self.checkpoint_interval
        depths = set(range((start // step + 1) * step, end + 1, step))
        depths.add(prompt_len - 1)
        if lease.branch_depth is not None:
            depths.add(lease.branch_depth)
        return sorted(depth for depth in depths if start < depth <= end)

    def commit_prefix(
        self,
        lease: Admission,
        tokens: Sequence[int] | Tokens,
        checkpoint: tuple[int, int] | None = None,
    ) -> Commit:
        """Shares the KV of `tokens`, the request's first ones, all of them computed (dispatched).

        `checkpoint` is (slot, depth) with a reserved slot; a refused one is freed. Where the tree
        had the tokens, the request goes over to the tree's full pages: read `page_table` anew.
        """
        self._check_live(lease)
        self._check_covered(lease, tokens)
        state = None
        if checkpoint is not None:
            slot, depth = checkpoint
            passing = depth not in (lease.known - 1, lease.branch_depth, lease.restored)
            state = Checkpoint(slot, depth, passing=passing)
            self.slots.claim(slot)
        inserted = self._insert(lease, tokens, state)
        if state is not None and inserted.refused:
            self.slots.release(state.slot)
        self._share(lease, inserted)
        if inserted.node.end > lease.lock.node.end:
            self.pools.tree.move_lock(lease.lock, inserted.node)
        new = inserted.node.end - inserted.duplicate
        return Commit(new, inserted.duplicate, inserted.refused)

    def keep_loaded(self, lease: Admission, tokens: Tokens) -> None:
        """The KV of `tokens` has been put into its pages (dispatched). A state of those tokens that
        has come from host memory, too, is a checkpoint of the tree again."""
        if lease.state_load is not None and lease.state_load.arrived:
            slot, depth = lease.state_load.slot, lease.state_load.depth
            lease.state_load = None
            self.commit_prefix(lease, tokens[:depth], (slot, depth))

    def finish(
        self, lease: Admission, tokens: Sequence[int] | Tokens, donate: bool = True
    ) -> Commit:
        """Ends the request: finished, aborted or preempted. Everything it holds is given up.

        `tokens` are those whose KV and state are written. They go to the tree, and the slot with
        them as their checkpoint if its state has that depth. With `donate` False nothing does.
        """
        self._check_live(lease)
        tokens = as_tokens(tokens)
        self._check_covered(lease, tokens)
        self.release_source(lease)
        if lease.state_load is not None:
            self.slots.give_up([lease.state_load.slot])
            lease.state_load = None
        commit, donated = Commit(0, 0, None), False
        if donate and len(tokens):
            state = Checkpoint(lease.slot, len(tokens))
            writes = state if lease.state_depth == state.depth else None
            inserted = self._insert(lease, tokens, writes)
            donated = writes is not None and inserted.refused is None
            refused = inserted.refused if writes else "depth"
            commit = Commit(inserted.node.end - inserted.duplicate, inserted.duplicate, refused)
        if not donated:
            self.slots.release(lease.slot)
        self.pools.tree.unlock(lease.lock)
        self.pools.pages.release(lease.page_table, "running")
        self._leases.remove(lease)
        lease.page_table = lease.page_table[:0]
        lease.slot, lease.state_depth = -1, None
        return commit

    def commit_demotion(self, demotion: Demotion) -> bool:
        """The pack has been done: hits read the compressed state, the native slot is free.

        False, and nothing changes, while a request that was admitted before reads the source.
        """
        return self.pools.tree.commit_demotion(demotion)

    def abort_demotion(self, demotion: Demotion) -> None:
        """The pack has failed, or will not be done: all is as before."""
        self.pools.tree.abort_demotion(demotion)

    @property
    def demoting(self) -> int:
        """Demotions that are neither committed nor aborted."""
        return self.pools.tiers.demoting

    def flush(self) -> None:
        """Drops everything cached that no running request uses."""
        self.pools.tree.flush()
        if self.pools.host is not None:
            self.pools.host.flush()

    def stats(self) -> CacheStats:
        return pool_stats(self.pools)

    def check_integrity(self) -> None:
        """Recounts pages, slots and locks of tree and requests. RuntimeError with the numbers."""
        check_integrity(self.pools, self._leases)

    def _insert(
        self, lease: Admission, tokens: Sequence[int] | Tokens, state: Checkpoint | None
    ) -> Insertion:
        """What the request has computed, for all that it has not been given."""
        inserted = self.pools.tree.insert(
            tokens, lease.page_table, state, exact=lease.exact, strict=lease.strict
        )
        lease.exact = lease.exact and inserted.node.exact  # it goes on with the tree's pages
        return inserted

    def _share(self, lease: Admission, inserted: Insertion) -> None:
        """Replaces the request's own full pages by the tree's where both have the same tokens."""
        first, last = lease.shared // self.page_size, inserted.duplicate // self.page_size
        if first < last:
            theirs = self.pools.tree.page_table(inserted.node)[first:last]
            self.pools.pages.retain(theirs, "running")
            self.pools.pages.release(lease.page_table[first:last], "running")
            lease.page_table[first:last] = theirs
        lease.shared = max(lease.shared, inserted.node.end)

    def _check_live(self, lease: Admission) -> None:
        if lease not in self._leases:
            raise RuntimeError("the admission is finished")

    def _check_covered(self, lease: Admission, tokens: Sequence[int] | Tokens) -> None:
        have, tokens_held = len(lease.page_table), len(lease.page_table) * self.page_size
        if len(tokens) > tokens_held:
            raise ValueError(f"{have} pages hold {tokens_held} tokens, not {len(tokens)}")
