"""Train models of other authors, or plan them and compile them for TPUs. None is a decoder.

    PYTHONPATH=src:. python tools/other_models.py CHECKOUTS [--tpu] [--presets NAME,...] [NAME ...]

CHECKOUTS holds a working tree OWNER/NAME for each repository. Without --tpu, small models are
trained for three steps on eight CPU devices: without shardwright, and under five strategies. The
axes that inference gives are compared with axes that were read from the source. With --tpu, wider
models are planned, and compiled for a v5e:2x4. benchmarks/results/other_models.md has the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import shardwright as sw
from shardwright.inference.inferred import Inferred
from shardwright.plan import bytes_by_path
from shardwright.testing import cpu_mesh, virtual_devices
from shardwright.vocabulary.merged_dims import axis_text
from tests.plan.foreign_programs import Compared, Foreign, compare
from tests.tpu_compile import SETTINGS

STEPS: Final = 3
MESHES: Final = {
    "ddp": {"dp": 8},
    "fsdp": {"fsdp": 8},
    "fsdp_tp": {"fsdp": 4, "tp": 2},
    "sequence": {"fsdp": 4, "sp": 2},
    "vision": {"fsdp": 4, "sp": 2},
}
IMAGES: Final = (sw.BATCH, sw.HEIGHT, sw.WIDTH, sw.EMPTY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program of another author.

    Attributes:
      init: Returns the parameters.
      forward: `(parameters, *inputs) -> output`.
      original: `forward` before its lines were changed. Defaults to `forward`.
      loss: `(output, *inputs, *targets) -> loss`.
      inputs: Annotation, seed of inference, and array of each input.
      targets: Annotation and array of each target.
      right: Axes by the end of a path, read from the source. `A|B` accepts two names.
      lines: Lines of the model that were changed.
    """

    init: Callable[[], Any]
    forward: Callable[..., Any]
    loss: Callable[..., Any]
    inputs: Sequence[tuple[Any, Any, Any]]
    targets: Sequence[tuple[Any, Any]] = ()
    right: Mapping[str, str]
    lines: int = 0
    original: Callable[..., Any] | None = None

    @property
    def arrays(self) -> list[Any]:
        """The inputs, then the targets."""
        return [*(array for _, _, array in self.inputs), *(array for _, array in self.targets)]

    @property
    def axes(self) -> list[Any]:
        """The annotations of `arrays`."""
        return [*(axes for axes, _, _ in self.inputs), *(axes for axes, _ in self.targets)]

    def infer(self, params: Any) -> Inferred:
        """Return the axes that inference finds."""
        inputs = [array for _, _, array in self.inputs]
        seeds = [seed for _, seed, _ in self.inputs]
        return sw.infer_axes(self.forward, params, *inputs, seeds=seeds)

    def constrained(self, inferred: Inferred) -> Callable[..., Any]:
        """Return the forward function with constraints, or as it is if inference finds none."""
        return sw.constrained(self.forward, inferred) if inferred.constraints else self.forward


def _normal(key: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(key), shape)


def _pick(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def resnet(checkouts: Path, *, wide: bool) -> Case:
    """The ResNet of flax' imagenet example, without its line for pmap."""
    source = (checkouts / "google/flax/examples/imagenet/models.py").read_text(encoding="utf-8")
    path = Path(os.environ.get("TMPDIR", "/tmp")) / "resnet_models.py"
    path.write_text(source.replace("        axis_name='batch',\n", ""), encoding="utf-8")
    sys.path.insert(0, str(path.parent))
    models = importlib.import_module("resnet_models")
    small = {"stage_sizes": [2, 2], "block_cls": models.ResNetBlock, "num_filters": 16}
    # The stages of a ResNet-50, with one block in each.
    large = {"stage_sizes": [1] * 4, "block_cls": models.BottleneckResNetBlock}
    model = models.ResNet(num_classes=1000 if wide else 16, **(large if wide else small))
    batch, size = (64, 224) if wide else (16, 64)
    x, labels = _normal(1, batch, size, size, 3), jnp.arange(batch) % 16
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)

    def forward(params: Any, x: Any) -> Any:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes["batch_stats"])
        return model.apply({"params": params, "batch_stats": zeros}, x, mutable=["batch_stats"])[0]

    return Case(
        init=lambda: model.init(jax.random.key(0), x)["params"],
        forward=forward,
        loss=lambda logits, _, labels: _pick(logits, labels),
        inputs=[(IMAGES, IMAGES, x)],
        targets=[((sw.BATCH,), labels)],
        right={
            r"conv_init/kernel": "_ _ _ EMBED",
            r"Conv_0/kernel": "_ _ EMBED MLP_INTERMEDIATE",
            r"Conv_1/kernel": "_ _ MLP_INTERMEDIATE EMBED",
            # The kernel is between two residual streams, but a weight has EMBED only once.
            r"conv_proj/kernel": "_ _ EMBED _",
            r"BatchNorm_0/(scale|bias)": "MLP_INTERMEDIATE|NORM",
            r"(bn_init|norm_proj|BatchNorm_1)/(scale|bias)": "NORM",
            r"Dense_0/kernel": "EMBED VOCAB",
            r"Dense_0/bias": "VOCAB",
        },
        lines=1,
    )


def dit(checkouts: Path, *, wide: bool) -> Case:
    """The DiT for ImageNet of jax-diffusion-transformer, with two layers."""
    sys.path.insert(0, str(checkouts / "kvfrans/jax-diffusion-transformer"))
    source = importlib.import_module("diffusion_transformer")
    model = source.DiT(
        patch_size=2 if wide else 4,
        hidden_size=768 if wide else 64,
        depth=2,
        num_heads=12 if wide else 4,
        mlp_ratio=4.0,
        class_dropout_prob=0.1,
        num_classes=999 if wide else 15,  # the table has one row more
    )
    batch = 64 if wide else 16
    x, y = _normal(1, batch, 32, 32, 4), jnp.arange(batch) % 15
    t = jnp.arange(batch, dtype=jnp.float32)
    key = jax.random.key(3)

    def quiet(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints shapes
            return call(*given, train=True, **options)

    def init() -> Any:
        keys = {"params": jax.random.key(0), "label_dropout": key}
        params = quiet(model.init, keys, x, t, y)["params"]
        # The modulation of a DiT starts at 0, so most gradients of the first steps would be 0.
        return jax.tree.map(lambda p: p + 0.02 * _normal(7, *p.shape), params)

    return Case(
        init=init,
        forward=lambda params, *arrays: quiet(
            model.apply, {"params": params}, *arrays, rngs={"label_dropout": key}
        ),
        loss=lambda found, x, t, y, noise: ((found - noise) ** 2).mean(),
        inputs=[
            (IMAGES, (sw.BATCH, None, None, sw.EMPTY), x),
            ((sw.BATCH,), (sw.BATCH,), t),
            ((sw.BATCH,), (sw.BATCH,), y),
        ],
        targets=[(IMAGES, _normal(4, *x.shape))],
        right={
            "pos_embed": "_ LENGTH EMBED",
            "PatchEmbed_0/Conv_0/kernel": "_ _ _ EMBED",
            "PatchEmbed_0/Conv_0/bias": "NORM",
            "TimestepEmbedder_0/Dense_0/kernel": "_ MLP_INTERMEDIATE",
            "TimestepEmbedder_0/Dense_0/bias": "MLP_INTERMEDIATE",
            "TimestepEmbedder_0/Dense_1/kernel": "MLP_INTERMEDIATE EMBED",
            "TimestepEmbedder_0/Dense_1/bias": "NORM",
            "Embed_0/embedding": "VOCAB EMBED",
            r"DiTBlock_\d/Dense_0/kernel": "EMBED _",
            r"DiTBlock_\d/Dense_0/bias": "_",
            "(query|key|value)/kernel": "EMBED HEAD HEAD_DIM",
            "(query|key|value)/bias": "HEAD HEAD_DIM",
            "out/kernel": "HEAD HEAD_DIM EMBED",
            "MlpBlock_0/Dense_0/kernel": "EMBED MLP_INTERMEDIATE",
            "MlpBlock_0/Dense_0/bias": "MLP_INTERMEDIATE",
            "MlpBlock_0/Dense_1/kernel": "MLP_INTERMEDIATE EMBED",
            "(MlpBlock_0/Dense_1|out)/bias": "NORM",
            r"FinalLayer_0/Dense_\d/kernel": "EMBED _",
            r"FinalLayer_0/Dense_\d/bias": "_",
        },
    )


def griffin(checkouts: Path, *, wide: bool, linear_scan: bool = False) -> Case:
    """Griffin, with two recurrent blocks and one of local attention."""
    import jaxtyping

    root = checkouts / "google-deepmind/recurrentgemma/recurrentgemma"
    for name, folder in (("recurrentgemma", root), ("recurrentgemma.jax", root / "jax")):
        # Do not run the `__init__` of these packages: they import a tokenizer and PyTorch.
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    # JAX no longer has this module, and typeguard, which checks types, is of no use here.
    jax.experimental.shard_map = None
    sys.modules["typeguard"] = types.SimpleNamespace(typechecked=None)  # type: ignore[assignment]
    jaxtyping.jaxtyped = lambda function, typechecker: function
    common = importlib.import_module("recurrentgemma.common")
    source = importlib.import_module("recurrentgemma.jax.griffin")

    def scan(x: Any, a: Any, h0: Any = None, **_: Any) -> Any:
        y = sw.linear_scan(a, x, sw.BATCH, sw.LENGTH, sw.MLP_INTERMEDIATE)
        return y, y[:, -1].astype(jnp.float32)

    kinds = common.TemporalBlockType
    width, heads = (1024, 8) if wide else (64, 4)
    config = common.GriffinConfig(
        vocab_size=8192 if wide else 128,
        width=width,
        mlp_expanded_width=3 * width,
        num_heads=heads,
        lru_width=width,
        block_types=(kinds.RECURRENT, kinds.RECURRENT, kinds.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=256 if wide else 32,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.ASSOCIATIVE_NATIVE,
    )
    model = source.Griffin(config, gradient_checkpointing=False)
    batch, length = (16, 1024) if wide else (8, 64)
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, 128)
    positions = jnp.tile(jnp.arange(length), (batch, 1))
    words, inner = (sw.BATCH, sw.LENGTH), f"HEAD:{heads}*HEAD_DIM:{width // heads}"

    def original(params: Any, *arrays: Any) -> Any:
        return model.apply({"params": params}, *arrays, return_cache=False)[0]

    def changed(params: Any, *arrays: Any) -> Any:
        with mock.patch.object(source.scan, "linear_scan", scan):
            return original(params, *arrays)

    return Case(
        init=lambda: model.init(jax.random.key(0), tokens, positions, return_cache=False)["params"],
        forward=changed if linear_scan else original,
        original=original,
        loss=lambda logits, tokens, _: _pick(logits, jnp.roll(tokens, -1, 1)),
        inputs=[(words, words, tokens), (words, words, positions)],
        right={
            "input_embedding": "VOCAB EMBED",
            "norm/scale": "NORM",
            "linear_[xy]/kernel": f"EMBED {inner}",
            "(linear_[xy]/bias|conv_1d/b|a_param)": inner,
            "conv_1d/w": f"_ {inner}",
            "gate/w": "HEAD HEAD_DIM _",
            "gate/b": "HEAD HEAD_DIM",
            "(linear_out|proj_final)/kernel": f"{inner} EMBED",
            "proj_q/kernel": f"EMBED {inner}",
            "proj_[kv]/kernel": "EMBED HEAD_DIM|KV_HEAD_DIM",
            "ffw_up/w": "_ EMBED MLP_INTERMEDIATE",
            "ffw_up/b": "_ _ _ MLP_INTERMEDIATE",
            "ffw_down/kernel": "MLP_INTERMEDIATE EMBED",
            "(linear_out|proj_final|ffw_down)/bias": "NORM",
        },
        lines=int(linear_scan),
    )


CASES: Final[Mapping[str, Callable[..., Case]]] = {
    "resnet": resnet,
    "dit": dit,
    "griffin": griffin,
    "griffin, linear_scan": lambda at, *, wide: griffin(at, wide=wide, linear_scan=True),
}


def judge(case: Case, inferred: Inferred) -> dict[str, int]:
    """Count the dims that are named right, wrong and not at all, and print those that differ."""
    counts = dict.fromkeys(("right", "wrong", "wrong, not a guess", "open"), 0)
    for dim in inferred.evidence:
        pattern = next(each for each in case.right if re.search(rf"{each}$", dim.path))
        expected = case.right[pattern].split()[dim.dim]
        axis = axis_text(dim.axis)
        # A vector along EMBED is spelled NORM.
        names = {*expected.split("|")} | ({"EMBED"} if expected == "NORM" else set())
        verdict = "right" if axis in names else "wrong"
        if dim.is_open:
            verdict = "open"
        counts[verdict] += 1
        counts["wrong, not a guess"] += verdict == "wrong" and not dim.guess
        if verdict != "right":
            mark = " (guess)" if dim.guess else ""
            print(f"    {dim.path} dim {dim.dim}: {axis}{mark}, not {expected}", flush=True)
    return counts


def train(case: Case, name: str) -> None:
    """Print the largest relative difference of three losses under each strategy."""
    params = case.init()
    inferred = case.infer(params)
    counts = judge(case, inferred)
    total = sum(counts[key] for key in ("right", "wrong", "open"))
    print(f"  {total} dims: {counts}; {len(inferred.constraints)} constraints, {case.lines} lines")
    forward, axes = case.constrained(inferred), inferred.annotations

    def losses(params: Any, arrays: Sequence[Any], forward: Any, gather: Any) -> list[float]:
        def loss(params: Any, *arrays: Any) -> Any:
            inputs = arrays[: len(case.inputs)]
            return case.loss(forward(gather(params), *inputs), *arrays)

        @jax.jit
        def step(params: Any, *arrays: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, *arrays)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

        found = []
        for _ in range(STEPS):
            value, params = step(params, *arrays)
            found.append(float(value))
        return found

    original = case.original or case.forward
    expected = losses(params, case.arrays, original, lambda params: params)
    print("  losses without a manager:", *(f"{value:.6f}" for value in expected), flush=True)
    for preset, sizes in MESHES.items():
        pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(sizes), mode="train")
        with pm:
            placed = pm.shard(params, axes, role="param")
            arrays = [pm.shard(x, of) for x, of in zip(case.arrays, case.axes, strict=True)]
            found = losses(placed, arrays, forward, lambda params: sw.gather(params, axes))
        difference = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        held = bytes_by_path(placed)
        mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
        held_text = f"{held.per_device:,} of {held.total:,} bytes"
        print(f"| {name} | {preset} | `{mesh}` | {difference:.1e} | {held_text} |", flush=True)


def compile_plans(case: Case, name: str, presets: Sequence[str]) -> bool:
    """Print the plan of the gradients beside the compiled program, under each preset.

    Return whether every plan that differs from its program has marks.
    """
    shapes = jax.eval_shape(case.init)
    inferred = case.infer(shapes)
    forward, axes = case.constrained(inferred), inferred.annotations
    specs = jax.tree.map(lambda x, of: sw.ArraySpec(x.shape, x.dtype, of), shapes, axes)

    def loss(params: Any, *arrays: Any) -> Any:
        inputs = arrays[: len(case.inputs)]
        return case.loss(forward(sw.gather(params, specs), *inputs), *arrays)

    inputs = [(of, x.shape, x.dtype) for x, of in zip(case.arrays, case.axes, strict=True)]
    is_said = True
    for preset in presets:
        mesh = MESHES[preset]
        program = Foreign(
            function=loss, weights=specs, inputs=tuple(inputs), preset=preset, mesh=mesh
        )
        compared = compare(name, program, tpu=True)
        print(_row(compared, preset, mesh), flush=True)
        for mark in compared.marks:
            print("   ", mark, flush=True)
        is_said &= bool(compared.marks) or not _differences(compared)
    return is_said


def _differences(compared: Compared) -> list[str]:
    """Return the differences of at least 64 bytes.

    Smaller differences come from scalars: a compiler may compute a sum once that occurs twice in
    the program, but a plan counts each occurrence.
    """
    return [
        f"{kind}: {planned:,} {sent:,}"
        for kind, (planned, sent) in compared.differences.items()
        if abs(planned - sent) >= 64
    ]


def _row(compared: Compared, preset: str, sizes: Mapping[str, int]) -> str:
    differences = _differences(compared)
    verdict = "marked" if compared.marks else "DIFFERENT"
    if not differences:
        verdict = "equal"
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    return f"| {compared.name} | {preset} | `{mesh}` | {verdict} | {'; '.join(differences)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="NAME")
    parser.add_argument("--tpu", action="store_true")
    parser.add_argument("--presets", default=",".join(MESHES))
    given = parser.parse_intermixed_args()
    is_said = True
    for name in given.names:
        print(name, flush=True)
        case = CASES[name](given.checkouts, wide=given.tpu)
        if given.tpu:
            is_said &= compile_plans(case, name, given.presets.split(","))
        else:
            train(case, name)
    return 0 if is_said else 1


if __name__ == "__main__":
    if "--tpu" in sys.argv:
        os.environ.update(SETTINGS)  # libtpu reads them when it is loaded
        jax.config.update("jax_platforms", SETTINGS["JAX_PLATFORMS"])
    else:
        virtual_devices(8)
    sys.exit(main())
