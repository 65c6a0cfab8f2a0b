"""Plans on disk: the same plan back, and never beside other weights."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhybrid.config import ModelConfig
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.writer import write_checkpoint
from jhybrid.hf_config import model_config
from jhybrid.models.specs import model_specs
from jhybrid.params import init_params
from jhybrid.retention.horizon import decay_names, is_decay, static_horizons
from jhybrid.retention.plan_file import load_plan, plan_path, save_plan, stored_or_selected
from jhybrid.retention.selection import random_plan, select
from jhybrid.sharding import make_mesh
from jhybrid.weights import load_params, load_some, named, read_manifest
from tests.synthetic import TINY, write_hf


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model as a Hugging Face folder and converted."""
    src = write_hf(tmp_path_factory.mktemp("plans") / "hf", TINY)
    write_checkpoint(open_checkpoint(src), src.parent / "converted")
    return src, src.parent / "converted"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return model_config(TINY)


def test_decay_parameters_alone_give_the_same_horizons(
    folders: tuple[Path, Path], config: ModelConfig
) -> None:
    whole = static_horizons(load_params(folders[1], config, make_mesh(1)), config)
    for folder in folders:
        some = load_some(folder, config, decay_names(config))
        assert set(some) == set(decay_names(config))
        found = static_horizons(some, config)
        assert found.digest == whole.digest
        np.testing.assert_array_equal(found.values, whole.values)


def test_random_decay_parameters_need_no_others() -> None:
    specs, mesh, key = model_specs(model_config(TINY)), make_mesh(1), jax.random.key(3)
    whole = init_params(specs, key, jnp.bfloat16, mesh)
    some = init_params(specs, key, jnp.bfloat16, mesh, wanted=is_decay)
    assert set(named(some)) == set(decay_names(model_config(TINY)))
    for name, value in named(some).items():
        np.testing.assert_array_equal(value, named(whole)[name])


def test_a_plan_comes_back(folders: tuple[Path, Path], config: ModelConfig) -> None:
    folder = folders[1]
    some = load_some(folder, config, decay_names(config))
    horizons = static_horizons(some, config, gate_input=-0.1, epsilon=1e-2)
    for plan in (select(horizons, 16), random_plan(horizons, 16, 1234)):
        save_plan(plan, plan_path(folder, 16))
        found = load_plan(plan_path(folder, 16), some, config)
        np.testing.assert_array_equal(found.keep, plan.keep)
        np.testing.assert_array_equal(found.horizons.values, horizons.values)
        assert (found.w_max, found.rule) == (16, plan.rule)
        assert (found.horizons.gate_input, found.horizons.epsilon) == (-0.1, 1e-2)
    read_manifest(folder)  # a plan beside the weights does not spoil them
    assert stored_or_selected(folder, some, config, 16).rule == "random-1234"
    with pytest.raises(ValueError, match="a_s: expected -0.1, that of"):
        stored_or_selected(folder, some, config, 16, gate_input=-0.3)
    assert stored_or_selected(folder, some, config, 64).rule == "horizon"
    assert stored_or_selected(None, some, config, 16, gate_input=0.2).horizons.gate_input == 0.2


def test_other_weights_are_refused(
    folders: tuple[Path, Path], config: ModelConfig, tmp_path: Path
) -> None:
    some = load_some(folders[0], config, decay_names(config))
    path = plan_path(tmp_path, 32)
    save_plan(select(static_horizons(some, config), 32), path)
    name = decay_names(config)[-1]
    changed = {**some, name: some[name] + np.float32(1e-3)}
    with pytest.raises(ValueError, match=r"retention-32\.npz: made from other weights: expected"):
        load_plan(path, changed, config)


def test_bad_files_are_named(
    folders: tuple[Path, Path], config: ModelConfig, tmp_path: Path
) -> None:
    some = load_some(folders[0], config, decay_names(config))
    path = plan_path(tmp_path, 16)
    plan = select(static_horizons(some, config), 16)
    with pytest.raises(ValueError, match=r"retention-16\.npz: not a retention plan"):
        load_plan(path, some, config)
    path.write_bytes(b"PK not an archive")
    with pytest.raises(ValueError, match=r"retention-16\.npz: not a retention plan"):
        load_plan(path, some, config)
    np.savez_compressed(path, keep=plan.keep)
    with pytest.raises(ValueError, match="not a retention plan"):
        load_plan(path, some, config)
    save_plan(plan, path)
    with np.load(path) as file:
        about = file["about"]
    np.savez_compressed(path, keep=plan.keep[1:], about=about)
    with pytest.raises(ValueError, match=r"expected a mask of \(3, 8, 1\), found bool \(2, 8, 1\)"):
        load_plan(path, some, config)
    text = str(about).replace('"format_version": 1', '"format_version": 2')
    np.savez_compressed(path, keep=plan.keep, about=np.array(text))
    with pytest.raises(ValueError, match="expected format_version 1, found 2"):
        load_plan(path, some, config)
