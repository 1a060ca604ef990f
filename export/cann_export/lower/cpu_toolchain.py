"""Compiles the CPU kernel library and names the compiler flags of each ISA.

The library is built once per source text, flags, compiler and torch version, and kept in the user's cache folder; its
bytes do not depend on where it was built. What uses it is in `cpu.py`; what loads it on the inference host is
`cann_runtime.ops.cpu`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cann_runtime.errors import RecipeError
from cann_runtime.executor.isa import ISAS, host_isa

KERNELS = Path(__file__).parent / "kernels"

MARCH = {"avx2": "x86-64-v3", "avx512": "x86-64-v4", "avx512_bf16": "x86-64-v4"}
"""-march of each ISA, for the kernels and for the graphs: code that needs no more than the ISA's name says."""

EXTRA_FLAGS = {"avx2": [], "avx512": [], "avx512_bf16": ["-mavx512bf16"]}

# Only these hold vector code. The others are compiled for any x86-64, so that an exporting host need not have the ISA.
KERNEL_SOURCES = ("linear.cpp", "attention.cpp")
TORCH_SOURCES = ("ops.cpp", "plain.cpp", "runner.cpp")

# gcc's own intrinsic headers trip its uninitialized-value warnings.
COMMON_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-unused-function",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]


def resolve_isa(isa: str) -> str:
    """The ISA that a recipe means: `native` becomes the best one of this host.

    Raises RecipeError for a name that is not in `ISAS`.
    """
    if isa == "native":
        return host_isa()
    if isa not in ISAS:
        raise RecipeError(f"isa: {isa!r} is not known; allowed: native, {', '.join(ISAS)}")
    return isa


def cache_dir() -> Path:
    """The user's cache folder: $CANN_EXPORT_CACHE, by default ~/.cache/cann-export."""
    return Path(os.environ.get("CANN_EXPORT_CACHE") or Path.home() / ".cache" / "cann-export")


def compiler() -> str:
    """The C++ compiler: $CXX or g++. Raises RecipeError where there is none."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise RecipeError(f"target cpu needs a C++ compiler, and {name!r} is not on the PATH (install g++, or set CXX)")
    return name


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _flags(source: str, isa: str) -> list[str]:
    """The compiler flags of one source; they keep folder names out of the object."""
    flags = [*COMMON_FLAGS, f"-ffile-prefix-map={KERNELS}=kernels", f"-frandom-seed={source}"]
    if source in KERNEL_SOURCES:
        return [*flags, f"-march={MARCH[isa]}", *EXTRA_FLAGS[isa]]
    include = _torch_root() / "include"
    return [
        *flags,
        f"-ffile-prefix-map={_torch_root()}=torch",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
    ]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise RecipeError(f"target cpu: {command[0]} failed on {what}: {first}")


@functools.cache
def _compiler_version(name: str) -> str:
    return subprocess.run([name, "-dumpfullversion"], capture_output=True, text=True).stdout.strip()


def _key(source: str, isa: str) -> str:
    """What an object file depends on: its source and all headers, flags, compiler and torch."""
    digest = hashlib.sha256()
    for path in [KERNELS / source, *sorted(KERNELS.glob("*.h"))]:
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    digest.update("\0".join([*_flags(source, isa), torch.__version__, _compiler_version(compiler())]).encode())
    return digest.hexdigest()[:24]


def _build(target: Path, what: str, command: Callable[[Path], list[str]]) -> Path:
    """Make `target` by the command for an output path, unless it is there. Concurrent builds are safe: each works in a
    folder of its own and renames the result into place."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            out = Path(folder) / target.name
            _run(command(out), what)
            out.rename(target)
    return target


def build_kernels(isa: str) -> Path:
    """The kernel library for an ISA (not `native`), compiled if it is not in the cache yet (about half a minute)."""
    folder = cache_dir() / "kernels"
    sources = [*TORCH_SOURCES, *KERNEL_SOURCES]
    keys = [_key(source, isa) for source in sources]

    def compile_one(source: str, key: str) -> Path:
        def command(out: Path) -> list[str]:
            return [compiler(), *_flags(source, isa), "-c", str(KERNELS / source), "-o", str(out)]

        return _build(folder / f"{Path(source).stem}-{key}.o", source, command)

    def link(out: Path) -> list[str]:
        libs = [f"-L{_torch_root() / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        return [compiler(), "-shared", "-fopenmp", "-s", "-o", str(out), *map(str, objects), *libs]

    library = folder / hashlib.sha256("".join(keys).encode()).hexdigest()[:24] / "cann_cpu.so"
    if library.exists():
        return library
    with ThreadPoolExecutor(max_workers=min(len(sources), os.cpu_count() or 1)) as pool:
        objects = list(pool.map(compile_one, sources, keys))
    return _build(library, "the kernel library", link)
