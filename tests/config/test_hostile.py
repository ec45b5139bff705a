"""Whatever is written, loading answers with a recipe or with lines that name places, soon, and nothing else."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.config.fields import fields
from tuner.config.load import Override, load_recipe
from tuner.errors import RecipeError

KEYS = st.sampled_from([key.rpartition(".")[2] for key in fields()] + sorted({key.split(".")[0] for key in fields()}))
SCALARS = st.one_of(
    st.sampled_from(
        ["", "null", "true", "1e-5", "4K", "10%", "5 steps", "never", "auto", "lora", "none", "constant", "''"]
    ),
    st.sampled_from(
        ["*a", "&a b", "!!str x", "[", "]", "{", "|", ">", "%", "@", "`", '"', "'", "- x", "? x", "a: b", "\t", "#"]
    ),
    st.text(max_size=8),
)
LINES = st.builds(lambda depth, key, value: f"{'  ' * depth}{key}: {value}", st.integers(0, 3), KEYS, SCALARS)


def attempt(path: Path, *flags: Override) -> None:
    try:
        loaded = load_recipe(path, flags, path.parent)
    except RecipeError as error:
        assert error.problems
        for line in map(str, error.problems):
            assert line.strip()
            assert "\n" not in line
    else:
        assert loaded.recipe.model.name_or_path


@given(lines=st.lists(LINES | SCALARS, max_size=12))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_answered(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    attempt(path)


@given(data=st.binary(max_size=64))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_answered(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(data)
    attempt(path)


FLAGS = st.builds(
    Override,
    st.one_of(
        st.sampled_from(sorted(fields())),
        st.from_regex(r"[a-z_]{1,6}(\.[a-z_0-9]{1,6}){1,3}", fullmatch=True),
        st.from_regex(r"data\.(train|eval)\.[0-9](\.(path|format|x))?", fullmatch=True),
        st.from_regex(r"model\.config\.[a-z0-9]{1,3}(\.[a-z0-9]{1,3})?", fullmatch=True),
    ),
    st.none() | SCALARS | st.sampled_from(["[1, 2]", "{a: 1}", "[{path: x}]", "{path: x}", "[[1]]"]),
)


@given(flags=st.lists(FLAGS, max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flags_are_answered(flags: list[Override], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {name_or_path: a/b}\ndata: {train: x}\n")
    attempt(path, *flags)


@pytest.mark.parametrize(
    "text",
    [
        "x: " + "[" * 100_000,
        "x: " + "{a: " * 100_000,
        "\n".join(" " * depth + "a:" for depth in range(500)),
        "seed: " + "9" * 100_000,
        "x: [" + "1, " * 100_000 + "]",
        "\n".join(f"k{index}: 1" for index in range(100_000)),
        "seed: 9999^9999\noptimizer: {lr: 1e-99999}",
        "#" * 900_000,
    ],
    ids=["lists", "mappings", "indents", "digits", "values", "keys", "exponents", "comment"],
)
def test_large_input_is_answered_soon(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    started = time.process_time()
    attempt(path)
    assert time.process_time() - started < 5
