"""One GE op of the reference executor by itself, with the defaults of its prototype; for tests only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.comm import Alone, Communicator
from cann_runtime.executor.reference.ops import OPS
from cann_runtime.executor.reference.precision import Precision
from cann_runtime.executor.reference.prototype import prototypes


def run_op(
    kind: str,
    inputs: dict[str, Tensor],
    attrs: dict[str, Any] | None = None,
    *,
    mode: str = "exact64",
    family: str = "ascend910b",
    comm: Communicator | None = None,
) -> tuple[Tensor, ...]:
    """The op's outputs. Inputs are held as the mode holds them: the caller's own are written in mode npu only."""
    precision, prototype = Precision.of(mode, family), prototypes()[kind]
    values = {name: proto.default for name, proto in prototype.attrs.items()} | (attrs or {})
    assert None not in values.values(), f"attributes of {kind}: {values}"
    assert values.keys() == prototype.attrs.keys(), f"attributes of {kind}: {values}"
    given = frozenset(name for name, value in values.items() if value != prototype.attrs[name].default)
    held = {name: value.to(precision.held(value.dtype)) for name, value in inputs.items()}
    call = Call(kind, held, values, given, precision, comm or Alone())
    result = OPS[kind](call)
    call.check_used()
    return result if isinstance(result, tuple) else (result,)
