"""Print flags of XLA with which tests compile in half of the time. Their programs run slower.

XLA ends a process that passes a flag that it does not know, and versions differ. So the flags are
looked up in the library.
"""

from __future__ import annotations

import mmap
import pathlib

import jaxlib

ALWAYS = "--xla_backend_optimization_level=0"
# XLA's newer emitter builds a module of LLVM for each fusion, and each part of a program is
# compiled apart to use more cores. Programs of tests are small, and the cores have other tests.
IF_KNOWN = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def main() -> None:
    (library,) = pathlib.Path(jaxlib.__file__).parent.glob("libjax_common.*")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        names = (flag.removeprefix("--").partition("=")[0] for flag in IF_KNOWN.split())
        knows_all = all(text.find(b"\0" + name.encode() + b"\0") >= 0 for name in names)
    print(ALWAYS, IF_KNOWN if knows_all else "")


if __name__ == "__main__":
    main()
