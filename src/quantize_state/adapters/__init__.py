"""Adapters to Hugging Face models: ``attach`` gives a model's recurrent states a policy, and takes it back.

transformers' SSM layers look up two module-level functions by name, one for a chunk of tokens and one for a single
token. While a model is attached these two are swapped; a pre-hook on each layer says which layer is running, so that
each has its own policy and other models of the same class are untouched. No model code is copied.
"""

from .attached import Attached, attach
from .auto import export_recipe, required_recipe, resolve_recipe
from .layer import AttachedLayer, Observer
from .models import SsmLayer, cache_argument, find_layers, supported_model_types

__all__ = [
    "Attached",
    "AttachedLayer",
    "Observer",
    "SsmLayer",
    "attach",
    "cache_argument",
    "export_recipe",
    "find_layers",
    "required_recipe",
    "resolve_recipe",
    "supported_model_types",
]
