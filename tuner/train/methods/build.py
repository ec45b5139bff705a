"""From the recipe's section to the method."""

from importlib import import_module

from tuner.config import recipe
from tuner.train.methods.method import Method


def build_method(section: recipe.Method) -> Method:
    """The method of a section: what ``build`` of the file named as its kind makes of it.

    Raises PluginError for code of the user's own that is not there or fails.
    """
    method: Method = import_module(f"tuner.train.methods.{section.kind}").build(section)
    return method
