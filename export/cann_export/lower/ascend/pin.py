"""Makes TorchAir's converters see a given chip, CANN version and logical process groups, whatever this host is.

The converters ask the local device for its name and CANN for its version, and write the local communicator's name into
collectives. Offline there is none of these, and on a host with an NPU they would make the graph depend on the host. All
patches are undone on leaving the context.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from cann_runtime.errors import RecipeError

GROUPS = ("tp", "ep", "world")
"""Logical names of process groups; the runtime binds them to communicators at load."""


@contextmanager
def pinned_target(soc: str, cann: str) -> Iterator[None]:
    """Run conversions as if on chip `soc` (e.g. Ascend910B3) with CANN `cann` (e.g. 8.5.0 or 8.3.RC1)."""
    import torch.distributed
    import torch.distributed.distributed_c10d as c10d
    import torch_npu
    import torchair._ge_concrete_graph.compat_ir as compat_ir
    import torchair._ge_concrete_graph.fx2ge_converter as fx2ge
    from torchair._ge_concrete_graph import hcom_utils

    converters = "torchair._ge_concrete_graph.ge_converter.c10d_functional.c10d_functional"
    collectives = importlib.import_module(converters)
    have = cann_version(cann)

    def is_at_least(version: str, module: str = "CANN") -> bool:
        return have >= cann_version(version)

    def group_name(tag: str, rank_list: list[int], group_size: int) -> str:
        if tag not in GROUPS:
            raise ValueError(f"process group {tag!r}: collectives must name one of {', '.join(GROUPS)}")
        return tag

    replaced: list[tuple[Any, str, Any]] = [
        (fx2ge, "initialize_graph_engine", lambda *args, **kwargs: None),
        (compat_ir, "is_cann_compat", lambda *args, **kwargs: ""),
        (torch_npu.npu, "get_device_name", lambda *args, **kwargs: soc),
        (torch_npu.npu.utils, "_is_gte_cann_version", is_at_least),
        (torch_npu.npu, "_get_deterministic_level", lambda *args, **kwargs: 0),
        # A logical name resolves to itself: no process group is needed, and no rank can leak into the graph.
        (c10d, "_resolve_process_group", lambda name: name),
        (c10d, "_get_group_tag", lambda name: name),
        (torch.distributed, "get_process_group_ranks", lambda name: []),
        (collectives, "get_group_name_and_record", group_name),
        (hcom_utils, "get_group_name_and_record", group_name),
        (fx2ge, "record_pg_to_graph", lambda graph: None),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def cann_version(text: str) -> tuple[int, int, int, int]:
    """An order of CANN versions: 8.2.RC1 < 8.2.RC2 < 8.2.0 < 8.2.1. Raises RecipeError where the text is none."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.(?:RC(\d+)|(\d+))(?:\..*)?)?", text)
    if match is None:
        raise RecipeError(f"cann: {text!r} is no CANN version; write it like 8.5.0 or 8.3.RC1")
    major, minor, candidate, patch_level = match.groups()
    return int(major), int(minor), 0 if candidate else 1, int(candidate or patch_level or 0)
