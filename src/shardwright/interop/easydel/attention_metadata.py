"""`AttentionMetadata` has the options of attention in one value; `AttentionOutput` is the result.

Names and defaults are those of EasyDeL's attention operators.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.attention.call import JointSpecs, Options
from shardwright.attention.inputs import read_options
from shardwright.attention.sharding import resolve_joint
from shardwright.errors import AttentionError
from shardwright.manager import context
from shardwright.manager.context import platform_of
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import create_mesh
from shardwright.resolution import resolver
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.resolution.partition_specs import spec_of
from shardwright.resolution.rules import POLICY_PRESETS, build_rules
from shardwright.vocabulary.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    EMPTY,
    EMPTY_VAL,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    NOT_GIVEN,
    QUERY_LENGTH,
    canonical_axis,
)
from shardwright.vocabulary.modes import MODE_DECODE, MODE_TRAIN, parse_mode

# Axis -> the attribute of a model configuration that has its size.
_CONFIG_SIZES = {
    HEAD: "num_attention_heads",
    KV_HEAD: "num_key_value_heads",
    HEAD_DIM: "head_dim",
    KV_HEAD_DIM: "head_dim",
}
# EasyDeL's default of `sequence_axis_name`. With it, the rules alone decide the mesh axis of the
# sequence.
_ANY_SEQUENCE_AXIS = "sp"


class AttentionSpecs(NamedTuple):
    """The specs of attention's arrays, in the order in which EasyDeL's code unpacks them."""

    query: PartitionSpec
    key: PartitionSpec
    value: PartitionSpec
    bias: PartitionSpec
    mask: PartitionSpec
    output: PartitionSpec


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=False)
class AttentionMetadata:
    """The options of attention. The value is frozen. As a pytree, it has no leaves.

    An attribute that is not given is read from `base_config`, or else has a default.

    Attributes:
      runtime_dtype: Dtype to which q, k and v are cast. Defaults to `attn_dtype` of the
        configuration, else to float32.
      runtime_softmax_dtype: Has no effect, because softmax is always float32. Must have at most 32
        bits. Defaults to `attn_softmax_dtype` of the configuration, else to float32.
      sequence_axis_name: The mesh axis over which the rules shard the sequence. If the rules shard
        the sequence over another mesh axis, it is an error. The default, "sp", is not checked.
      mesh: Defaults to that of the ambient manager, else to the ambient mesh.
      platform: Must equal `backend`. Defaults to `backend`.
      backend: "cpu", "gpu" or "tpu". Defaults to the current backend.
      partition_axis: Rules as attributes. Defaults to `PartitionAxis()`.
      partition_manager: Rules and mesh. If `partition_axis` or `mesh` is given, defaults to a
        manager built from them, else to the ambient manager.
      base_config: The configuration of a model: any object with attributes.
      scan_ring_attention: Run ring attention as a `lax.scan` instead of unrolled. Defaults to True.
      softmax_scale: Factor of the logits. None means `1 / sqrt(head_dim)`.
      dropout_prob: Probability of dropping an attention weight in training. Defaults to 0.0.
      blocksize_q: Number of queries in a block. Defaults to 512.
      blocksize_k: Number of keys in a block. Defaults to 1024.
      blocksize_b: Number of sequences in a block. Must be 1.

    Raises:
      AttentionError: No mesh is given or ambient, or a value is not supported. (It is a
        ValueError.)
    """

    runtime_dtype: Any
    runtime_softmax_dtype: Any = None
    sequence_axis_name: Any = NOT_GIVEN
    mesh: Any = NOT_GIVEN
    platform: Any = NOT_GIVEN
    backend: Any = NOT_GIVEN
    partition_axis: Any = NOT_GIVEN
    partition_manager: Any = NOT_GIVEN
    # Not compared and not hashed: jit hashes the metadata, and a configuration may be unhashable.
    base_config: Any = dataclasses.field(default=None, compare=False, repr=False)
    scan_ring_attention: Any = NOT_GIVEN
    softmax_scale: Any = NOT_GIVEN
    dropout_prob: Any = NOT_GIVEN
    blocksize_q: Any = NOT_GIVEN
    blocksize_k: Any = NOT_GIVEN
    blocksize_b: Any = NOT_GIVEN

    def __post_init__(self) -> None:
        # For this attribute, None means the same as NOT_GIVEN: the configuration decides.
        if self.runtime_softmax_dtype is None:
            object.__setattr__(self, "runtime_softmax_dtype", NOT_GIVEN)
        for name, default, pickup_name in (
            ("runtime_dtype", jnp.float32, "attn_dtype"),
            ("runtime_softmax_dtype", jnp.float32, "attn_softmax_dtype"),
            ("sequence_axis_name", _ANY_SEQUENCE_AXIS, None),
            ("scan_ring_attention", True, None),
            ("softmax_scale", None, None),
            ("dropout_prob", 0.0, None),
            ("blocksize_q", 512, None),
            ("blocksize_k", 1024, None),
            ("blocksize_b", 1, None),
            ("backend", platform_of(None), None),
        ):
            self.set_attrs_carefully(name, default, pickup_name)
        # Set `platform` after the loop, because its default is the attribute `backend`.
        self.set_attrs_carefully("platform", self.backend)
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))
        self._set_manager()
        self._check_supported()

    def _check_supported(self) -> None:
        """Refuse values that no kernel supports."""
        if self.blocksize_b != 1:
            raise AttentionError(
                f"blocksize_b={self.blocksize_b!r}: no kernel takes several sequences in a block",
                path="blocksize_b",
                fix="leave blocksize_b at 1; blocksize_q and blocksize_k are numbers of rows",
            )
        if self.platform != self.backend:
            raise AttentionError(
                f"platform={self.platform!r} is not the backend {self.backend!r}",
                path="platform",
                fix='pass backend="cpu", "gpu" or "tpu"; choose a kernel with implementation=',
            )
        if jnp.finfo(self.runtime_softmax_dtype).bits > 32:
            raise AttentionError(
                f"runtime_softmax_dtype={self.runtime_softmax_dtype}: softmax is float32",
                path="runtime_softmax_dtype",
                fix="pass float32, or leave runtime_softmax_dtype out",
            )
        if (
            self.sequence_axis_name != _ANY_SEQUENCE_AXIS
            and self.sequence_axis_name not in self.mesh.axis_names
        ):
            raise AttentionError(
                f"sequence_axis_name={self.sequence_axis_name!r} is not an axis of the mesh "
                f"{', '.join(self.mesh.axis_names)}",
                path="sequence_axis_name",
                fix="name the mesh axis of query_length and kv_length, or leave "
                "sequence_axis_name out",
            )

    def _set_manager(self) -> None:
        entered = context.current()
        # An ambient manager has its own rules and mesh. They must not replace a given
        # `partition_axis` or `mesh`.
        has_rules = self._is_given("partition_axis") or self._is_given("mesh")
        self.set_attrs_carefully(
            "partition_manager", entered if entered is not None and not has_rules else NOT_GIVEN
        )
        self.set_attrs_carefully("partition_axis", PartitionAxis())
        manager = self.partition_manager
        self.set_attrs_carefully(
            "mesh", manager.mesh if manager is not NOT_GIVEN else _jax.mesh_at_hand() or NOT_GIVEN
        )
        if self.mesh is NOT_GIVEN or self.mesh is None:
            raise AttentionError(
                "mesh is not given, and none is ambient",
                path="mesh",
                fix="pass mesh=, or enter a manager (with pm:)",
            )
        if manager is NOT_GIVEN:
            object.__setattr__(
                self, "partition_manager", PartitionManager(self.partition_axis, mesh=self.mesh)
            )

    def _is_given(self, name: str) -> bool:
        """Tell whether an attribute is given, or is in the configuration."""
        return (
            getattr(self, name) is not NOT_GIVEN
            or getattr(self.base_config, name, NOT_GIVEN) is not NOT_GIVEN
        )

    def set_attrs_carefully(
        self,
        attr_name: str,
        default: Any,
        pickup_name: str | None = None,
        use_base_config: bool = True,
    ) -> None:
        """If an attribute was not given, set it to its value in the configuration, or to a default.

        The initialization calls this method.

        Args:
          attr_name: The attribute.
          default: The default value; `NOT_GIVEN` leaves the attribute unset.
          pickup_name: Name of the attribute in the configuration. By default, it is the name of the
            attribute here.
          use_base_config: Whether to read the configuration.
        """
        if not isinstance(getattr(self, attr_name), EMPTY_VAL):
            return
        value = (
            getattr(self.base_config, pickup_name or attr_name, NOT_GIVEN)
            if use_base_config
            else NOT_GIVEN
        )
        object.__setattr__(self, attr_name, default if isinstance(value, EMPTY_VAL) else value)

    @classmethod
    def from_config(
        cls, config: Any, softmax_scale: float | None, dropout_prob: float = 0.0
    ) -> AttentionMetadata:
        """Return metadata with this scale and dropout. Read the rest from a configuration."""
        return cls(
            NOT_GIVEN, base_config=config, softmax_scale=softmax_scale, dropout_prob=dropout_prob
        )

    def get_shardings(
        self,
        mode: str,
        BTHD: bool = True,  # noqa: N803
        qkv_mni_sharding: bool = False,
        *,
        sizes: Mapping[str, int] | None = None,
    ) -> AttentionSpecs:
        """Return the specs of query, key, value, bias, mask and output in a mode.

        Those of query, key and value are resolved together.

        Args:
          mode: Runtime mode.
          BTHD: True if arrays are `[batch, length, heads, head_dim]`, False if they are
            `[batch, heads, length, head_dim]`.
          qkv_mni_sharding: Whether k and v are already repeated to the number of heads of q.
          sizes: Axis -> size; heads and head_dim are also read from `base_config`. In the bias and
            the mask, a dim of size 1 is not sharded. An unknown size counts as divisible.

        Raises:
          ShapeRequiredError: The sharding of an axis depends on its size, which is unknown.
          AttentionError: The specs of q, k and v do not fit together.
        """
        mode = parse_mode(mode)
        known = self._sizes(sizes)
        joint = self.joint(mode, qkv_mni_sharding=qkv_mni_sharding, sizes=sizes)
        # Attention never shards head_dim, so the specs end with the heads.
        query = spec_of(joint.batch, joint.q_length, joint.heads)
        key = spec_of(joint.batch, joint.kv_length, joint.kv_heads)
        scores = (BATCH, BIAS_HEAD_SEQ, QUERY_LENGTH, BIAS_KV_SEQ)
        # A bias is assumed to have all heads and all keys, unless `sizes` says otherwise.
        known = {BIAS_HEAD_SEQ: known.get(HEAD, 0), BIAS_KV_SEQ: known.get(KV_LENGTH, 0), **known}
        known = {axis: size for axis, size in known.items() if size}
        bias, mask = (
            self._spec(axes, known, mode)
            for axes in (scores, (BATCH, EMPTY, QUERY_LENGTH, BIAS_KV_SEQ))
        )
        if not BTHD:
            query = spec_of(joint.batch, joint.heads, joint.q_length)
            key = spec_of(joint.batch, joint.kv_heads, joint.kv_length)
        # Values are sharded like keys, and the output like the queries.
        return AttentionSpecs(query, key, key, bias, mask, query)

    def joint(
        self, mode: str, *, qkv_mni_sharding: bool = False, sizes: Mapping[str, int] | None = None
    ) -> JointSpecs:
        """Return the joint specs of q, k and v; see `get_shardings`."""
        mode = parse_mode(mode)
        known = self._sizes(sizes)
        query = tuple(
            self._size(axis, known, mode) for axis in (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
        )
        # Repeated keys have as many heads as the queries.
        heads = (HEAD, HEAD_DIM) if qkv_mni_sharding else (KV_HEAD, KV_HEAD_DIM)
        key = tuple(self._size(axis, known, mode) for axis in (BATCH, KV_LENGTH, *heads))
        return resolve_joint(
            self.partition_manager, q=query, k=key, v=key, mode=mode, repeated=qkv_mni_sharding
        )

    def _sizes(self, sizes: Mapping[str, int] | None) -> dict[str, int]:
        config = {
            axis: getattr(self.base_config, name, None) for axis, name in _CONFIG_SIZES.items()
        }
        return {axis: size for axis, size in config.items() if size is not None} | {
            canonical_axis(axis): size for axis, size in (sizes or {}).items()
        }

    def _size(self, axis: str, known: Mapping[str, int], mode: str) -> Any:
        """Return the size of an axis; if unknown, a size that every number of shards divides."""
        if axis in known:
            return known[axis]
        # This call raises an error if the sharding of the axis depends on its size.
        self.partition_manager.mesh_axes(axis, mode=mode)
        # Every number of shards divides the number of devices.
        return self.partition_manager.mesh.size

    def _spec(self, axes: tuple[str, ...], known: Mapping[str, int], mode: str) -> PartitionSpec:
        named = tuple(EMPTY if axis == EMPTY or known.get(axis) == 1 else axis for axis in axes)
        shape = tuple(
            known.get(axis, 1) if name == EMPTY else self._size(axis, known, mode)
            for axis, name in zip(axes, named, strict=True)
        )
        spec: PartitionSpec = self.partition_manager.resolve(named, mode=mode, shape=shape)
        return spec

    def options(self, keywords: Mapping[str, Any]) -> Options:
        """Return the options of a call. Options that the call lacks are taken from the metadata."""
        options = read_options(keywords)
        manager = self.partition_manager if options.manager is None else options.manager
        mode = manager.mode if options.mode is None else options.mode
        defaults = {
            "scale": self.softmax_scale,
            # Outside of training, dropout has no default: only a call that passes it has dropout.
            "dropout": self.dropout_prob
            if mode is not None and parse_mode(mode) == MODE_TRAIN
            else None,
            "q_block": self.blocksize_q,
            "kv_block": self.blocksize_k,
            "loop": self.scan_ring_attention,
            "platform": self.backend,
            "manager": manager,
            "dtype": self.runtime_dtype,
            "sequence_axis": None
            if self.sequence_axis_name == _ANY_SEQUENCE_AXIS
            else self.sequence_axis_name,
        }
        return dataclasses.replace(
            options,
            **{name: value for name, value in defaults.items() if getattr(options, name) is None},
        )

    def replace(self, **changes: Any) -> AttentionMetadata:
        """Return a copy with some attributes changed.

        If the mesh or `partition_axis` changes, the copy has a new manager.
        """
        # Without this, the copy would keep a manager of the old mesh and rules.
        if {"mesh", "partition_axis"} & set(changes):
            changes.setdefault("partition_manager", NOT_GIVEN)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionMetadata:
        """Return the metadata from the result of `to_dict`."""
        return cls(**values)

    def to_json(self, **kwargs: Any) -> str:
        """Return JSON text, without the configuration; `kwargs` go to `json.dumps`.

        Raises:
          AttentionError: The manager has rules that `partition_axis` does not have, so JSON would
            lose them.
        """
        # A strategy from a file may have more than the rules of a `PartitionAxis`.
        if self.partition_manager != PartitionManager(self.partition_axis, mesh=self.mesh):
            what = "JSON holds only partition_axis, and the manager has other rules"
            raise AttentionError(
                what,
                path="partition_manager",
                fix="keep the strategy in its file; after from_json, call "
                "replace(partition_manager=...) with a manager of this strategy",
            )
        axis = {
            name: value
            for name, value in dataclasses.asdict(self.partition_axis).items()
            if not isinstance(value, EMPTY_VAL)
        }
        mesh = {
            "sizes": dict(self.mesh.shape),
            "types": [kind.name.lower() for kind in self.mesh.axis_types],
        }
        plain = {
            name: value
            for name, value in self.to_dict().items()
            if name not in ("base_config", "partition_manager")
        }
        plain |= {"partition_axis": axis, "mesh": mesh}
        plain |= {
            name: str(getattr(self, name)) for name in ("runtime_dtype", "runtime_softmax_dtype")
        }
        return json.dumps(plain, **kwargs)

    @classmethod
    def from_json(cls, text: str) -> AttentionMetadata:
        """Return the metadata from the text of `to_json`, on a mesh of the devices at hand.

        This starts the backend.
        """
        values = json.loads(text)
        axis = {
            # JSON has no tuples, and a rule is hashable only as a tuple.
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values["partition_axis"].items()
        }
        mesh = values["mesh"]
        types = dict(zip(mesh["sizes"], mesh["types"], strict=True))
        return cls(
            **values
            | {
                "partition_axis": PartitionAxis(**axis),
                "mesh": create_mesh(mesh["sizes"], axis_types=types),
            }
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOutput:
    """The result of an implementation, as a pytree.

    Attributes:
      attention_weights: `[batch, heads, q_length, kv_length]`, or None.
      attention_outputs: The result of attention, in the layout of the call, or None.
    """

    attention_weights: Any = None
    attention_outputs: Any = None

    def replace(self, **changes: Any) -> AttentionOutput:
        """Return the output with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return {
            "attention_weights": self.attention_weights,
            "attention_outputs": self.attention_outputs,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionOutput:
        """Return the output from the result of `to_dict`."""
        return cls(**values)

    def to_json(self, **kwargs: Any) -> str:
        """Return JSON text with dtypes, shapes and values; `kwargs` go to `json.dumps`."""
        plain = {
            name: value
            if value is None
            else {
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                # JSON has no bfloat16; float32 holds its values exactly.
                "values": jnp.ravel(value).astype(jnp.float32).tolist(),
            }
            for name, value in self.to_dict().items()
        }
        return json.dumps(plain, **kwargs)

    @classmethod
    def from_json(cls, text: str) -> AttentionOutput:
        """Return the output from the text of `to_json`."""
        arrays = dict.fromkeys(values := json.loads(text))
        for name, value in values.items():
            if value is not None:
                array = jnp.array(value["values"], jnp.float32).reshape(value["shape"])
                arrays[name] = array.astype(value["dtype"])
        return cls(**arrays)


def create_stable_sharding(
    manager: PartitionManager,
    state_ps: PartitionSpec | None = None,
    preserved_indices: list[int] | None = None,
    clone_ps: PartitionSpec | None = None,
    dep: Any = True,
    tensor: Any = None,
) -> PartitionSpec | None:
    """Return a spec that keeps some dims of another spec.

    Args:
      manager: A manager whose mesh is that of the specs.
      state_ps: The original spec.
      preserved_indices: Dims to keep; a dim past the end of the spec is replicated. None keeps all.
      clone_ps: Spec from which the entries of the kept dims are taken. Defaults to `state_ps`.
      dep: If None, the result is None.
      tensor: Array to whose shape the spec is fitted. A dim that does not divide is replicated, and
        entries of dims that the array does not have are dropped.
    """
    if dep is None or state_ps is None:
        return None
    spec = state_ps
    if preserved_indices is not None:
        entries = tuple((clone_ps if clone_ps is not None else state_ps).partitions)
        preserved = [
            entries[at] if at in preserved_indices and at < len(entries) else None
            for at in range(max(preserved_indices, default=-1) + 1)
        ]
        spec = PartitionSpec(*preserved)
    if tensor is None:
        return spec
    # EasyDeL drops entries that do not fit, without an error.
    permissive = build_rules({}, policy=POLICY_PRESETS["eformer"])
    return resolver.resolve(
        spec, permissive, manager.mesh, mode=MODE_TRAIN, shape=tensor.shape
    ).spec


def get_mode(q: Any, BTHD: bool = True, *, mode: str | None = None) -> str:  # noqa: N803
    """Return `mode` if it is given. Otherwise return decode for a single query, else train."""
    if mode is not None:
        return parse_mode(mode)
    # Like EasyDeL, assume that a call with a single query is a decode step.
    return MODE_DECODE if q.shape[1 if BTHD else 2] == 1 else MODE_TRAIN
