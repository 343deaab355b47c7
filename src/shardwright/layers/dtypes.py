"""`Dtypes`: the dtypes of a block, as one value."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.vocabulary.read import instance

_FIX: Final = 'write one such as "bfloat16"'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """The dtypes of a block. Norms, softmax, logsumexp and sums of losses are float32 in any case.

    Attributes:
      param: Dtype of stored parameters.
      compute: Dtype of the operands of matmuls. Defaults to `param`.
      output: Dtype of the result of a block. Defaults to `compute`.
      cache: Dtype of keys and values in a cache. Defaults to `compute`.

    Raises:
      LayerError: A value is not a floating-point dtype.

    >>> Dtypes(param="float32", compute="bfloat16").output
    dtype(bfloat16)
    """

    param: Any = "float32"
    compute: Any = None
    output: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        inherited: Any = None
        for name in ("param", "compute", "output"):
            # A cache follows compute and not output, because attention computes in the dtype of the
            # cache.
            inherited = self._parse(name, inherited)
        self._parse("cache", self.compute)

    def _parse(self, name: str, inherited: Any) -> Any:
        given = getattr(self, name)
        try:
            dtype = jnp.dtype(inherited if given is None else given)
        except TypeError as error:
            raise LayerError(f"{name}={given!r} is not a dtype", fix=_FIX) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise LayerError(f"{name}={dtype} is not floating-point", fix=_FIX)
        object.__setattr__(self, name, dtype)
        return dtype


FLOAT32: Final = Dtypes()
DTYPES: Final = instance(Dtypes)
