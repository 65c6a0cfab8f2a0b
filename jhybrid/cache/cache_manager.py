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

import numpy as np

from jhybrid.cache.admission import Admission, CacheStats, Commit, count_held
from jhybrid.cache.allocator import PageAllocator, SlotAllocator
from jhybrid.cache.host_store import CHUNK_ROWS, Chunk, HostMatch, HostStore
from jhybrid.cache.input_pages import NONE, InputPages, InputPolicy
from jhybrid.cache.native_slots import NativeSlots
from jhybrid.cache.offload import Load, Offload, StateLoad, StateOffload
from jhybrid.cache.radix_cache import RadixCache, as_tokens
from jhybrid.cache.radix_node import Checkpoint, Insertion, Match, Node, PageIds, Tokens
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
        self.page_size = page_size
        self.checkpoint_interval = checkpoint_interval
        self.inputs = InputPages(inputs, total_pages) if inputs is not None else None
        self._pages = PageAllocator(total_pages, self.inputs)
        compressed = SlotAllocator(compressed_slots) if compressed_slots else None
        self._tiers = CheckpointTiers(SlotAllocator(total_slots), compressed, lossless=lossless)
        self.slots = NativeSlots(self._tiers, watermark)
        self._tree = RadixCache(page_size, self._pages, self._tiers)
        self.host, self._offloads = host, list[Offload | StateOffload]()
        if host is not None:
            self._tree.on_evict = self._offload
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
        match = self._tree.match(tokens, limit if reuse else 0, strict=strict)
        reason = match.reason if reuse else "disabled"
        host = HostMatch(match.length)
        if self.host is not None and reuse:
            host = self.host.match(tokens[: max(limit, 0)], match.length, strict=strict)
        lease = self._admit(match, host, len(tokens), tokens_total, reason, strict)
        alone = not self._leases and not self._tiers.demoting
        if lease is None and match.length and alone:
            match = self._tree.match(tokens, 0)
            lease = self._admit(match, HostMatch(0), len(tokens), tokens_total, "no_room", strict)
        return lease

    def grow(self, lease: Admission, tokens_total: int) -> bool:
        """Gets pages for the positions [0, tokens_total): all of them, or none and False.

        Evicts least recently used leaves when needed. When nothing else runs and the source is
        released, it fails only if the tokens do not fit the pool.
        """
        self._check_live(lease)
        needed = self._pages_for(tokens_total) - len(lease.page_table)
        if needed <= 0:
            return True
        pages = self._take_pages(needed)
        last_resort = len(self._leases) == 1 and lease.lock.checkpoint_node is None
        if pages is None and last_resort and self._pages_for(tokens_total) <= self._pages.total:
            # The request's own prefix is in the way, where the tree has other pages for it than
            # the request. Its references keep what it reads, so the tree may lose it.
            self._tree.unlock(lease.lock)
            lease.shared = 0
            pages = self._take_pages(needed)
        if pages is None:
            return False
        lease.page_table = _joined(lease.page_table, pages)
        if self.inputs is not None:
            self._slide_inputs(lease, pages, tokens_total)
        return True

    def inputs_kept(self, lease: Admission, start: int, end: int) -> bool:
        """Whether the group inputs of the matched tokens [start, end) can be replayed.

        Those that are in host memory only get pages to come back to.
        """
        if self.inputs is None:
            return False
        first, last = start // self.page_size, self._pages_for(end)
        held, at = self._pages.held_by("running"), lease.shared // self.page_size
        for load in lease.loads:
            index = np.arange(at, at + len(load.rows))
            there = load.chunk.with_inputs[load.rows.start : load.rows.stop]
            coming = there & (first <= index) & (index < last) & (load.input_pages == NONE)
            self.inputs.grant(load.pages[coming], held)
            load.input_pages[coming] = self.inputs.of(load.pages[coming])
            at += len(load.rows)
        return self.inputs.kept(lease.page_table[first:last])

    def take_offloads(self) -> list[Offload | StateOffload]:
        """What has been evicted since: to be copied before anything writes there."""
        taken, self._offloads = self._offloads, []
        return taken

    def offload(self) -> None:
        """Moves everything cached that no running request uses to host memory."""
        while self._tree.evict_leaf() is not None:
            pass

    def release_source(self, lease: Admission) -> None:
        """The first step is dispatched: the checkpoint read and the pages copied may go.

        The device runs in order, so whoever gets them next writes after the read.
        """
        self._check_live(lease)
        self._tree.unlock_checkpoint(lease.lock)
        self._pages.release([src for src, _ in lease.page_copies], "running")
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
            self._tree.move_lock(lease.lock, inserted.node)
        new = inserted.node.end - inserted.duplicate
        return Commit(new, inserted.duplicate, inserted.refused)

    def keep_loaded(self, lease: Admission, tokens: Tokens) -> None:
        """The state that came from host memory has been put into its slot (dispatched), and so has
        the KV of `tokens`, those that it has consumed: it is a checkpoint of the tree again."""
        if lease.state_load is not None:
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
        self._tree.unlock(lease.lock)
        self._pages.release(lease.page_table, "running")
        self._leases.remove(lease)
        lease.page_table = lease.page_table[:0]
        lease.slot, lease.state_depth = -1, None
        return commit

    def commit_demotion(self, demotion: Demotion) -> bool:
        """The pack has been done: hits read the compressed state, the native slot is free.

        False, and nothing changes, while a request that was admitted before reads the source.
        """
        return self._tree.commit_demotion(demotion)

    def abort_demotion(self, demotion: Demotion) -> None:
        """The pack has failed, or will not be done: all is as before."""
        self._tree.abort_demotion(demotion)

    @property
    def demoting(self) -> int:
        """Demotions that are neither committed nor aborted."""
        return self._tiers.demoting

    def flush(self) -> None:
        """Drops everything cached that no running request uses."""
        self._tree.flush()
        if self.host is not None:
            self.host.flush()

    def stats(self) -> CacheStats:
        tiers = self._tiers
        pools = {"kv_pages": self._pages.counts(), "native_slots": tiers.native.counts()}
        if tiers.compressed is not None:
            pools["compressed_slots"] = tiers.compressed.counts()
        evictions = {"kv_pages": self._tree.evicted_pages, **tiers.evicted}
        if self.inputs is not None:
            pools["group_inputs"] = self.inputs.counts(self._pages.held_by("tree"))
            evictions["group_inputs"] = self.inputs.taken
        if self.host is not None:
            pools["host_bytes"] = self.host.counts()
            evictions["host_bytes"] = self.host.evicted
        demotions = {"committed": tiers.committed, "aborted": tiers.aborted}
        return CacheStats(pools, evictions, demotions)

    def check_integrity(self) -> None:
        """Recounts pages, slots and locks of tree and requests. RuntimeError with the numbers."""
        self._tree.check_integrity()
        refs, locks, state_locks = count_held(self._leases, self._pages.total)
        self._pages.check_integrity("running", refs)
        if self.inputs is not None:
            self.inputs.check_integrity(self._pages.free_pages)
        if self.host is not None:
            self.host.check_integrity()
        slots = [lease.slot for lease in self._leases] + list(self.slots.reserved)
        self._tiers.native.check_integrity("running", set(slots))
        if len(slots) != len(set(slots)):
            raise RuntimeError(f"requests and reservations share slots: {sorted(slots)}")
        for node in self._tree.walk():
            held = locks[node], state_locks[node]
            if (node.locks, node.checkpoint_locks) != held:
                raise RuntimeError(f"{node} and its state should have {held} locks, by requests")

    def _admit(
        self,
        match: Match,
        host: HostMatch,
        known: int,
        tokens_total: int,
        reason: str | None,
        strict: bool,
    ) -> Admission | None:
        lock = self._tree.lock(match)  # first: making room must not take what was matched
        shared = match.length // self.page_size
        needed = self._pages_for(max(host.length, tokens_total)) - shared
        pages = slot = None
        if self.slots.waits:  # evicting pages would be too early
            self.slots.make_room()
        else:
            pages = self._take_pages(needed)
            slot = self.slots.take() if pages is not None else None
        if pages is None or slot is None:
            self._pages.release(pages or (), "running")
            self._tree.unlock(lock)
            return None
        loads, at = list[Load](), 0
        for chunk, rows in host.runs:
            to = np.asarray(pages[at : at + len(rows)], np.int32)
            loads.append(Load(chunk, rows, to, np.full_like(to, NONE)))
            at += len(rows)
        copied = match.length % self.page_size and not loads
        copies = [(int(match.pages[-1]), pages[0])] if copied else []
        self._pages.retain(match.pages[:shared], "running")
        self._pages.retain([src for src, _ in copies], "running")
        self._tree.touch(lock)
        lease = Admission(
            matched=host.length,
            restored=match.restored,
            source=match.checkpoint_node.checkpoint if match.checkpoint_node else None,
            slot=slot,
            page_table=_joined(match.pages[:shared], pages),
            page_copies=copies,
            input_copies=[],
            write_from=host.length,
            branch_depth=match.branch_depth,
            reason=reason or ("no_checkpoint" if match.restored < host.length else None),
            lock=lock,
            loads=loads,
            state_load=None,
            shared=match.length,
            known=known,
            exact=match.exact and host.exact,
            strict=strict,
        )
        self._leases.add(lease)
        if self.inputs is not None:
            self._give_inputs(lease)
        if host.state is not None and host.state[1] > match.restored:
            self._load_state(lease, *host.state)
        if loads and lease.restored < lease.matched:
            lease.branch_depth = lease.matched
        return lease

    def _load_state(self, lease: Admission, chunk: Chunk, depth: int) -> None:
        """A deeper state than the tree's, if there is a slot for it to come to."""
        for slot in self.slots.reserve(1):
            lease.state_load = StateLoad(chunk, depth, slot)
            lease.source, lease.restored = Checkpoint(slot, depth), depth
            lease.reason = "no_checkpoint" if depth < lease.matched else None

    def _give_inputs(self, lease: Admission) -> None:
        """Companions for the request's own pages: where they are wanted for the end of its prompt,
        and for the page it copies from the tree's if that has one."""
        assert self.inputs is not None
        self.inputs.use(lease.page_table)
        held = self._pages.held_by("running")
        first = lease.shared // self.page_size + sum(len(load.rows) for load in lease.loads)
        for source, page in lease.page_copies:
            first += 1
            if self.inputs.kept([source]):
                self.inputs.grant([page], held)
                if self.inputs.kept([page]):
                    old, new = self.inputs.of([source, page]).tolist()
                    lease.input_copies = [(old, new)]
        ends = (np.arange(first, len(lease.page_table)) + 1) * self.page_size
        wanted = self.inputs.policy.wanted(ends, lease.known)
        self.inputs.grant(lease.page_table[first:][wanted], held)

    def _offload(self, node: Node) -> None:
        """Enters the pages of a leaf that goes in the host store, where they are not yet; and those
        before them that make up a whole chunk, though they stay here: a prefix that goes node by
        node would leave small chunks, and they come back padded, in many small transfers."""
        assert self.host is not None
        tokens, table = self._tree.prefix(node), self._tree.page_table(node)
        most = CHUNK_ROWS[-1]
        for run in self.host.missing(
            tokens, node.start // self.page_size // most * most, node.exact
        ):
            if not self.host.fits(run):
                continue
            pages = table[run.start : run.stop]
            none = np.full(len(pages), NONE, np.int32)
            companions = none if self.inputs is None else self.inputs.of(pages)
            chunk = self.host.add(tokens, run, companions != NONE, node.exact)
            self._offloads.append(Offload(chunk, pages, companions))
        state = node.checkpoint
        if state is None or state.representation != "dense" or not state.exact:
            return
        # A state takes as much as the KV of a thousand tokens or more: those that a long prompt
        # has left on its way stay behind.
        chunk = None if state.passing else self.host.add_state(tokens)
        if chunk is not None:
            self._offloads.append(StateOffload(chunk, node.end, state.slot))

    def _slide_inputs(self, lease: Admission, pages: list[int], length: int) -> None:
        """Companions for pages of generated tokens; with a tail, the older ones of them go."""
        assert self.inputs is not None
        self.inputs.grant(pages, self._pages.held_by("running"))
        index = np.arange(self._pages_for(lease.known), len(lease.page_table) - len(pages))
        wanted = self.inputs.policy.wanted((index + 1) * self.page_size, length)
        self.inputs.drop(lease.page_table[index[~wanted]])

    def _insert(
        self, lease: Admission, tokens: Sequence[int] | Tokens, state: Checkpoint | None
    ) -> Insertion:
        """What the request has computed, for all that it has not been given."""
        inserted = self._tree.insert(
            tokens, lease.page_table, state, exact=lease.exact, strict=lease.strict
        )
        lease.exact = lease.exact and inserted.node.exact  # it goes on with the tree's pages
        return inserted

    def _share(self, lease: Admission, inserted: Insertion) -> None:
        """Replaces the request's own full pages by the tree's where both have the same tokens."""
        first, last = lease.shared // self.page_size, inserted.duplicate // self.page_size
        if first < last:
            theirs = self._tree.page_table(inserted.node)[first:last]
            self._pages.retain(theirs, "running")
            self._pages.release(lease.page_table[first:last], "running")
            lease.page_table[first:last] = theirs
        lease.shared = max(lease.shared, inserted.node.end)

    def _take_pages(self, n: int) -> list[int] | None:
        if n > self._pages.free and n > self._pages.free + self._pages.reclaimable():
            return None  # evicting everything would not do: keep it
        while self._pages.free < n:
            if self._tree.evict_leaf() is None:
                return None
        return self._pages.allocate(n)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _check_live(self, lease: Admission) -> None:
        if lease not in self._leases:
            raise RuntimeError("the admission is finished")

    def _check_covered(self, lease: Admission, tokens: Sequence[int] | Tokens) -> None:
        have, tokens_held = len(lease.page_table), len(lease.page_table) * self.page_size
        if len(tokens) > tokens_held:
            raise ValueError(f"{have} pages hold {tokens_held} tokens, not {len(tokens)}")


def _joined(pages: PageIds, more: list[int]) -> PageIds:
    return np.concatenate([pages, np.asarray(more, np.int32)])
