"""The private toolchain: stubs without a compiler, whole or absent, and no trace left in other processes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cann_export.lower.ascend import toolchain
from cann_export.lower.ascend.soc import check_block_size, check_dtypes, layout, resolve_target, round_block_size
from cann_export.lower.ascend.stubs import shared_object
from cann_export.lower.ascend.toolchain import TORCH_NPU_VERSION, ensure_toolchain, install
from cann_runtime.errors import CannError, RecipeError


def test_a_stub_library_loads_and_its_functions_return_zero(tmp_path: Path) -> None:
    names = [f"aclStub{i}" for i in range(300)]
    blob = shared_object("libascendstub.so", names, platform.machine())
    assert blob == shared_object("libascendstub.so", names, platform.machine())
    path = tmp_path / "any_file_name.so"
    path.write_bytes(blob)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    assert [getattr(library, name)() for name in names] == [0] * 300
    assert not hasattr(library, "aclOther")
    assert ctypes.CDLL("libascendstub.so"), "found by its name once it is loaded"


def test_importing_the_toolchain_leaves_no_trace_on_the_process_or_others() -> None:
    path, switch = list(sys.path), os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    found = ensure_toolchain(print)
    assert (sys.path, os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")) == (path, switch)
    assert found.torch_npu.startswith(TORCH_NPU_VERSION)
    assert ensure_toolchain(print) == found
    clean = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    code = "import torch, importlib.util; print(torch.ones(2).sum().item(), importlib.util.find_spec('torch_npu'))"
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    if found.kind == "stub":
        assert done.stdout.split() == ["2.0", "None"]


def test_stubs_never_enter_a_host_with_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_stub_folder", lambda: None)
    monkeypatch.setattr(toolchain, "has_real_cann", lambda: False)
    monkeypatch.setattr(toolchain, "_has_device", lambda: True)
    with pytest.raises(CannError, match=r"Ascend device \(/dev/davinci\*\) but no usable CANN"):
        ensure_toolchain(print)


def wheel_name() -> str:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"torch_npu-{TORCH_NPU_VERSION}-{tag}-{tag}-linux_{platform.machine()}.whl"


def small_wheel(folder: Path, text: str) -> Path:
    """A wheel of the right name with nothing in it that needs CANN."""
    folder.mkdir()
    path = folder / wheel_name()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch_npu/__init__.py", text)
    return path


def test_install_is_whole_or_absent_and_replaced_only_by_another_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("CANN_EXPORT_CACHE", str(cache))
    lines: list[str] = []
    first = install(small_wheel(tmp_path / "a", "one = 1\n"), lines.append)
    assert first.parent == cache
    assert (first / "site/torch_npu/__init__.py").read_text() == "one = 1\n"
    again = len(lines)
    install(tmp_path / "a" / wheel_name(), lines.append)
    assert len(lines) == again, "nothing to do"

    broken = tmp_path / "b" / wheel_name()
    broken.parent.mkdir()
    broken.write_bytes(b"no zip")
    with pytest.raises(CannError, match="not a zip file"):
        install(broken, lines.append)
    assert (first / "site/torch_npu/__init__.py").read_text() == "one = 1\n"

    install(small_wheel(tmp_path / "c", "two = 2\n"), lines.append)
    assert (first / "site/torch_npu/__init__.py").read_text() == "two = 2\n"
    assert sorted(p.name for p in cache.iterdir()) == [".lock", first.name]

    (cache / ".new-killed").mkdir()
    install(small_wheel(tmp_path / "d", "three = 3\n"), lines.append)
    assert sorted(p.name for p in cache.iterdir()) == [".lock", first.name], "what a killed install left is gone"


def test_a_wheel_for_another_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANN_EXPORT_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "torch_npu-2.1.0-cp38-cp38-linux_aarch64.whl"
    wheel.write_bytes(b"")
    with pytest.raises(CannError, match=r"not a wheel for this host; needed: torch_npu-2\.13\.0-cp3"):
        install(wheel, print)
    with pytest.raises(CannError, match=r"absent\.whl: no such file"):
        install(tmp_path / "absent.whl", print)


@pytest.mark.parametrize(
    ("name", "family", "soc"),
    [
        ("ascend910b", "ascend910b", "Ascend910B3"),
        ("Ascend910B4", "ascend910b", "Ascend910B4"),
        ("ascend910_93", "ascend910_93", "Ascend910_9392"),
        ("ascend950", "ascend950", "Ascend950PR_9599"),
    ],
)
def test_targets_resolve_by_family_and_by_chip(name: str, family: str, soc: str) -> None:
    target = resolve_target(name, "8.3.RC1")
    assert (target.kind, target.family, target.soc, target.cann) == ("ascend", family, soc, "8.3.RC1")


def test_an_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"target: 'ascend310' is not known; allowed: cpu, ascend910b, .*Ascend910B4"):
        resolve_target("ascend310")


@pytest.mark.parametrize(("asked", "fit"), [(1, 128), (16, 128), (129, 256), (300, 384), (1024, 512)])
def test_a_block_size_that_the_attention_op_forbids_is_refused_with_the_one_to_write(asked: int, fit: int) -> None:
    target = resolve_target("ascend910b")
    with pytest.raises(RecipeError, match=rf"block_size: {asked} is not allowed on Ascend910B3 .* block_size: {fit} "):
        check_block_size(target, asked, 128)
    assert round_block_size(asked) == fit
    check_block_size(target, fit, 128)
    check_block_size(target, fit, 64)
    with pytest.raises(RecipeError, match="head_dim 80"):
        check_block_size(target, fit, 80)


def test_dtypes_that_the_attention_op_does_not_take_are_refused() -> None:
    target = resolve_target("ascend910b")
    check_dtypes(target, "bfloat16", "bfloat16")
    with pytest.raises(RecipeError, match="dtype: float32 is not allowed on Ascend910B3; write bfloat16 or float16"):
        check_dtypes(target, "float32", "float32")
    with pytest.raises(RecipeError, match=r"kv_cache\.dtype: int8 is not allowed on Ascend910B3 beside dtype bfloat16"):
        check_dtypes(target, "bfloat16", "int8")


def test_only_head_size_128_is_flat() -> None:
    assert (layout(128), layout(64)) == ("flat", "rectangular")
