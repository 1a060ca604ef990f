"""Compiles an exported CPU program with AOTInductor to one library whose bytes depend on nothing but the program.

The library calls the kernel library as C functions, holds no weights, and runs on the ISA it was compiled for with any
number of threads. Making the program is in `cpu.py`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor
import torch._inductor.codecache as codecache
import torch._inductor.cpu_vec_isa as vec_isa

from cann_export.lower.cpu_toolchain import EXTRA_FLAGS, MARCH

_HANDLE = "AtenTensorHandle"
_PARALLEL_ROWS = 16  # rows from which inductor's own kernels use several threads

# Error messages hold the names of generated sources and of torch's headers, and symbols random numbers: with these, and
# without symbols, equal programs give equal bytes in any folder. (Prefix maps would do it too, but their text would
# differ from run to run, and inductor's precompiled headers, a third of the compile time, would never be reused.)
_SAME_BYTES = ["-frandom-seed=graph", "-Wno-builtin-macro-redefined", "'-D__FILE__=\"graph\"'", "-s"]


def _c_functions() -> dict[Any, list[str]]:
    """The kernel library's ops with the C functions that stand for them (defined in ops.cpp and runner.cpp)."""
    ops = torch.ops.cann_cpu
    attention = ", ".join([_HANDLE] * 4 + ["int64_t"] + [_HANDLE] * 4 + ["double", f"{_HANDLE}*"])
    return {
        ops.linear.default: [
            f"AOTITorchError aoti_torch_cpu_linear({_HANDLE}, {_HANDLE}, {_HANDLE}*, int64_t, {_HANDLE}*)"
        ],
        ops.linear_f32.default: [
            f"AOTITorchError aoti_torch_cpu_linear_f32({_HANDLE}, {_HANDLE}, {_HANDLE}*, int64_t, {_HANDLE}*)"
        ],
        ops.rope_paged_attention.default: [f"AOTITorchError aoti_torch_cpu_rope_paged_attention({attention})"],
        ops.all_reduce.default: [f"AOTITorchError aoti_torch_cpu_all_reduce({_HANDLE}, const char*, {_HANDLE}*)"],
        ops.all_gather.default: [
            f"AOTITorchError aoti_torch_cpu_all_gather({_HANDLE}, int64_t, const char*, {_HANDLE}*)"
        ],
    }


def _options(isa: str, out: Path) -> dict[str, Any]:
    return {
        "aot_inductor.package": False,
        "aot_inductor.package_constants_in_so": False,
        # Small ones (a rank's offset) would be written into the code, and no rank could bind its own.
        "always_keep_tensor_constants": True,
        "aot_inductor.output_path": str(out),
        "aot_inductor.custom_ops_to_c_shims": _c_functions(),
        # The only option that takes compiler flags, so it carries ours too.
        "cpp.march": " ".join([MARCH[isa], *EXTRA_FLAGS[isa], *_SAME_BYTES]),
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.model_name_for_generated_files": "graph",
        "cpp.simdlen": 256 if isa == "avx2" else 512,
        # The number of threads is the inference host's, not the exporter's.
        "cpp.dynamic_threads": True,
    }


def _serial_when_small(kernel_code: str) -> str:
    """The generated elementwise kernels with their parallel loops limited to steps of many rows.

    Their outer loop runs over rows (the first dynamic size, `ks0`). A decode step has a few of them, and waking every
    thread for each of its hundred small kernels costs more than the kernels do.
    """
    functions = re.split(r'(?=^extern "C")', kernel_code, flags=re.MULTILINE)
    pragma = re.compile(r"#pragma omp parallel$", re.MULTILINE)
    limited = f"#pragma omp parallel if (ks0 >= {_PARALLEL_ROWS})"
    return "".join(pragma.sub(limited, f) if "const int64_t ks0" in f else f for f in functions)


def _compile_small(graph: Any, wrapper_code: str, kernel_code: str, *args: Any, **kwargs: Any) -> Any:
    return _compile(graph, wrapper_code, _serial_when_small(kernel_code), *args, **kwargs)


_compile = codecache.AotCodeCompiler.compile


def compile_graph(exported: torch.export.ExportedProgram, *, isa: str, out: Path) -> Path:
    """Compile to `out` (a .so) for an ISA of cann_runtime.executor.isa.ISAS; returns it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    # inductor would take the host's best variant of the ISA (VNNI, AMX); the artifact's ISA must do.
    target = vec_isa.VecAVX2() if isa == "avx2" else vec_isa.VecAVX512()
    module = exported.module(check_guards=False)
    args, kwargs = exported.example_inputs or ((), {})
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "graph.so"
        with (
            mock.patch.object(vec_isa, "valid_vec_isa_list", return_value=[target]),
            mock.patch.object(codecache.AotCodeCompiler, "compile", _compile_small),
        ):
            made = torch._inductor.aot_compile(module, args, kwargs, options=_options(isa, library))
        shutil.copyfile(str(made), out)
    return out
