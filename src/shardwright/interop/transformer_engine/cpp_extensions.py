"""Stand-ins for `transformer_engine.jax.cpp_extensions`, which many programs import but do not use.

The primitives of TransformerEngine call CUDA, so they are not provided. The layers of `flax`
compute the same results.
"""

import functools
from typing import Any, NoReturn

from shardwright.errors import LayerError


@functools.cache
def __getattr__(name: str) -> Any:
    """Return a class in place of a primitive, so that importing the primitive succeeds.

    A call of the class, or a subclass of it, raises `LayerError`.

    Raises:
      AttributeError: The name begins with an underscore.
    """
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fix = "use a layer of shardwright.interop.transformer_engine.flax"

    def refuse(*_: Any, **__: Any) -> NoReturn:
        what = f"{name} is a primitive of TransformerEngine, which calls CUDA"
        raise LayerError(what, fix=fix)

    return type(name, (), {"__new__": refuse, "__init_subclass__": refuse, "__doc__": fix})
