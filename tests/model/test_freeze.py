"""Names and globs: what they mean, and what is said when they mean nothing."""

import pytest

from tuner.errors import RecipeError
from tuner.model.freeze import select

NAMES = [
    f"model.layers.{i}.{part}" for i in (0, 1, 10) for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["q_proj"], ["0.self_attn.q_proj", "1.self_attn.q_proj", "10.self_attn.q_proj"]),
        (["layers.1"], ["1.self_attn.q_proj", "1.self_attn.o_proj", "1.mlp.up_proj"]),
        (["model.layers.1*.self_attn.*_proj"], [f"{i}.self_attn.{p}_proj" for i in (1, 10) for p in "qo"]),
        (["self_attn.o*", "1.mlp"], ["0.self_attn.o_proj", "1.self_attn.o_proj", "1.mlp.up_proj",
                                     "10.self_attn.o_proj"]),
        (["model.layers.[01].mlp"], ["0.mlp.up_proj", "1.mlp.up_proj"]),
        ([], []),
    ],
)  # fmt: skip
def test_what_a_pattern_means(patterns: list[str], found: list[str]) -> None:
    assert select(patterns, NAMES, "key") == [f"model.layers.{name}" for name in found]


@pytest.mark.parametrize("pattern", ["proj", "layers.2", "ayers.1", "q_proj.weight", "Q_proj", ""])
def test_part_of_a_component_is_no_match(pattern: str) -> None:
    with pytest.raises(RecipeError, match="matches nothing"):
        select([pattern], NAMES, "key")


def test_a_pattern_that_means_nothing_is_answered_with_near_names() -> None:
    with pytest.raises(RecipeError, match="adapter.target_modules: 'q_porj'") as caught:
        select(["up_proj", "q_porj"], NAMES, "adapter.target_modules")
    assert caught.value.hint is not None
    assert "q_proj" in caught.value.hint
    with pytest.raises(RecipeError) as caught:
        select(["xyz"], NAMES, "key")
    assert caught.value.hint is not None
    assert NAMES[0] in caught.value.hint
