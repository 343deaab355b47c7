"""What programs that are written on eformer, such as EasyDeL, need beyond its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import eformer as ef
from shardwright.interop.eformer.escale.partition import constraints
from tests.raising import raises


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return ef.create_mesh((2, 4), ("dp", "tp"))


class TestDefaultPolicy:
    @pytest.fixture
    def variable(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
        def state(value: str) -> None:
            monkeypatch.setenv("SHARDWRIGHT_EFORMER_POLICY", value)
            constraints.default_policy.cache_clear()

        yield state
        constraints.default_policy.cache_clear()

    def test_is_that_of_the_variable(
        self, variable: Callable[[str], None], mesh: jax.sharding.Mesh
    ) -> None:
        """A program builds its managers and cannot be told another policy."""
        variable(" EFORMER ")
        pm = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh)
        assert pm == ef.PartitionManager(ef.PartitionAxis(), mesh=mesh, policy="eformer")
        found = pm.explain([ef.DP, ef.HEAD], shape=(4, 6))
        assert found.spec == P("dp")
        assert "policy 'eformer' by SHARDWRIGHT_EFORMER_POLICY" in str(found)
        stated = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh, policy="strict")
        with pytest.raises(sw.IndivisibleError):
            stated.shard(ones(4, 6), [ef.DP, ef.HEAD])
        assert "SHARDWRIGHT_EFORMER_POLICY" not in str(stated.explain([ef.DP], shape=(4,)))
        with jax.set_mesh(mesh):
            assert ef.with_sharding_constraint(ones(3), P("dp")).sharding.spec == P()
            with stated, pytest.raises(sw.IndivisibleError):
                ef.with_sharding_constraint(ones(3), P("dp"))

    def test_is_read_once(
        self, variable: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variable("eformer")
        before = ef.PartitionManager(ef.PartitionAxis())
        monkeypatch.setenv("SHARDWRIGHT_EFORMER_POLICY", "strict")
        assert ef.PartitionManager(ef.PartitionAxis()) == before
        variable("eforme")
        with raises(sw.StrategyError, "SHARDWRIGHT_EFORMER_POLICY", "eforme"):
            ef.PartitionManager(ef.PartitionAxis())

    def test_without_a_mesh(self) -> None:
        """eformer returns the arrays; it refuses `shard` without a mesh, as here."""
        arrays = {"a": ones(4, 4), "b": jnp.ones(3)}
        for spec in (P(), P("dp", None, "tp")):
            same = ef.with_sharding_constraint(arrays, spec, policy="eformer")
            assert same["a"] is arrays["a"]
            assert same["b"] is arrays["b"]
            with raises(AssertionError, "mesh", fix="jax.set_mesh"):
                ef.with_sharding_constraint(arrays, spec)
        with raises(AssertionError, "mesh", fix="jax.set_mesh"):
            ef.PartitionManager(ef.PartitionAxis(), policy="eformer").shard(ones(4), [ef.DP])


class TestAliases:
    def test_one_mesh_axis_for_several(self) -> None:
        """EasyDeL folds data parallelism into expert parallelism."""
        alias = {"data_parallel_axis": "ep", "fully_sharded_data_parallel_axis": "ep"}
        for axis in (
            ef.PartitionAxis(**alias),
            ef.PartitionAxis(**alias, batch_axis=(ef.FSDP, ef.DP)),
        ):
            assert axis.resolve_axis([ef.BATCH, ef.DP, ef.FSDP], ef.MODE_TRAIN) == ["ep"] * 3
            assert axis.resolve_axis([ef.BATCH], ef.MODE_DECODE) == ["ep"]
        stored = sw.PartitionAxis(fully_sharded_data_parallel_axis="sp").compile()
        assert sw.resolve((sw.EMBED,), stored, {"sp": 2}, role="param").spec == P("sp")
        for cls in (ef.PartitionAxis, sw.PartitionAxis):
            with raises(sw.StrategyError, "ep", fix="+"):
                cls(batch_axis=("ep", "ep")).compile()

    def test_a_mesh_axis_that_no_rule_names(self) -> None:
        mesh = sw.abstract_mesh("fsdp:4,model:2")
        with raises(
            sw.MeshMismatchError, "model=2", "fsdp", "dp", "tp", fix='tensor_parallel_axis="model"'
        ) as caught:
            ef.PartitionManager(ef.PartitionAxis(), mesh=mesh).explain([ef.BATCH])
        assert 'policy=sw.Policy(idle=("model",))' in caught.value.fix
        idle = sw.Policy(idle=("model",))
        named = ef.PartitionManager(ef.PartitionAxis(tensor_parallel_axis="model"), mesh=mesh)
        assert named.explain([ef.BATCH, ef.HEAD], shape=(8, 8)).spec == P("fsdp", "model")
        left = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh, policy=idle)
        assert left.explain([ef.BATCH, ef.HEAD], shape=(8, 8)).spec == P("fsdp")
        assert sw.PartitionManager(sw.PartitionAxis().compile(policy=idle), mesh=mesh).mesh == mesh
