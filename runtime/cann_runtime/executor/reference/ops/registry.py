"""How an implementation is put under its op type.

Each family of ops has a registry of its own; `ops/__init__.py` merges them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cann_runtime.executor.reference.call import Call

OpFunction = Callable[[Call], Tensor | tuple[Tensor, ...]]
"""Outputs in the prototype's order; one output alone may stand without a tuple."""


def implements(registry: dict[str, OpFunction], *types: str) -> Callable[[OpFunction], OpFunction]:
    """Put a function into `registry` as the implementation of these op types."""

    def add(function: OpFunction) -> OpFunction:
        for kind in types:
            registry[kind] = function
        return function

    return add
