"""The recipes that come with the package, against transformers' own classes and the published parameter counts."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cann_export.recipes_dir import recipes_dir
from cann_runtime.recipe import list_recipes, load_recipe, resolve

# Billions of parameters, as the model cards and the technical reports of SmolLM2, Qwen2 and Qwen2.5 give them.
PUBLISHED = {
    "smollm2-135m": (0.1345, 4),
    "qwen2.5-0.5b": (0.49, 2),
    "qwen2.5-1.5b": (1.54, 2),
    "qwen2.5-3b": (3.09, 2),
    "qwen2.5-7b": (7.62, 2),
    "qwen2.5-14b": (14.77, 2),
    "qwen2.5-32b": (32.76, 2),
    "qwen2.5-72b": (72.7, 1),
    "qwen2-7b": (7.62, 2),
    "qwen2-72b": (72.7, 1),
}


def test_every_published_size_has_a_recipe() -> None:
    assert list_recipes(recipes_dir()) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_recipe_builds_the_published_model(name: str) -> None:
    recipe = load_recipe(name, recipes_dir())
    settings = resolve(recipe)
    assert settings.name == name
    config = CONFIG_MAPPING[settings.config["model_type"]](**settings.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    assert type(model).__name__ == settings.config["architectures"][0]
    count, digits = PUBLISHED[name]
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, digits) == count
    assert settings.config["num_attention_heads"] % settings.tp == 0


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_recipe_holds_no_key_that_transformers_does_not_know(name: str) -> None:
    """Config classes take any keyword in silence, so a misspelt key would quietly become a default."""
    config = load_recipe(name, recipes_dir()).model
    known = set(CONFIG_MAPPING[config["model_type"]]().to_dict()) | {"rope_theta", "rope_scaling", "torch_dtype"}
    assert set(config) - known == set()


@pytest.mark.parametrize("name", [name for name in sorted(PUBLISHED) if name.startswith("qwen")])
def test_ascend_recipes_give_at_least_eight_decode_and_three_prefill_graphs(name: str) -> None:
    settings = resolve(load_recipe(name, recipes_dir()))
    assert settings.target == "ascend910b"
    assert len(settings.decode_buckets) >= 8
    assert len(settings.prefill_buckets) >= 3
