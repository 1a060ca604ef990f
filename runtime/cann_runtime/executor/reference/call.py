"""One op as its implementation sees it: inputs and attributes by name, and what it may ask of its surroundings.

It notes what an implementation looks at. An input that is fed or an attribute that differs from its default but was
never looked at makes the result wrong in a way that nobody would see, so it is an error (`check_used`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.comm import Communicator
from cann_runtime.executor.reference.dtypes import ge_dtype
from cann_runtime.executor.reference.graph import Value
from cann_runtime.executor.reference.precision import Precision

NO_EFFECT = frozenset(
    {"fusion", "fusion_id", "is_preprocessed", "tuning_config", "use_locking", "validate_shape", "validate_indices"}
    | {"batch_split_factor", "comm_turn", "comm_alg", "comm_mode", "num_split", "num", "N"}
)
"""Attributes that change how a device computes but not what, and counts that the inputs and outputs show themselves."""


class Call:
    """The inputs (None where not fed), attributes and circumstances of one op's execution."""

    def __init__(
        self,
        source: str,
        inputs: Mapping[str, Tensor | None],
        attrs: Mapping[str, Value],
        given: frozenset[str],
        precision: Precision,
        comm: Communicator,
    ) -> None:
        """given: names of the attributes whose values are not the prototype's defaults."""
        self.source = source
        self.precision = precision
        self.comm = comm
        self._inputs = inputs
        self._attrs = attrs
        self._given = given
        self._used: set[str] = set()

    # Inputs ----------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        """A required input."""
        value = self.get(name)
        if value is None:
            self.refuse(f"input {name} is missing")
        return value

    def get(self, name: str) -> Tensor | None:
        """An optional input."""
        self._used.add(name)
        return self._inputs.get(name)

    def many(self, name: str) -> list[Tensor]:
        """A dynamic input: name0, name1 ..."""
        result: list[Tensor] = []
        while (value := self.get(f"{name}{len(result)}")) is not None:
            result.append(value)
        return result

    def values(self, name: str) -> list[int]:
        """The integers of an input that holds sizes, axes or the like, of any rank."""
        return [int(value) for value in self[name].reshape(-1).tolist()]

    def value(self, name: str) -> int:
        """The one integer of such an input."""
        values = self.values(name)
        if len(values) != 1:
            self.refuse(f"input {name} holds {len(values)} values in place of one")
        return values[0]

    # Attributes ------------------------------------------------------------------------------------------------------

    def attr(self, name: str) -> Any:
        """An attribute's value, its default where the graph does not give it."""
        self._used.add(name)
        return self._attrs[name]

    def integer(self, name: str) -> int:
        value: int = self.attr(name)
        return value

    def number(self, name: str) -> float:
        value: float = self.attr(name)
        return value

    def flag(self, name: str) -> bool:
        value: bool = self.attr(name)
        return value

    def text(self, name: str, allowed: tuple[str, ...] | None = None) -> str:
        """A string; ArtifactError where it is not one of `allowed`."""
        value: str = self.attr(name)
        if allowed is not None and value not in allowed:
            self.refuse(f"attribute {name} is {value!r}; supported: {', '.join(allowed)}")
        return value

    def choice(self, name: str, allowed: tuple[int, ...]) -> int:
        """An integer that stands for one of several meanings; ArtifactError where it is not one of `allowed`."""
        value = self.integer(name)
        if value not in allowed:
            self.refuse(f"attribute {name} is {value}; supported: {', '.join(map(str, allowed))}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value: tuple[int, ...] = self.attr(name)
        return value

    def dtype(self, name: str) -> torch.dtype:
        """A ge::DataType attribute as the dtype that such a tensor has here."""
        return self.precision.held(ge_dtype(self.integer(name), f"{self.source}, attribute {name}"))

    def ignore(self, *names: str) -> None:
        """These inputs or attributes have no effect on this call."""
        self._used.update(names)

    # Computing -------------------------------------------------------------------------------------------------------

    def wide(self, x: Tensor) -> Tensor:
        """x in the format to compute in (float32, float64 where asked for), also from integers."""
        return x.to(self.precision.wide(x.dtype))

    def undefined(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> Tensor:
        """Memory that the device leaves as it is: NaN, or the smallest integer, so that a use of it shows."""
        poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        return torch.full(shape, poison, dtype=dtype)

    def refuse(self, message: str) -> NoReturn:
        """Raise ArtifactError that names this op."""
        raise ArtifactError(f"{self.source}: {message}")

    def check_used(self) -> None:
        """Refuse the op where something that it was given had no part in its result."""
        for name, value in self._inputs.items():
            if value is not None and name not in self._used:
                self.refuse(f"input {name} is not supported here")
        for name in self._given - self._used - NO_EFFECT:
            self.refuse(f"attribute {name} = {self._attrs[name]!r} is not supported here")
