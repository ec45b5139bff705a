"""What is unclear about `model.init_from` is refused, by headers alone, with what to write in its place; and what
globs of names mean.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fixtures.tables import cases
from tests.init_from.built import LORA, built, planned_for, recipe_of, rewrite, write_family, write_peft
from tuner.config.load import load_recipe
from tuner.errors import DataError, RecipeError
from tuner.init_from.match import brief, fits, nearest, renamed
from tuner.init_from.sources import open_source

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_peft(base, base.parent / "adapter")[0]


def refusal(base: Path, *entries: Any, **sections: Any) -> str:
    """What the check before a device is used says, and its hint."""
    recipe = recipe_of(base, *entries, **sections)
    with pytest.raises(RecipeError) as caught:
        planned_for(recipe)
    return f"{caught.value.message} -> {caught.value.hint}"


@pytest.mark.parametrize(("keys", "said"), cases(__file__, "keys_that_do_not_fit"))
def test_keys_that_do_not_fit(base: Path, other: Path, keys: dict[str, Any], said: str | None) -> None:
    entry = {"path": str(other), **keys}
    if said is None:  # a word for adapters says nothing of a whole model
        built(recipe_of(base, entry))
    else:
        assert re.search(said, refusal(base, entry)), refusal(base, entry)


@given(st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mistyped_name_is_refused_with_the_right_one(base: Path, other: Path, data: Any) -> None:
    names = sorted(load_file(other / "model.safetensors"))
    name = data.draw(st.sampled_from(names))
    at = data.draw(st.integers(0, len(name) - 1).filter(lambda at: name[at] not in ".0123456789"))
    wrong = name[:at] + data.draw(st.sampled_from(["", name[at] * 2, "x"])) + name[at + 1 :]
    said = refusal(base, {"path": str(other), "rename": {name: wrong}})
    assert name in said.partition("nearest here are ")[2].partition(": rename")[0], said


def test_every_problem_is_shown_at_once(base: Path, other: Path) -> None:
    said = refusal(base, {"path": str(other), "load": ["mpl"]}, {"path": str(other), "exclude": ["nrm"]})
    assert said.startswith("model.init_from: 2 problems") and "0.load" in said and "1.exclude" in said


def test_a_tensor_without_a_place_may_be_left_out(base: Path, other: Path, tmp_path: Path) -> None:
    more = rewrite(other, tmp_path / "more", lambda name: name.replace("lm_head", "extra_head"))
    assert "extra_head.weight of" in refusal(base, str(more))
    model = built(recipe_of(base, {"path": str(more), "strict": False}))
    assert model.facts.given is not None
    assert "without a place here (unexpected): 1\n    extra_head.weight" in model.facts.given["report"]
    assert "missing there: 1\n    lm_head.weight" in model.facts.given["report"]


def test_a_model_that_lacks_a_weight_is_not_taken_whole(base: Path, other: Path, tmp_path: Path) -> None:
    less = rewrite(other, tmp_path / "less", lambda name: None if name == "lm_head.weight" else name)
    assert "has nothing for lm_head.weight" in refusal(base, str(less))
    built(recipe_of(base, {"path": str(less), "load": ["model"]}))


def test_a_smaller_vocabulary_must_be_asked_for(base: Path, other: Path, tmp_path: Path) -> None:
    large = write_family(tmp_path / "large", vocabulary=101)
    said = refusal(large, str(other))
    assert "is [97, 32], model.embed_tokens.weight here is [101, 32]" in said
    assert "grow: true to fill the first 97" in said
    smaller = refusal(base, {"path": str(large), "grow": True})
    assert "is [101, 32], model.embed_tokens.weight here is [97, 32]" in smaller and "grow" not in smaller


def test_two_weights_of_an_untied_model_are_not_one(tmp_path: Path) -> None:
    tied, untied = write_family(tmp_path / "tied", tied=True), write_family(tmp_path / "untied", seed=2)
    assert "model.embed_tokens.weight, lm_head.weight of" in refusal(tied, str(untied))


def test_a_quantised_base_keeps_its_weights(base: Path, other: Path, adapter: Path) -> None:
    sections: dict[str, Any] = {"adapter": LORA, "model": {"quantize": "nf4"}}
    entry = {"path": str(other), "load": ["self_attn"]}
    assert "is quantised as it is read (model.quantize)" in refusal(base, entry, **sections)
    assert "is quantised as it is read" in refusal(base, {"path": str(adapter), "adapter": "merge"}, **sections)
    built(recipe_of(base, {"path": str(other), "load": ["norm"]}, **sections))


@pytest.mark.parametrize(("section", "said"), cases(__file__, "an_adapter_that_is_not_this_runs"))
def test_an_adapter_that_is_not_this_runs(base: Path, adapter: Path, section: dict[str, Any], said: str | None) -> None:
    if said is None:
        assert "keeps an adapter, and the recipe has none" in refusal(base, {"path": str(adapter), "adapter": "keep"})
    else:
        found = refusal(base, str(adapter), adapter=section).replace("\n", " ")
        assert re.search(said, found), found


def damaged(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x00" * 64)


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def coded(directory: Path) -> None:
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace("{", '{"quantization_config": {"bits": 4},', 1))


def of_integers(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({name: (10 * tensor).int() for name, tensor in tensors.items()}, directory / "model.safetensors")


def no_model(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("harm", "kind", "said"),
    [
        (damaged, DataError, r"model\.init_from\.0\.path: .*model\.safetensors: "),
        (pickled, DataError, r"holds no model\.safetensors"),
        (coded, RecipeError, "codes of a quantised model"),
        (of_integers, RecipeError, "has the type I32, which weights do not have"),
        (no_model, RecipeError, r"\.0\.path: .* neither a run, a checkpoint nor a Hugging Face directory"),
    ],
)
def test_places_without_weights(
    base: Path, other: Path, tmp_path: Path, harm: Callable[[Path], None], kind: type[Exception], said: str
) -> None:
    copy = rewrite(other, tmp_path / "copy")
    harm(copy)
    recipe = recipe_of(base, str(copy))
    with pytest.raises(kind, match=said):
        planned_for(recipe)


@pytest.mark.parametrize(("change", "said"), cases(__file__, "other_adapters"))
def test_other_adapters(adapter: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    import json

    (tmp_path / "adapter_config.json").write_text(
        json.dumps(json.loads((adapter / "adapter_config.json").read_text()) | change)
    )
    with pytest.raises(RecipeError, match=said):
        open_source(tmp_path, hashes=False)


@pytest.mark.parametrize(("value", "said"), cases(__file__, "a_recipe_that_cannot_be_meant"))
def test_a_recipe_that_cannot_be_meant(value: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe({"model": {"name_or_path": "m", "init_from": [value]}, "data": {"train": "r.jsonl"}})


PARTS = st.lists(st.text("abc_", min_size=1, max_size=4), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(("pattern", "name", "is_meant"), cases(__file__, "a_glob_means_names"))
def test_a_glob_means_names(pattern: str, name: str, is_meant: bool) -> None:
    assert fits(pattern, name) is is_meant


@pytest.mark.parametrize(("name", "wanted"), cases(__file__, "a_name_becomes_another"))
def test_a_name_becomes_another(name: str, wanted: str) -> None:
    table = {"transformer.h.*.attn.**": "model.layers.{1}.self_attn.{2}", "transformer.h.*.*.*": "norms/{1}/{3}"}
    assert renamed(name, table) == wanted


@given(PARTS, PARTS)
@settings(max_examples=30)
def test_two_wildcards_take_a_name_apart_and_put_it_together(front: str, back: str) -> None:
    assert renamed(f"{front}.mid.{back}", {"**.mid.**": "{2}.mid.{1}"}) == f"{back}.mid.{front}"


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a.weight", "b.weight"])), min_size=1, unique=True))
@settings(max_examples=30)
def test_few_lines_hold_every_number(names: list[tuple[int, str]]) -> None:
    lines = brief([f"layers.{number}.{end}" for number, end in names])
    assert len(lines) == len({end for _, end in names})
    for line, end in zip(lines, dict.fromkeys(end for _, end in names), strict=True):
        numbers = sorted({number for number, other in names if other == end})
        shown = re.fullmatch(rf"layers\.(\{{(.*)\}}|\d+)\.{re.escape(end)}", line)
        assert shown is not None
        assert str(numbers[0]) in shown[1]


def test_few_lines_say_what_is_not_all_there() -> None:
    assert brief(["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w"]) == ["l.*.e.*.w (3 of them)"]
    assert brief(["l.0.e.0.w", "l.0.e.1.w"]) == ["l.0.e.{0-1}.w"]
    assert brief(["norm.weight"]) == ["norm.weight"]


def test_the_nearest_come_first() -> None:
    known = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    assert nearest("model.layers.1.mlp.upproj.weight", known)[0] == known[1]
    assert nearest("qqqqqqq", known) == []


def test_those_that_are_as_near_as_the_third_are_named_too() -> None:
    layers = [f"model.layers.1.self_attn.{one}_proj.weight" for one in ("q", "k", "v", "o")]
    known = [*layers, "model.layers.1.mlp.up_proj.weight"]
    assert set(nearest("model.layers.1.self_attn._proj.weight", known)) == {*layers}
    assert len(nearest("proj.weight", [f"{letter}_proj.weight" for letter in "abcdefgh"])) == 6
