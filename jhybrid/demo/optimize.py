"""One training step: weighted cross entropy, AdamW with slow gates, measurements kept on device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..batch import DenseBatch
from ..config import ModelConfig
from ..models.specs import ModelParams, model_specs
from ..params import is_spec, map_specs
from .batches import TASK_NAMES
from .model import logits_fn
from .presets import Preset

GATES = ("A_log", "dt_bias")
COUNTED = 0.5  # positions of at least this weight are measured: prose and answers
CLIP = 1.0  # largest norm of a gradient
MEASURES = 3  # sum of cross entropy, right first guesses, positions


@struct.dataclass
class TrainState:
    """Everything a step changes; donated. The sums run since the last log line."""

    params: ModelParams
    optimizer: Any
    by_task: Array  # float32 [tasks, MEASURES]
    grad_norm: Array  # float32, summed
    skipped: Array  # int32: steps without an update because the gradient was not finite


@struct.dataclass
class DeviceBatch:
    """A batch where the step reads it; see `batches.Batch`."""

    ids: Any  # uint16 [B, T + 1]
    weights: Any  # float32 [B, T]
    task: Any  # int32 [B]
    state_cut: Any  # int32 [B]
    key_cut: Any  # int32 [B]


Step = Callable[..., tuple[TrainState, Array]]


def make_optimizer(config: ModelConfig, preset: Preset) -> optax.GradientTransformation:
    """AdamW without its learning rate, which follows the clock."""
    matrices = map_specs(lambda spec: spec.dtype is None, model_specs(config))
    return optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(preset.weight_decay, mask=matrices),
    )


def _rates(config: ModelConfig, preset: Preset) -> ModelParams:
    """Each parameter's share of the learning rate."""

    def share(path: tuple[Any, ...], _: Any) -> float:
        return preset.gate_lr if getattr(path[-1], "name", "") in GATES else 1.0

    return jax.tree_util.tree_map_with_path(share, model_specs(config), is_leaf=is_spec)


def initial_state(params: ModelParams, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(
        params=params,
        optimizer=optimizer.init(params),  # pyright: ignore[reportArgumentType]
        by_task=jnp.zeros((len(TASK_NAMES), MEASURES), jnp.float32),
        grad_norm=jnp.float32(0),
        skipped=jnp.int32(0),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def make_step(
    config: ModelConfig,
    preset: Preset,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    dtype: Any,
) -> Step:
    """(state, batch, learning rate) -> state, loss; the batch as `device_batch` gives it."""
    run = logits_fn(config, mesh, dtype)
    rates = _rates(config, preset)

    def loss_fn(params: ModelParams, batch: DeviceBatch) -> tuple:
        ids, weights = batch.ids.astype(jnp.int32), batch.weights
        rows = DenseBatch(ids[:, :-1], batch.state_cut, batch.key_cut)
        scores, targets = run(params, rows), ids[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
        loss = jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)
        counted = (weights >= COUNTED).astype(jnp.float32)
        right = jnp.where(jnp.argmax(scores, axis=-1) == targets, counted, 0)
        sums = jnp.stack([(losses * counted).sum(1), right.sum(1), counted.sum(1)], axis=1)
        of_task = jax.nn.one_hot(batch.task, len(TASK_NAMES), axis=0)  # [tasks, B]
        return loss, jnp.matmul(of_task, sums, precision=jax.lax.Precision.HIGHEST)

    def step(state: TrainState, batch: DeviceBatch, rate: Array) -> tuple[TrainState, Array]:
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, by_task), grads = gradient(state.params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        fine = jnp.isfinite(norm)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / (norm + 1e-9)), grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to its integer count
            updates, moments = optimizer.update(grads, state.optimizer, state.params)  # pyright: ignore[reportArgumentType]
        new = jax.tree.map(lambda p, u, s: p - rate * s * u, state.params, updates, rates)
        # a step that blew up leaves everything as it was
        params, moments = jax.tree.map(
            lambda after, before: jnp.where(fine, after, before),
            (new, moments),
            (state.params, state.optimizer),
        )
        state = TrainState(
            params=params,
            optimizer=moments,
            by_task=state.by_task + jnp.where(fine, by_task, 0),
            grad_norm=state.grad_norm + jnp.where(fine, norm, 0),
            skipped=state.skipped + (1 - fine.astype(jnp.int32)),
        )
        return state, loss

    return step


def lower_step(step: Step, state: TrainState, mesh: Mesh, rows: int, length: int) -> Any:
    """`step` lowered for one shape ahead of its use, to be compiled beside training."""
    where = replicated(mesh)

    def like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    shapes = jax.tree.map(lambda x: like(x.shape, x.dtype), state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=where)
    return jitted.lower(
        shapes,
        DeviceBatch(
            ids=like((rows, length + 1), jnp.uint16),
            weights=like((rows, length), jnp.float32),
            task=like((rows,), jnp.int32),
            state_cut=like((rows,), jnp.int32),
            key_cut=like((rows,), jnp.int32),
        ),
        like((), jnp.float32),
    )
