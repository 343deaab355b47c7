"""Names and signatures of other libraries, one package or module for each library.

Code belongs here if programs of the other library call it by that name and signature. Each package
is complete by itself, but may use `logical_rules`. The core imports nothing from here, and nothing
here is imported until a program imports it.

eformer, fjformer, easydel and transformer_engine have the names of those libraries. The other
packages are bridges. They share these functions, as far as a library allows them:

- `annotate(model)`: the annotation of each array of `arrays(model)`, as a tree;
- `place(model, pm)`: the model, sharded;
- `to_strategy(config)`: the strategy of the library's own rules, and the axis of each name.

A bridge may also have functions that only its library needs, such as `rules`, `bound` or `load`.
"""
