"""A pretend Ascend host: the real torch_npu and TorchAir Python, with only the calls that reach a device replaced.

Replaced are the methods of TorchAir's C++ graph object and engine, memory formats, HCCL communicators, the queries for
chip and versions, and moves to an "npu" device (tensors stay in CPU memory and are marked). The replacements take only
what the real ones take. `run` computes the graph that `load` was given, so results can be compared with torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

GE_KEY = re.compile(r"^[A-Za-z0-9_\-]{1,128}$")


class NpuTensor(Tensor):
    """A tensor that says it is on an NPU; `npu_format` is its memory format (2: ND)."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    npu_format = 2

    @property
    def is_npu(self) -> bool:
        return True


class _Device(TorchFunctionMode):
    """Lets calls with an npu device make NpuTensors, and `.cpu()` plain ones."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(Tensor).clone()
        to_npu = isinstance(device := kwargs.get("device"), torch.device) and device.type == "npu"
        if to_npu:
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device) and args[1].type == "npu":
            if isinstance(args[0], NpuTensor):
                return args[0]
            return args[0].clone().as_subclass(NpuTensor)
        result = func(*args, **kwargs)
        return result.as_subclass(NpuTensor) if to_npu else result


@dataclass
class FakeHost:
    """The pretend host, and what was asked of it."""

    soc: str = "Ascend910B3"
    cann: str = "8.5.0"
    devices: int = 8
    stable_names: bool = True
    memory: int = 64 << 30
    engine_options: list[dict[str, str]] = field(default_factory=list)
    loaded: list[dict[str, Any]] = field(default_factory=list)  # bytes, options, hint shapes of every load
    new_groups: list[list[int]] = field(default_factory=list)
    compiled: int = 0  # compilations that GE's cache did not save
    casts: list[tuple[list[int], int]] = field(default_factory=list)


def _arity(method: Any) -> int:
    """Number of arguments of a pybind11 method besides self, from its generated signature."""
    return len(re.findall(r"\barg\d+:", method.__doc__))


@contextmanager
def fake_host(host: FakeHost) -> Iterator[FakeHost]:
    """Replace the device under torch_npu and TorchAir, which must be imported already."""
    import torch_npu
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL
    from torchair.core import _backend, _torchair

    base = _torchair.TorchNpuGraphBase
    assert (_arity(base.load), _arity(base.compile), _arity(base.run)) == (5, 0, 1)
    assert (_arity(base.set_hint_shape), _arity(_torchair.InitializeGraphEngine)) == (2, 1)
    graphs: dict[int, dict[str, Any]] = {}

    def initialize(options: Mapping[str, str]) -> None:
        _check_options(options)
        host.engine_options.append(dict(options))

    def load(
        self: Any, graph: bytes, options: Mapping[str, str], places: Sequence[int], dtypes: Sequence[int], executor: int
    ) -> None:
        assert isinstance(graph, bytes)
        assert executor == 1, "TorchAir's NPU executor"
        assert host.engine_options, "the engine must be initialized before a graph is loaded"
        _check_options(options)
        graphs[id(self)] = {"graph": graph, "options": dict(options), "places": list(places), "outputs": len(dtypes)}
        host.loaded.append(graphs[id(self)])

    def set_hint_shape(self: Any, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        graphs[id(self)]["hint"] = ([list(shape) for shape in inputs], [list(shape) for shape in outputs])

    def compile_graph(self: Any) -> None:
        options = graphs[id(self)]["options"]
        if "ge.graph_compiler_cache_dir" in options and _found_in_cache(options):
            return
        host.compiled += 1

    def run(self: Any, call: tuple[list[Tensor], list[Tensor | None], Any]) -> list[Tensor]:
        inputs, assigned, stream = call
        loaded = graphs[id(self)]
        for tensor, place in zip(inputs, loaded["places"], strict=True):
            assert isinstance(tensor, NpuTensor) == (place == 1), "an input is in the wrong memory"
        assert stream is None
        assert len(assigned) in (0, loaded["outputs"])
        return evaluate(loaded["graph"], inputs)

    def format_cast(tensor: Tensor, acl_format: int) -> Tensor:
        assert tensor.is_npu
        host.casts.append((list(tensor.shape), acl_format))
        cast = tensor.clone().as_subclass(NpuTensor)
        cast.npu_format = acl_format
        return cast

    def new_group(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        assert kwargs == {"backend": "hccl"}
        host.new_groups.append(list(ranks))
        backend = create_autospec(ProcessGroupHCCL, instance=True)
        name = [f"random_{len(host.new_groups)}"]
        backend._set_hccl_comm_name.side_effect = lambda text: name.__setitem__(0, text)
        backend.get_hccl_comm_name.side_effect = lambda rank, *, init_comm: name[0]
        group = create_autospec(dist.ProcessGroup, instance=True)
        group._get_backend.side_effect = lambda device: backend if device == torch.device("npu") else None
        return group

    replaced: list[tuple[Any, str, Any]] = [
        (base, "load", load),
        (base, "set_hint_shape", set_hint_shape),
        (base, "compile", compile_graph),
        (base, "run", run),
        (_torchair, "InitializeGraphEngine", initialize),
        (_backend, "_GLOBAL_COMPILE_OPTION", None),  # the engine starts once per process, so once per pretend host
        (_backend, "_cached_device_id", 0),
        (torch_npu, "npu_format_cast", create_autospec(torch_npu.npu_format_cast, side_effect=format_cast)),
        (torch_npu, "get_npu_format", lambda tensor: tensor.npu_format),
        (torch_npu._C, "_npu_setOption", lambda option: None),
        (torch_npu.npu, "device_count", create_autospec(torch_npu.npu.device_count, side_effect=lambda: host.devices)),
        (torch_npu.npu, "set_device", create_autospec(torch_npu.npu.set_device)),
        (
            torch_npu.npu,
            "get_device_name",
            create_autospec(torch_npu.npu.get_device_name, side_effect=lambda device: host.soc),
        ),
        (
            torch_npu.npu,
            "mem_get_info",
            create_autospec(torch_npu.npu.mem_get_info, side_effect=lambda device: (host.memory // 2, host.memory)),
        ),
        (torch_npu._C, "_get_cann_version", lambda module: host.cann),
        (torch_npu.npu.utils, "_is_gte_cann_version", lambda version, module="CANN": True),
        (torch_npu.npu, "_get_deterministic_level", lambda: 0),
        (torch_npu.distributed, "_is_support_hccl_comm_name", lambda: host.stable_names),
        (dist, "new_group", create_autospec(dist.new_group, side_effect=new_group)),
        (dist, "is_initialized", lambda: True),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_Device())
        yield host


def _check_options(options: Mapping[str, str]) -> None:
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in options.items())


def _found_in_cache(options: Mapping[str, str]) -> bool:
    """GE's cache (its model_cache.cc): the folder must exist, a lock file is made, entries are the owner's alone."""
    folder, key = Path(options["ge.graph_compiler_cache_dir"]), options["ge.graph_key"]
    assert folder.is_dir(), "GE refuses to compile where the cache folder does not exist"
    assert GE_KEY.match(key)
    (folder / f"{key}.lock").touch(0o600)
    if (folder / f"{key}.idx").exists():
        return (folder / f"{key}_20260101000000.om").exists()
    for name in (f"{key}.idx", f"{key}_20260101000000.om"):
        (folder / name).touch(0o600)
    return False


_TORCH_DTYPES = {"DT_INT32": torch.int32, "DT_INT64": torch.int64, "DT_BF16": torch.bfloat16, "DT_FLOAT": torch.float32}


def _constant(tensor: Any) -> Tensor:
    desc = tensor.desc
    name = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number[desc.dtype].name
    return torch.frombuffer(bytearray(tensor.data), dtype=_TORCH_DTYPES[name]).view(list(desc.shape.dim))


def evaluate(serialized: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute a serialized ModelDef of the few ops that the toy graph holds; KV caches are written in place.

    A collective over communicator `cann_tp_0` sums two ranks that hold the same.
    """
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    model = ModelDef()
    model.ParseFromString(serialized)
    values: dict[str, list[Tensor]] = {}
    pending = list(model.graph[0].op)
    outputs: list[Tensor] = []
    while pending:
        ready = [op for op in pending if all(edge.rsplit(":", 1)[0] in values for edge in op.input if edge)]
        assert ready, f"unknown inputs of {pending[0]}"
        for op in ready:
            x = [values[edge.rsplit(":", 1)[0]][int(edge.rsplit(":", 1)[1])] for edge in op.input if edge]
            if op.type == "Data":
                declared = list(op.output_desc[0].shape.dim) or list(op.output_desc[0].attr["origin_shape"].list.i)
                assert declared == list(inputs[op.attr["index"].i].shape), f"{op.name}: {declared}"
                result = [inputs[op.attr["index"].i].as_subclass(Tensor)]
            elif op.type == "Const":
                result = [_constant(op.attr["value"].t)]
            elif op.type == "GatherV2":
                result = [x[0].index_select(int(x[2]), x[1].long())]
            elif op.type == "RmsNorm":
                x32 = x[0].float()
                scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + op.attr["epsilon"].f)
                result = [(x32 * scale).to(x[0].dtype) * x[1], scale]
            elif op.type == "MatMul":
                assert not op.attr["transpose_x1"].b
                result = [x[0] @ (x[1].T if op.attr["transpose_x2"].b else x[1])]
            elif op.type == "SplitV":
                rest = x[0].shape[int(x[2])] - sum(size for size in x[1].tolist() if size >= 0)
                result = list(x[0].split([rest if size < 0 else size for size in x[1].tolist()], int(x[2])))
            elif op.type == "Pack":
                result = [torch.stack(x, op.attr["axis"].i)]
            elif op.type == "Cast":
                result = [x[0].to({3: torch.int32, 9: torch.int64}[op.attr["dst_type"].i])]
            elif op.type == "Reshape":
                result = [x[0].reshape(x[1].tolist())]
            elif op.type == "Identity":
                result = [x[0]]
            elif op.type == "HcomAllReduce":
                assert op.attr["group"].s == b"cann_tp_0", "the communicator is not bound"
                result = [x[0] * 2]
            elif op.type == "ScatterPaKvCache":
                key, k_cache, slots, value, v_cache = x
                k_cache.flatten(0, 1)[slots.long()] = key
                v_cache.flatten(0, 1)[slots.long()] = value
                result = [k_cache, v_cache]
            elif op.type == "Add":
                result = [x[0] + x[1]]
            elif op.type == "NetOutput":
                outputs = result = x
            else:
                raise AssertionError(f"the toy evaluator has no {op.type}")
            values[op.name] = result
        pending = [op for op in pending if op.name not in values]
    return outputs
