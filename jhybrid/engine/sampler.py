"""Sampling on the device: penalties, truncation, seeded draws, log-probabilities.

Every running request owns a row. A draw depends on the request's seed and on how many tokens it
has generated, on nothing else in the batch. Three compiled modes share one function: GREEDY takes
the best token, RANDOM draws, FULL adds penalties, bias, banned tokens and log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Float, Int32, UInt32

from pallas_kernels.ragged import or_outside

from .request import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_BANNED = 32  # tokens that may not end a request before its min_tokens


class SampleMode(IntEnum):
    GREEDY = 0
    RANDOM = 1
    FULL = 2


@struct.dataclass
class RowParams:
    """What a request says about its draws, and where it is; one entry a row (R rows)."""

    last_token: Int32[Array, " R"]
    generated: Int32[Array, " R"]  # tokens drawn so far: the index of the next draw
    seed: UInt32[Array, "R 2"]
    temperature: Float[Array, " R"]
    top_k: Int32[Array, " R"]  # 0: off
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    presence: Float[Array, " R"]
    frequency: Float[Array, " R"]
    repetition: Float[Array, " R"]
    bias_token: Int32[Array, "R Bias"]  # -1: unused
    bias_value: Float[Array, "R Bias"]
    banned: Int32[Array, "R Ban"]  # -1: unused
    min_tokens: Int32[Array, " R"]


@struct.dataclass
class SamplerRows:
    """Sampling state of all rows; V vocabulary. `in_prompt` and `counts` serve penalties only."""

    params: RowParams
    in_prompt: Bool[Array, "R V"]
    counts: Int32[Array, "R V"]  # of each token among those generated


@struct.dataclass
class Sampled:
    """One step's draws; the log-probability fields are None outside FULL."""

    tokens: Int32[Array, " N"]
    logprob: Float[Array, " N"] | None
    top_tokens: Int32[Array, "N Top"] | None
    top_logprobs: Float[Array, "N Top"] | None


def init_rows(rows: int, vocab: int) -> SamplerRows:
    def zeros(*shape: int, dtype: jnp.dtype | type = jnp.float32) -> Array:
        return jnp.zeros((rows, *shape), dtype)

    params = RowParams(
        last_token=zeros(dtype=jnp.int32),
        generated=zeros(dtype=jnp.int32),
        seed=zeros(2, dtype=jnp.uint32),
        temperature=zeros(),
        top_k=zeros(dtype=jnp.int32),
        top_p=zeros() + 1,
        min_p=zeros(),
        presence=zeros(),
        frequency=zeros(),
        repetition=zeros() + 1,
        bias_token=zeros(MAX_LOGIT_BIAS, dtype=jnp.int32) - 1,
        bias_value=zeros(MAX_LOGIT_BIAS),
        banned=zeros(MAX_BANNED, dtype=jnp.int32) - 1,
        min_tokens=zeros(dtype=jnp.int32),
    )
    return SamplerRows(params, zeros(vocab, dtype=jnp.bool_), zeros(vocab, dtype=jnp.int32))


def sample(
    state: SamplerRows,
    logits: Float[Array, "N V"],
    rows: Int32[Array, " N"],
    mode: SampleMode,
    valid_vocab: int,
) -> tuple[SamplerRows, Sampled]:
    """Draw one token for each row (-1: padding) and advance those rows.

    Tokens from `valid_vocab` on are padding of the embedding and are never drawn.
    """
    row = jnp.maximum(rows, 0)
    here = jax.tree.map(lambda x: x[row], state.params)
    logits = jnp.where(jnp.arange(logits.shape[1]) < valid_vocab, logits, -jnp.inf)
    if mode is SampleMode.FULL:
        logits = _adjust(logits, here, state.in_prompt[row], state.counts[row])
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode is not SampleMode.GREEDY:
        drawn = jax.vmap(_draw)(logits, here)
        tokens = jnp.where(here.temperature > 0, drawn, tokens)

    params = state.params
    target = or_outside(rows, params.last_token.shape[0])
    params = replace(
        params,
        last_token=params.last_token.at[target].set(tokens, mode="drop"),
        generated=params.generated.at[target].add(1, mode="drop"),
    )
    state = replace(state, params=params)
    if mode is not SampleMode.FULL:
        return state, Sampled(tokens, None, None, None)
    state = replace(state, counts=state.counts.at[target, tokens].add(1, mode="drop"))
    logprobs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    best, index = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    return state, Sampled(tokens, own, index, best)


def _adjust(
    logits: Float[Array, "N V"],
    here: RowParams,
    in_prompt: Bool[Array, "N V"],
    counts: Int32[Array, "N V"],
) -> Float[Array, "N V"]:
    """Bias, then penalties on seen tokens, then tokens banned until min_tokens."""
    size = logits.shape[1]
    line = jnp.arange(logits.shape[0])[:, None]
    at = jnp.where(here.bias_token >= 0, here.bias_token, size)
    logits = logits.at[line, at].add(here.bias_value, mode="drop")
    seen = in_prompt | (counts > 0)
    repetition = here.repetition[:, None]
    punished = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, punished, logits)
    logits -= here.frequency[:, None] * counts.astype(jnp.float32)
    logits -= here.presence[:, None] * (counts > 0).astype(jnp.float32)
    early = (here.generated < here.min_tokens)[:, None]
    at = jnp.where((here.banned >= 0) & early, here.banned, size)
    return logits.at[line, at].set(-jnp.inf, mode="drop")


def _draw(logits: Float[Array, " V"], here: RowParams) -> Int32[Array, ""]:
    """One draw from the truncated distribution, by the Gumbel trick."""
    scaled = logits / jnp.maximum(here.temperature, 1e-6)
    ordered = jnp.sort(scaled, descending=True)
    size = ordered.shape[0]
    keep = jnp.where(here.top_k > 0, jnp.minimum(here.top_k, size), size)
    ordered = jnp.where(jnp.arange(size) < keep, ordered, -jnp.inf)
    probs = jax.nn.softmax(ordered)
    # the smallest set whose mass reaches top_p: a token stays if the mass before it is short of it
    # (the first one does for every top_p, also one that is 0 in float32)
    before = jnp.cumsum(probs) - probs
    stays = (before < here.top_p) & (probs >= here.min_p * probs[0]) & (ordered > -jnp.inf)
    stays = stays.at[0].set(True)
    threshold = jnp.min(jnp.where(stays, ordered, jnp.inf))
    key = jax.random.fold_in(jax.random.wrap_key_data(here.seed), here.generated)
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return jnp.argmax(jnp.where(scaled >= threshold, scaled + noise, -jnp.inf)).astype(jnp.int32)


def set_row(state: SamplerRows, row: Int32[Array, ""], values: RowParams) -> SamplerRows:
    """The state with `values` (no leading axis) in a row; what the row has seen is left alone."""
    params = jax.tree.map(lambda rows, value: rows.at[row].set(value), state.params, values)
    return replace(state, params=params)


def set_seen(
    state: SamplerRows,
    row: Int32[Array, ""],
    in_prompt: Bool[Array, " V"],
    counts: Int32[Array, " V"],
) -> SamplerRows:
    """Which tokens a row has seen; needed only by requests with penalties."""
    return replace(
        state,
        in_prompt=state.in_prompt.at[row].set(in_prompt),
        counts=state.counts.at[row].set(counts),
    )


def token_logprobs(
    logits: Float[Array, "T V"], targets: Int32[Array, " T"], valid_vocab: int
) -> tuple[Float[Array, " T"], Int32[Array, "T Top"], Float[Array, "T Top"]]:
    """Log-probability of each target and the best alternatives at its position."""
    logits = jnp.where(jnp.arange(logits.shape[1]) < valid_vocab, logits, -jnp.inf)
    logprobs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
    best, index = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    return own, index, best
