"""Print flags of XLA with which tests compile in half of the time. The programs run slower."""

from __future__ import annotations

import importlib.metadata

# Programs of tests are small and run once, so optimizing a program takes more time than it saves.
# Compiling a program in parts saves no time either, because the other cores run other tests.
# By default, a collective that waits 40 s for a busy machine ends the process.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=300 "
    "--xla_cpu_collective_timeout_seconds=300"
)
# The fusion emitter makes a module of LLVM for each fusion. JAX 0.11 has another emitter, and no
# such flag.
BEFORE_JAX_0_11 = "--xla_cpu_use_fusion_emitters=false"


def main() -> None:
    version = importlib.metadata.version("jaxlib").split(".")[:2]
    print(FLAGS, BEFORE_JAX_0_11 if [*map(int, version)] < [0, 11] else "")


if __name__ == "__main__":
    main()
