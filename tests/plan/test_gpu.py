"""Programs compiled for eight H100s that are not there, beside their plans: `make test-gpu`."""

from __future__ import annotations

import dataclasses

import pytest

import shardwright as sw
from shardwright.plan import verify_plan
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.verify import compiler
from shardwright.plan.verify.compiler import Compiled, Target
from shardwright.plan.verify.gpus import GPUS, cuda_plugin
from shardwright.plan.verify.run import Verification
from tests.plan.tpu_programs import forward_program, train_program
from tests.raising import raises
from tools.cuda_plugin import requirements

TOPOLOGY = "h100:8"


def verified(preset: str, mesh: str, *, train: bool = False) -> Verification:
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))
    program = train_program() if train else forward_program()
    return verify_plan(pm.for_mode("train"), program, topology=TOPOLOGY)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(cuda_plugin() is None, reason="no CUDA plugin of JAX: make test-gpu")
class TestCompiledForGpus:
    @pytest.mark.parametrize(
        ("preset", "mesh"), [("fsdp", "fsdp:8"), ("fsdp_tp", "fsdp:4,tp:2"), ("tensor", "tp:8")]
    )
    def test_forward_sends_what_is_planned(self, preset: str, mesh: str) -> None:
        found = verified(preset, mesh)
        assert found.compiled.collectives
        assert all(row.difference == 0 for row in found.traffic), found.traffic
        assert found.verdict is Verdict.FITS
        assert found.compiled.peak is not None
        assert found.report.memory.low <= found.compiled.peak <= found.report.memory.high

    def test_training_step_scatters_and_fits(self) -> None:
        found = verified("fsdp", "fsdp:8", train=True)
        kinds = {each.kind for each in found.compiled.collectives}
        assert {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} <= kinds
        assert all(row.unexplained == 0 or row.equal for row in found.traffic), found.traffic

    def test_too_large_program_is_judged_here(self) -> None:
        """XLA for GPUs compiles a program of any size."""
        pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
        large = forward_program(batch=2**13, length=2**12, embed=2**11)
        found = verify_plan(pm.for_mode("train"), large, topology=TOPOLOGY)
        assert found.verdict is Verdict.DOES_NOT_FIT
        assert not found.compiled.refused


def test_peak_of_gpus_is_a_sum() -> None:
    memory = {
        "argument_size": 1000,
        "output_size": 300,
        "alias_size": 200,
        "temp_size": 5000,
        "peak_memory": 1,
    }
    assert Compiled(target=Target(platform="gpu", topology=TOPOLOGY), memory=memory).peak == 6100


def test_every_gpu_of_the_table_is_described() -> None:
    """XLA for CUDA does not compile for AMD's GPUs."""
    chips = {name for name, chip in read_hardware().items() if chip.domain}
    assert chips - {"mi300x"} == GPUS.keys()
    for name, model in GPUS.items():
        text = model.target_config()
        assert f"device_memory_size: {model.memory}" in text
        assert text.count("{") == text.count("}"), name


def test_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = read_hardware()
    domain = parse_topology(TOPOLOGY, hardware)
    monkeypatch.setattr(compiler, "cuda_plugin", lambda: None)
    with raises(sw.StrategyError, "h100:8", fix="make test-gpu"):
        compiler.make_target(domain)
    monkeypatch.setattr(compiler, "cuda_plugin", lambda: "jax-cuda13-plugin")
    assert compiler.make_target(domain) == Target(platform="gpu", topology="h100:8")
    assert compiler.make_target(dataclasses.replace(domain, slices=16)).slices == 16
    with raises(sw.StrategyError, "h100:8", "TPUs", fix="--compiler gpu"):
        compiler.make_target(domain, platform="tpu")
    amd = parse_topology("mi300x:8", hardware)
    with raises(sw.StrategyError, "mi300x", fix="h100"):
        compiler.make_target(amd)
    with raises(sw.StrategyError, "GPUs", "topology", fix="16xh100:8"):
        compiler.make_target(None, platform="gpu")


def test_plugins_follow_the_version_of_jaxlib() -> None:
    assert requirements("0.12.0.1")[0] == "jax-cuda13-plugin==0.12.0.1"
    assert requirements("0.10.2")[-1] == "nvidia-cuda-nvcc-cu12"


def test_mesh_of_hosts_is_that_of_the_chip() -> None:
    def shape(topology: str, devices: int) -> str:
        target = Target(platform="gpu", topology=topology)
        return str(compiler._options(target, {"fsdp": devices})["topology"])

    assert shape("h100:8", 128) == "1x16x8"
    assert shape("gb200:72", 288) == "1x72x4"
    assert shape("h100:2", 2) == "1x1x2"
