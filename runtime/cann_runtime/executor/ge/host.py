"""What an inference host with an NPU is, and whether an artifact fits it.

Reading the host and comparing it with a manifest happen here, before anything touches the device; loading graphs is in
`npu.py`. torch_npu is imported inside functions only: the rest of the runtime works without it.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cann_runtime.artifact.manifest import Manifest
from cann_runtime.errors import ArtifactError

FAMILY_PREFIXES = (
    ("Ascend910B", "ascend910b"),
    ("Ascend910_93", "ascend910_93"),
    ("Ascend910_95", "ascend950"),  # the name of the 950 chips in CANN 8
    ("Ascend950", "ascend950"),
)
"""SoC names as torch_npu.npu.get_device_name() gives them, and the family whose graphs they run."""


@dataclass(frozen=True)
class Host:
    """One NPU of this host: `soc` as torch_npu names it, versions as they are installed."""

    soc: str
    cann: str
    torch_npu: str


def read_host(device: int = 0) -> Host:
    """Ask torch_npu for the chip and the versions; makes `device` the current one.

    Raises ArtifactError where the host has no torch_npu, no CANN or no such NPU.
    """
    try:
        with _signal_handlers_kept():
            import torch_npu
            import torch_npu.dynamo.torchair  # makes the top-level name `torchair` importable
    except (ImportError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtifactError(
            f"an Ascend artifact runs on a host with CANN and torch_npu, and this host has none ({reason})"
        ) from error
    count = torch_npu.npu.device_count()
    if device >= count:
        raise ArtifactError(f"NPU {device} is asked for, and torch_npu sees {count} on this host")
    torch_npu.npu.set_device(device)
    return Host(
        soc=torch_npu.npu.get_device_name(device),
        cann=torch_npu.npu.utils.get_cann_version("CANN"),
        torch_npu=torch_npu.__version__,
    )


def device_memory(device: int) -> int:
    """Bytes of that NPU's whole memory. Raises ArtifactError where the host has no such NPU."""
    read_host(device)
    import torch_npu

    total: int = torch_npu.npu.mem_get_info(device)[1]
    return total


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """TorchAir's import takes SIGINT and SIGTERM, and its handler then swallows them: Ctrl-C would end nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield  # TorchAir leaves them alone, too
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def soc_family(soc: str) -> str | None:
    """Family of a SoC name ('Ascend910B3' -> 'ascend910b'), or None for a chip that no artifact is made for."""
    return next((family for prefix, family in FAMILY_PREFIXES if soc.startswith(prefix)), None)


def major_minor(version: str) -> tuple[int, int] | None:
    """(8, 5) of '8.5.0' or '8.5.RC1'; None where the text holds no such number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def check_host(manifest: Manifest, host: Host) -> None:
    """Refuse a host that the artifact's graphs were not made for. Raises ArtifactError, one line.

    SoC: the family must be equal, since converters choose ops by family. CANN: major.minor of the host must be equal to
    or newer than the one that the converters were pinned to, since ops and attributes are only ever added. torch_npu:
    major.minor must be equal to that of the export, since its loader is not a public interface.
    """
    target = manifest.target
    if target.kind != "ascend":
        raise ArtifactError(f"{manifest.name} was exported for {target.kind}: it holds no graphs for an NPU")
    family = soc_family(host.soc)
    if family != target.family:
        raise ArtifactError(
            f"this NPU is {host.soc} ({family or 'an unknown family'}), {manifest.name} was exported for "
            f"{target.family}: export again with --target {family or host.soc}"
        )
    have, need = major_minor(host.cann), major_minor(target.cann or "")
    if need is not None and (have is None or have < need):
        raise ArtifactError(
            f"CANN {host.cann or 'of unknown version'} is installed, {manifest.name} needs {need[0]}.{need[1]} or "
            "newer: install it, or export again with --cann set to this version"
        )
    built = manifest.toolchain.get("torch_npu") or manifest.toolchain.get("torch-npu")
    if built is not None and major_minor(built) != major_minor(host.torch_npu):
        raise ArtifactError(
            f"torch_npu {host.torch_npu} is installed, {manifest.name} was exported with {built}: "
            "install that major.minor version, or export again here"
        )
