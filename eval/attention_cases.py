"""Cases of the suite `kernels`: attention over pages, decode and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jhybrid.sharding import REPLICATED, make_mesh, sharded
from pallas_kernels import decode_paged_attention, ragged_paged_attention
from pallas_kernels.arg_specs import ATTENTION_SHAPES, AttentionShape
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.tuning import Tuning, decode_tuning, prefill_tuning

from .device_time import Loop
from .kernel_cases import CACHE_BYTES, relative_rms
from .variant import Variant

PAGE = 16


@dataclass(frozen=True)
class AttentionCase:
    """Sequence n has `new[n]` queries, the last of `contexts[n]` tokens; no `new` is a decode step.

    Layers are the sets that a loop rotates over. `table` is the context that page tables have room
    for, as an engine's do for its longest.
    """

    shape: AttentionShape
    layout: str
    contexts: tuple[int, ...]
    new: tuple[int, ...] = ()
    table: int = 32768

    @property
    def decode(self) -> bool:
        return not self.new

    @property
    def name(self) -> str:
        kind, _, heads = self.shape.name.partition("-")
        return f"{kind}_{'decode' if self.decode else 'prefill'}/{heads}/{self.layout}"

    @property
    def key_bytes(self) -> int:
        s = self.shape
        width = s.key_dim + (0 if s.latent else s.value_dim)
        return 2 * s.kv_heads * width * sum(self.contexts)

    @property
    def operations(self) -> float:
        """Two products of every query with every key it sees."""
        s = self.shape
        new = self.new or (1,) * len(self.contexts)
        seen = sum(n * (c - n) + n * (n + 1) / 2 for n, c in zip(new, self.contexts, strict=True))
        return 2 * s.heads * (s.key_dim + s.value_dim) * seen

    def floor_seconds(self, copy_rate: float, matrix_rate: float) -> float:
        s = self.shape
        tokens = sum(self.new) or len(self.contexts)
        queries = 2 * tokens * s.heads * (s.key_dim + s.value_dim)
        return max((self.key_bytes + queries) / copy_rate, self.operations / matrix_rate)

    @property
    def layers(self) -> int:
        most = 16 if jax.default_backend() == "gpu" else 2
        return int(np.clip(np.ceil(CACHE_BYTES / self.key_bytes), 2, most))

    def pools(self) -> tuple[jax.Array, jax.Array | None]:
        count = sum(-(-context // PAGE) for context in self.contexts) + 1
        shapes = self.shape.pages(count, self.layers, PAGE)
        keys = jax.random.split(jax.random.key(7), 2)
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        k, v = (
            None if x is None else draw(key, x.shape, x.dtype)
            for key, x in zip(keys, shapes, strict=True)
        )
        assert k is not None
        return k, v

    def page_table(self) -> np.ndarray:
        """Pages in random order; the last page belongs to nobody."""
        used = [-(-context // PAGE) for context in self.contexts]
        order = np.random.default_rng(0).permutation(sum(used)).astype(np.int32)
        table = np.full((len(used), self.table // PAGE), -1, np.int32)
        for n, pages in enumerate(np.split(order, np.cumsum(used)[:-1])):
            table[n, : len(pages)] = pages
        return table

    def queries(self, seed: int) -> jax.Array:
        x = self.shape.queries(sum(self.new) or len(self.contexts))
        return jax.random.normal(jax.random.key(seed), x.shape, x.dtype)

    def op(
        self,
        q: jax.Array,
        pools: Any,
        layer: Any,
        implementation: Any,
        interpret: bool,
        tuned: Tuning | None = None,
    ) -> jax.Array:
        """Attention of one layer; a tuning goes to the kernel itself."""
        s = self.shape
        contexts = np.array(self.contexts, np.int32)
        table = jnp.asarray(self.page_table())
        options: dict[str, Any] = {"scale": s.key_dim**-0.5, "interpret": interpret}
        options |= {"value_dim": s.value_dim}
        if tuned is None:
            options |= {"implementation": implementation}
        else:
            options |= {"tuned": tuned}
        run: Any
        if self.decode:
            run = decode_paged_attention if tuned is None else api.decode
            return run(q, *pools, layer, jnp.asarray(contexts - 1), table, **options)
        spans = zip(self.new, self.contexts, strict=True)
        positions = np.concatenate([np.arange(c - n, c, dtype=np.int32) for n, c in spans])
        cu = np.cumsum((0, *self.new), dtype=np.int32)
        run = ragged_paged_attention if tuned is None else api.prefill
        args = (jnp.asarray(positions), jnp.asarray(cu), table)
        if tuned is None:
            options["whole_prompt"] = self.new == self.contexts and len(self.new) == 1
        return run(q, *pools, layer, *args, **options)

    def check(self, interpret: bool) -> float:
        """Relative RMS against float32 arithmetic in XLA: of the kernel, and of what is chosen by
        default, called as an engine calls it."""
        q, pools = self.queries(0), self.pools()
        run = jax.jit(self.op, static_argnums=(3, 4))
        expected = run(q.astype(jnp.float32), pools, 1, "xla", False)

        def default(q: jax.Array, pools: Any) -> jax.Array:
            return self.op(q, pools, 1, None, interpret)

        mesh = make_mesh(1)
        chosen = jax.jit(sharded(default, mesh, (REPLICATED, REPLICATED), REPLICATED))
        found = run(q, pools, 1, "pallas", interpret), chosen(q, pools)
        return max(relative_rms(o, expected) for o in found)

    def loop(
        self, arm: str, expected: float, interpret: bool, tuned: Tuning | None = None
    ) -> Loop | None:
        """None where the arm does not serve the case."""
        if arm == "cudnn":
            return self._cudnn(expected)
        if arm not in ("pallas", "xla", "auto") or (arm == "auto" and self.decode):
            return None
        implementation = None if arm == "auto" else arm
        sets = [(jnp.int32(layer), self.queries(layer)) for layer in range(self.layers)]

        def step(pools: Any, inputs: Any) -> Any:
            layer, q = inputs
            return self.op(q, pools, layer, implementation, interpret, tuned), pools

        return Loop(step, sets, self.pools(), expected)

    def _cudnn(self, expected: float) -> Loop | None:
        """A dense causal prefill of one sequence, without pages: what the library reaches."""
        s = self.shape
        if s.latent or self.decode or self.contexts != self.new or len(self.new) != 1:
            return None
        if jax.default_backend() != "gpu":
            return None
        keys = jax.random.split(jax.random.key(3), 2)
        shape = (1, self.new[0], s.kv_heads)
        k, v = (
            jax.random.normal(key, (*shape, dim), jnp.bfloat16)
            for key, dim in zip(keys, (s.key_dim, s.value_dim), strict=True)
        )

        def step(kv: Any, q: Any) -> Any:
            k, v = kv
            o = jax.nn.dot_product_attention(
                q, k, v, scale=s.key_dim**-0.5, is_causal=True, implementation="cudnn"
            )
            return o, kv

        sets = [self.queries(seed)[None] for seed in range(2)]
        return Loop(step, sets, (k, v), expected)

    def variants(self, interpret: bool) -> list[Variant]:
        """Tunings worth timing."""
        s = self.shape
        if self.decode:
            default = decode_tuning(s.heads // s.kv_heads, s.key_dim, jnp.bfloat16)
            tunings = list(_decode_tunings(default))
        else:
            group, tokens = s.heads // s.kv_heads, sum(self.new)
            default = prefill_tuning(tokens, group, s.key_dim, jnp.bfloat16)
            tunings = list(_prefill_tunings(default))
        expected = 3 * self.floor_seconds(4e12, 7e14)

        def make(tuned: Tuning) -> Callable[[], Loop | None]:
            return lambda: self.loop("pallas", expected, interpret, tuned)

        return [Variant("attend", t, default, make(t)) for t in tunings[: 2 if interpret else None]]


def _decode_tunings(default: Tuning) -> Iterator[Tuning]:
    yield default
    for block, warps, stages in (
        (32, 4, 3),
        (32, 8, 3),
        (32, 8, 4),
        (64, 8, 2),
        (64, 8, 3),
        (16, 4, 4),
    ):
        yield replace(default, block=block, warps=warps, stages=stages)
    for rounds, piece in ((2, 256), (2, 1024), (4, 512), (1, 512)):
        yield replace(default, rounds=rounds, piece=piece)


def _prefill_tunings(default: Tuning) -> Iterator[Tuning]:
    yield default
    for rows, block, warps, stages in (
        (128, 64, 8, 2),
        (128, 32, 8, 3),
        (64, 32, 8, 2),
        (64, 32, 8, 3),
        (32, 32, 8, 3),
        (32, 64, 8, 2),
    ):
        for slack in (0.0, 8.0) if rows == 128 else (0.0,):
            change: dict[str, Any] = {"rows": rows, "block": block, "slack": slack}
            yield replace(default, warps=warps, stages=stages, **change)


def attention_cases() -> list[AttentionCase]:
    gqa, wide, olmo, mla, _ = ATTENTION_SHAPES.values()
    mixed = (30000, *(200 + 60 * n for n in range(31)))
    return [
        AttentionCase(gqa, "1x1024", (1024,)),
        AttentionCase(gqa, "1x30000", (30000,)),
        AttentionCase(gqa, "32x8192", (8192,) * 32),
        AttentionCase(gqa, "128x1100", (1100,) * 128),
        AttentionCase(gqa, "32xmixed", mixed),
        AttentionCase(wide, "32x8192", (8192,) * 32),
        AttentionCase(olmo, "8x8192", (8192,) * 8),
        AttentionCase(mla, "32x8192", (8192,) * 32),
        AttentionCase(gqa, "1x2048", (2048,), (2048,)),
        AttentionCase(gqa, "1x8192", (8192,), (8192,)),
        AttentionCase(gqa, "1x32768", (32768,), (32768,)),
        AttentionCase(gqa, "8x1024", (1024,) * 8, (1024,) * 8),
        *(
            AttentionCase(shape, f"32 behind {context}", (context + 32, 0), (32, 0))
            for shape in (gqa, wide)
            for context in (31816, 16384, 8192)
        ),
        AttentionCase(gqa, "64 behind 30000", (30064,), (64,)),
        AttentionCase(gqa, "2048 behind 28000", (30048,), (2048,)),
        AttentionCase(olmo, "1x8192", (8192,), (8192,)),
        AttentionCase(mla, "1x8192", (8192,), (8192,)),
    ]


def tiny_attention_cases() -> list[AttentionCase]:
    """For a dry run in interpret mode."""
    gqa = AttentionShape("gqa-4x2x32", 4, 2, 32, 32)
    mla = AttentionShape("mla-4x48x32", 4, 1, 48, 32, latent=True)
    return [
        AttentionCase(shape, layout, contexts, new, 160)
        for shape in (gqa, mla)
        for layout, contexts, new in (
            ("2x150", (150, 20), ()),
            ("30 behind 100", (130, 20), (30, 20)),
        )
    ]
