"""Compiles the CPU kernel library and names the compiler flags of each ISA.

The library is built once per source text, flags, compiler and torch version, and kept in the user's cache folder; its
bytes do not depend on where it was built. What uses it is in `cpu.py`; what loads it on the inference host is
`cann_runtime.ops.cpu`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
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


def _compile_command(source: str, isa: str, out: Path) -> list[str]:
    """The command for one source. File names inside the object are relative, so that its bytes are the same anywhere."""
    flags = [*COMMON_FLAGS, f"-ffile-prefix-map={KERNELS}=kernels", f"-frandom-seed={source}", f"-DCANN_ISA={isa}"]
    if source in KERNEL_SOURCES:
        flags += [f"-march={MARCH[isa]}", *EXTRA_FLAGS[isa]]
    else:
        include = _torch_root() / "include"
        flags += [
            f"-ffile-prefix-map={_torch_root()}=torch",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-isystem{include}",
            f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
        ]
    return [compiler(), *flags, "-c", str(KERNELS / source), "-o", str(out)]


def _link_command(objects: list[Path], out: Path) -> list[str]:
    libs = [f"-L{_torch_root() / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [compiler(), "-shared", "-fopenmp", "-s", "-o", str(out), *map(str, objects), *libs]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise RecipeError(f"target cpu: {command[0]} failed on {Path(command[-3]).name}: {first}")


def _key(isa: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(KERNELS.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    version = subprocess.run([compiler(), "-dumpfullversion"], capture_output=True, text=True).stdout
    parts = [isa, MARCH[isa], *EXTRA_FLAGS[isa], *COMMON_FLAGS, torch.__version__, version]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:24]


def build_kernels(isa: str) -> Path:
    """The kernel library for an ISA (not `native`), compiled if it is not in the cache yet (about half a minute).

    Concurrent builds are safe: each works in a folder of its own and renames the result into place.
    """
    target = cache_dir() / "kernels" / _key(isa) / "cann_cpu.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        work = Path(folder)
        sources = [*TORCH_SOURCES, *KERNEL_SOURCES]
        objects = [work / f"{Path(source).stem}.o" for source in sources]
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            commands = [_compile_command(source, isa, out) for source, out in zip(sources, objects, strict=True)]
            list(pool.map(_run, commands))
        library = work / "cann_cpu.so"
        _run(_link_command(objects, library))
        library.rename(target)
    return target
