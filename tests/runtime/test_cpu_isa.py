"""What the runtime says about instruction sets, from cpuinfo files of hosts that have more or less."""

from __future__ import annotations

from pathlib import Path

import pytest

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.isa import ISAS, check_isa, host_flags, host_isa


def cpuinfo(folder: Path, flags: frozenset[str]) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: fpu sse2 {' '.join(sorted(flags))}\n\n")
    return path


@pytest.mark.parametrize("isa", ISAS)
def test_a_host_gets_the_best_isa_that_its_flags_allow(tmp_path: Path, isa: str) -> None:
    assert host_isa(cpuinfo(tmp_path, ISAS[isa])) == isa


def test_one_missing_flag_falls_back_to_the_isa_below(tmp_path: Path) -> None:
    assert host_isa(cpuinfo(tmp_path, ISAS["avx512_bf16"] - {"avx512vl"})) == "avx2"


def test_a_lower_isa_is_accepted_and_a_higher_one_refused_in_one_line(tmp_path: Path) -> None:
    host = cpuinfo(tmp_path, ISAS["avx512"])
    check_isa("avx2", host)
    check_isa("avx512", host)
    with pytest.raises(ArtifactError, match=r"needs avx512_bf16, and this host's CPU lacks avx512_bf16;") as error:
        check_isa("avx512_bf16", host)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("isa", ["avx10", None])
def test_unknown_isas_are_refused_naming_the_allowed_ones(tmp_path: Path, isa: str | None) -> None:
    with pytest.raises(ArtifactError, match="allowed: avx2, avx512, avx512_bf16"):
        check_isa(isa, cpuinfo(tmp_path, ISAS["avx2"]))


def test_a_host_without_any_of_them_is_refused(tmp_path: Path) -> None:
    assert host_flags(tmp_path / "absent") == frozenset()
    with pytest.raises(ArtifactError, match="none of the ISAs"):
        host_isa(tmp_path / "absent")
