"""Bridges to other libraries, and the names and signatures of some of them.

Each library has its own package or module. Code belongs here if programs written for another
library call it by the names and signatures of that library, or if it reads the models or
configurations of that library. Each package is complete by itself, but may use `logical_rules`.
The core imports nothing from here, and nothing here is imported until a program imports it.

eformer, fjformer, easydel and transformer_engine have the names of those libraries. The other
packages are bridges. A bridge has each of these functions that makes sense for its library:

- `annotate(model)`: the annotation of each array of `arrays(model)`, as a tree;
- `place(model, pm)`: the model, sharded;
- `to_strategy(config)`: the library's own rules as a strategy, and the axis of each name in them.

A bridge may also have functions that only its library needs, such as `rules`, `bound` or `load`.
"""
