"""`transformer_engine.jax.cpp_extensions`, which programs import and often do not use.

It has no names: TransformerEngine's primitives call CUDA. The layers of `flax` compute the same.
"""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"{name!r} is a primitive of TransformerEngine, which calls CUDA. Use a layer of "
        "shardwright.interop.transformer_engine.flax"
    )
