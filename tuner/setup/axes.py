"""Which sizes of the parallel axes a model can have, found from its config before any of its weights is loaded."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from tuner.config.recipe import ParallelSection
from tuner.errors import RecipeError
from tuner.model.flops import n_experts
from tuner.parallel.expert import check_spread
from tuner.parallel.sequence import check_cut
from tuner.parallel.tensor.plan import check_split

LARGEST = 64
"""Up to which sizes are listed and searched."""


def check_axes(model: PreTrainedModel, parallel: ParallelSection) -> None:
    """Check the sizes of a recipe's axes against a model, which may lie on the meta device.

    Raises RecipeError, with the sizes that are possible, where the model cannot be split so.
    """
    for axis, check in _CHECKS.items():
        size, within = getattr(parallel, axis), parallel.tensor if axis == "sequence" else 1
        if size == 1:
            continue
        if (wrong := problem(axis, model.config, size, within)) is not None:
            sizes = ", ".join(map(str, possible_sizes(axis, model.config, within)))
            hint = f"sizes that are possible for this model: {sizes}"
            raise RecipeError(f"parallel.{axis}: {size} {wrong}", hint=hint)
        check(model, size)


def possible_sizes(axis: str, config: PretrainedConfig, within: int = 1) -> tuple[int, ...]:
    """The sizes that an axis may have for a model, 1 among them; ``within`` tensor groups for rows that are cut."""
    sizes = range(1, LARGEST + 1)
    return tuple(size for size in sizes if size == 1 or problem(axis, config, size, within) is None)


def problem(axis: str, config: PretrainedConfig, size: int, within: int = 1) -> str | None:
    """Why a model's numbers do not divide into so many parts; None where they do.

    ``within`` is the size of the tensor groups that have its heads between them already. Processes of a tensor group
    have whole key heads each, or several of them the same one; over the processes of a sequence group they are repeated
    until they divide.
    """
    text = config.get_text_config()
    if axis == "expert":
        if not (experts := n_experts(text)):
            return f"divides experts, and {text.model_type} has none"
        return None if experts % size == 0 else f"does not divide the {experts} experts of a layer"
    heads, key_heads = _heads(text)
    if not heads:
        return f"divides heads, and the config of {text.model_type} does not say how many it has"
    if heads % (size * within):
        times = f"times parallel.tensor: {within} " if within > 1 else ""
        return f"{times}does not divide the {heads} heads"
    return None if axis == "sequence" else _problem_of_layers(text, key_heads, size)


def _problem_of_layers(config: PretrainedConfig, key_heads: int, size: int) -> str | None:
    """Why key heads or MLPs do not divide over a tensor group; None where they do."""
    if key_heads % size and size % key_heads:
        return f"neither divides the {key_heads} key heads, nor is a multiple of them"
    width = next((width for width in _widths(config) if width % size), None)
    return None if width is None else f"does not divide the width of the MLP, {width:,}"


def _heads(config: PretrainedConfig) -> tuple[int, int]:
    """Heads of queries, and of keys and values; 0 where the config does not say."""
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def _widths(config: PretrainedConfig) -> tuple[int, ...]:
    """Widths of the MLPs that are split, one for all layers or one for each; routed experts stay whole."""
    width: Any = getattr(config, "intermediate_size", None)
    if width is None or n_experts(config):
        return ()
    return tuple(sorted(set(width))) if isinstance(width, list | tuple) else (int(width),)


_CHECKS: Mapping[str, Callable[[PreTrainedModel, int], None]] = {
    "tensor": check_split, "sequence": check_cut, "expert": check_spread
}
"""What is checked of a model for each axis besides its numbers."""
