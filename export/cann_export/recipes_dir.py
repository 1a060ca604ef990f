"""Where the recipes that come with the package are.

The repository keeps them in its top-level `recipes/`; `cann_export/recipes` is a link to it, which a wheel holds as a
plain folder. What is in them is in `cann_runtime.recipe`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def recipes_dir() -> Path:
    """The folder of the packaged recipes, in a checkout, an editable install and a wheel alike."""
    return Path(str(files("cann_export") / "recipes"))
