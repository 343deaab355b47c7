"""`Dtypes`: the dtypes of a block, as one value."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright.errors import LayerError
from shardwright.vocabulary.read import floating, instance, read_value

_FLOATS: Final = floating(fix='write a dtype such as "bfloat16"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """The dtypes of a block. Norms, softmax, logsumexp and sums of losses are always float32.

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
        # `cache` defaults to `compute` and not to `output`, because attention computes in the dtype
        # of the cache.
        followed = {"param": "param", "compute": "param", "output": "compute", "cache": "compute"}
        for name, other in followed.items():
            given = getattr(self, name)
            value = getattr(self, other) if given is None else given
            object.__setattr__(self, name, read_value(name, value, _FLOATS, error=LayerError))


FLOAT32: Final = Dtypes()
DTYPES: Final = instance(Dtypes)
