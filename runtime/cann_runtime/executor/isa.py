"""The instruction sets that CPU artifacts are compiled for, and what this host has.

Read from /proc/cpuinfo, so that the check comes before torch or any compiled code is loaded.
"""

from __future__ import annotations

from pathlib import Path

from cann_runtime.errors import ArtifactError

_AVX2 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

ISAS: dict[str, frozenset[str]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
}
"""ISA -> the cpuinfo flags that its code needs, the least demanding first (x86-64-v3, v4, v4 + BF16)."""

CPUINFO = Path("/proc/cpuinfo")


def host_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The CPU flags of this host; empty where the file does not exist or names none (not x86)."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def host_isa(cpuinfo: Path = CPUINFO) -> str:
    """The best of ISAS that this host can run; ArtifactError where it has none of them."""
    flags = host_flags(cpuinfo)
    for isa, needed in reversed(ISAS.items()):
        if needed <= flags:
            return isa
    raise ArtifactError(f"target cpu: this host has none of the ISAs {', '.join(ISAS)}")


def check_isa(required: str | None, cpuinfo: Path = CPUINFO) -> None:
    """Raise ArtifactError unless this host can run code compiled for `required`, one of ISAS."""
    if required not in ISAS:
        raise ArtifactError(f"manifest target.isa: {required!r} is not known; allowed: {', '.join(ISAS)}")
    missing = sorted(ISAS[required] - host_flags(cpuinfo))
    if missing:
        raise ArtifactError(
            f"manifest target.isa: this artifact needs {required}, and this host's CPU lacks {', '.join(missing)}; "
            f"export again on a CPU target with a lower isa ({', '.join(ISAS)})"
        )
