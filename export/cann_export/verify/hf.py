"""The reference: transformers' own model in float64, and in the artifact's dtype to see how far plain eager is from it.

A module has its weights only while it runs, so that models larger than the memory in float64 can be run.

Shape letters: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cann_export.model import causal_lm_class, make_config
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.errors import UnsupportedModelError

Watch = Callable[[str, Tensor], None]
"""Called with a linear module's path and its output [T, columns]."""

_KEEP = 3 << 30  # bytes of weights that stay in memory between uses


class EagerModel:
    """transformers' causal language model of a config, eager attention, weights from `reader` in `dtype`.

    names: parameter -> tensor of the reader, as the weight plan resolves them.
    """

    def __init__(
        self, config: dict[str, Any], reader: CheckpointReader, names: dict[str, str], dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        hf_config = make_config(config)
        hf_config._attn_implementation = "eager"
        with torch.device("meta"):
            self.model: Any = causal_lm_class(hf_config)(hf_config).to(dtype)
        self.model.eval().requires_grad_(False)
        self._reader, self._names = reader, names
        first: dict[int, str] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            first.setdefault(id(param), name)
        total = sum(p.numel() for p in self.model.parameters()) * dtype.itemsize
        self._kept: dict[str, Tensor] | None = {} if total <= _KEEP else None
        for path, module in list(self.model.named_modules()):
            if hasattr(module, "inv_freq") and hasattr(module, "rope_type"):
                parent, _, leaf = path.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, type(module)(hf_config))
                continue
            own = {leaf: first[id(p)] for leaf, p in module._parameters.items() if p is not None}
            if own:
                self._load_when_run(module, own)
        left = [name for name, buffer in self.model.named_buffers() if buffer.is_meta]
        if left:
            raise UnsupportedModelError(f"{type(self.model).__name__}: buffer {left[0]} cannot be made without weights")

    def _load_when_run(self, module: nn.Module, own: dict[str, str]) -> None:
        empty = dict(module._parameters)

        def load(module: nn.Module, args: Any) -> None:
            for leaf, name in own.items():
                module._parameters[leaf] = nn.Parameter(self._weight(name), requires_grad=False)

        def unload(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters.update(empty)

        module.register_forward_pre_hook(load)
        module.register_forward_hook(unload)

    def _weight(self, name: str) -> Tensor:
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        tensor = self._reader.narrow(self._names[name]).to(self.dtype).contiguous()
        if self._kept is not None:
            self._kept[name] = tensor
        return tensor

    def logits(self, text: list[int], positions: list[int], watch: Watch | None = None) -> Tensor:
        """Logits [len(positions), V] at those positions of a text, in float64."""
        handles = []
        if watch is not None:
            for path, module in self.model.named_modules():
                if isinstance(module, nn.Linear):
                    handles.append(module.register_forward_hook(_watcher(watch, path)))
        try:
            with torch.no_grad():
                out = self.model(
                    input_ids=torch.tensor([text]), logits_to_keep=torch.tensor(positions), use_cache=False
                )
        finally:
            for handle in handles:
                handle.remove()
        logits: Tensor = out.logits[0].double()
        return logits


def _watcher(watch: Watch, path: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        watch(path, output[0].double())

    return hook
