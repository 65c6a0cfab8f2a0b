"""A tiny hybrid with random weights behind a whole engine, and a naive oracle beside it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jhybrid.batch import DenseBatch
from jhybrid.cache.cache_manager import CacheManager
from jhybrid.config import AttentionConfig, LayerConfig, LinearAttentionConfig, ModelConfig
from jhybrid.demo.tokenizer import build_tokenizer
from jhybrid.engine.buckets import make_buckets
from jhybrid.engine.compression import apply_plan, compress
from jhybrid.engine.config import EngineConfig
from jhybrid.engine.engine import Engine
from jhybrid.engine.memory import host_store, input_dtype, input_policy
from jhybrid.engine.model_runner import ModelRunner
from jhybrid.engine.request import Request, RequestUpdate, SamplingParams
from jhybrid.models.hybrid import forward, logits
from jhybrid.models.specs import ModelParams, model_partition, model_specs
from jhybrid.params import init_params, is_spec, shardings
from jhybrid.retention.selection import RetentionPlan
from jhybrid.sharding import REPLICATED, make_mesh, sharded

VOCAB = 272
VALID = 263  # what the byte-level tokenizer knows
EOS = 256
CONTEXT = 512
PAGES, SLOTS = 400, 64  # of every pool, at least

TINY = ModelConfig(
    family="test",
    vocab_size=VOCAB,
    hidden_size=32,
    layers=tuple(LayerConfig(kind) for kind in ("linear", "full", "linear", "full")),
    linear=LinearAttentionConfig("gdn", key_heads=4, value_heads=8, key_dim=8, value_dim=16),
    full=AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, rotary_dim=4, output_gate=True, qk_norm="head"
    ),
    mlp_width=48,
    tie_embeddings=True,
    max_context=CONTEXT,
)


def tiny_params(config: ModelConfig = TINY, tp: int = 1, seed: int = 0) -> ModelParams:
    """Random weights, scaled so that greedy text depends on all of the context.

    KV heads of a larger mesh are copies, so that every `tp` is the same model.
    """
    one = make_mesh(1)
    params = init_params(model_specs(config), jax.random.key(seed), jnp.float32, one)
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, params)
    wanted = model_specs(config.for_tensor_parallel(tp))

    def repeat(spec: Any, x: Array) -> np.ndarray:
        copies = spec.shape[0] // x.shape[0]
        return np.repeat(np.asarray(x), copies, axis=0)

    return jax.tree.map(repeat, wanted, params, is_leaf=is_spec)


class Tokenizer:
    """The part of a transformers tokenizer that the engine uses."""

    def __init__(self) -> None:
        self.backend_tokenizer = build_tokenizer()
        self.eos_token_id = EOS
        self.all_special_ids = [EOS, EOS + 1, EOS + 2]
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def __len__(self) -> int:
        return VALID


def tiny_engine(
    model: ModelConfig = TINY,
    *,
    tp: int = 1,
    pages: int = PAGES,
    slots: int = SLOTS,
    eos: frozenset[int] = frozenset(),
    **flags: Any,
) -> Engine:
    """A tiny model behind an engine with small buckets; nothing is compiled ahead."""
    specs, dtype = model_specs(model.for_tensor_parallel(tp)), flags.get("dtype") or "float32"
    params = tiny_params(model, tp=tp)
    params = jax.tree.map(
        lambda s, x: jnp.asarray(x, s.dtype_in(dtype)), specs, params, is_leaf=is_spec
    )
    params = jax.device_put(params, shardings(specs, make_mesh(tp)))
    return engine_of(params, model, tp=tp, pages=pages, slots=slots, eos=eos, **flags)


def engine_of(
    params: ModelParams,
    model: ModelConfig,
    *,
    tp: int = 1,
    pages: int = PAGES,
    slots: int = SLOTS,
    compressed_slots: int = SLOTS,
    watermark: int = 0,
    input_pages: int | None = None,
    plan: RetentionPlan | None = None,
    eos: frozenset[int] = frozenset(),
    valid_vocab: int = VALID,
    own_programs: bool = False,
    transfers: int = 2**30,
    **flags: Any,
) -> Engine:
    """Any model's parameters (as `tp` ranks hold them) behind such an engine.

    `plan` stands in for the one that `w_max` selects. With `own_programs` the engine finds nothing
    that others have compiled, and its pools are no larger than asked for.
    """
    settings = {
        "max_running": 4,
        "max_prefill_tokens": 64,
        "max_context": CONTEXT,
        "page_size": 8,
        "checkpoint_interval": 32,
        **flags,
    }
    config = EngineConfig(tp=tp, **settings)
    buckets = make_buckets(
        config.max_prefill_tokens,
        config.max_running,
        config.checkpoint_interval,
        CONTEXT // config.page_size,
    )
    model, dtype = model.for_tensor_parallel(tp), jnp.dtype(config.dtype or "float32")
    if plan is None:
        params, compression = compress(params, model, config, dtype)
    else:
        params, compression = apply_plan(plan, params, model, config, dtype)
    # Pools of one size, of which the cache may hand out less: the programs are the same.
    runner = ModelRunner(
        params,
        model,
        make_mesh(tp),
        buckets,
        pages=max(pages, PAGES),
        page_size=config.page_size,
        slots=slots if own_programs else max(slots, SLOTS),
        max_running=config.max_running,
        valid_vocab=valid_vocab,
        dtype=dtype,
        compression=compression,
        compressed_slots=compressed_slots if own_programs else max(compressed_slots, SLOTS),
        input_pages=max(input_pages or pages, PAGES) if config.group_inputs else 0,
        input_dtype=input_dtype(config),
        host=config.host_memory is not None,
    )
    if not own_programs:
        compile_one, known = runner.programs.compile, _compiled(model, tp, valid_vocab)

        def compile_once(name: str, args: Any) -> Any:
            key = name, *_shapes(args)
            if key not in known:
                known[key] = compile_one(name, args)
            return known[key]

        runner.programs.compile = compile_once
    cache = CacheManager(
        pages,
        config.page_size,
        slots,
        config.checkpoint_interval,
        compressed_slots=compressed_slots if compression else 0,
        lossless=compression is not None and compression.lossless,
        watermark=watermark,
        inputs=input_policy(config, input_pages or pages),
        host=host_store(model, config, dtype),
    )
    return Engine(
        runner,
        cache,
        Tokenizer(),
        config,
        max_context=CONTEXT,
        eos=eos,
        model_name="tiny",
        transfers=transfers,
        facts={},
    )


def _shapes(args: Any) -> tuple[Any, ...]:
    """Of the arguments of a program, and how they are packed."""
    leaves, tree = jax.tree.flatten(args)
    return tree, *((x.shape, x.dtype) for x in leaves)


@functools.cache
def _compiled(*key: Any) -> dict[Any, Any]:
    """One for all engines whose functions compute the same, as arrays are arguments of them."""
    return {}


@functools.cache
def _dense_logits() -> Any:
    mesh = make_mesh(1)

    def run(params: ModelParams, ids: Array) -> Array:
        hidden, _ = forward(params, None, DenseBatch(ids), TINY)
        return logits(params, hidden, TINY)

    fn = jax.jit(sharded(run, mesh, (model_partition(TINY), REPLICATED), REPLICATED))
    params = jax.tree.map(jnp.asarray, tiny_params())
    return lambda ids: np.asarray(fn(params, ids))


def oracle_logits(tokens: list[int]) -> np.ndarray:
    """[len(tokens), VALID] float32 logits of one uncached pass, padded to few lengths."""
    ids = np.zeros((1, max(128, 1 << (len(tokens) - 1).bit_length())), np.int32)
    ids[0, : len(tokens)] = tokens
    return _dense_logits()(ids)[0, : len(tokens), :VALID]


def assert_greedy(prompt: list[int], output: tuple[int, ...] | list[int]) -> None:
    """Every token of `output` is the oracle's best after what stands before it."""
    tokens = [*prompt, *output]
    rows = oracle_logits(tokens)[len(prompt) - 1 : -1]
    best = rows.argmax(axis=1)
    wrong = [i for i, token in enumerate(output) if token != best[i]]
    assert not wrong, f"prompt of {len(prompt)}: tokens {wrong} differ from the uncached model"


@dataclass
class Result:
    token_ids: list[int]
    updates: list[RequestUpdate]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates)

    @property
    def last(self) -> RequestUpdate:
        return self.updates[-1]

    @property
    def usage(self) -> Any:
        return self.updates[0].prefix_cache


def request(name: str, prompt: list[int], **params: Any) -> Request:
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
    cache = settings.pop("prefix_cache", None)
    extra = {} if cache is None else {"prefix_cache": cache}
    return Request(name, tuple(prompt), SamplingParams(**settings), **extra)


def run(engine: Engine, requests: list[Request], *, check: bool = True) -> dict[str, Result]:
    """Step until all are done, with the pools recounted after every step."""
    results = {r.request_id: Result([], []) for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work():
        for update in engine.step():
            results[update.request_id].updates.append(update)
            results[update.request_id].token_ids += update.token_ids
        if check:
            engine.cache.check_integrity()
    return results


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing waits, and every page and slot is free or the tree's."""
    m = engine.metrics()
    assert (m.running, m.waiting) == (0, 0)
    for pool in ("kv_pages", "native_slots", "compressed_slots"):
        assert m.pools[pool]["running"] == 0, m.pools
    engine.cache.check_integrity()


__all__ = ["assert_greedy", "assert_idle", "oracle_logits", "request", "run", "tiny_engine"]


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 256, length)]
