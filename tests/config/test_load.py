"""Loading: paths, names, origins, rules, flags, writing back; sections of methods; and whatever else is written."""

import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner import load_recipe as public_load
from tuner.config.fields import fields, recipe_schema
from tuner.config.load import LoadedRecipe, Override, load_recipe, recipe_dict, recipe_yaml
from tuner.config.methods import DpoMethod, Method
from tuner.config.paths import recipes_dir
from tuner.config.shipped import shipped_recipes
from tuner.errors import RecipeError

MINIMAL: dict[str, Any] = {"model": {"name_or_path": "owner/name"}, "data": {"train": "rows.jsonl"}}


def written(tmp_path: Path, text: str, *flags: tuple[str, str]) -> LoadedRecipe:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "my recipe.yaml").write_text(text)
    return load_recipe(home / "my recipe.yaml", [Override(*flag) for flag in flags], tmp_path)


def refused(tmp_path: Path, text: str, *flags: tuple[str, str]) -> str:
    with pytest.raises(RecipeError) as caught:
        written(tmp_path, text, *flags)
    assert len(caught.value.problems) == 1, caught.value.problems
    return str(caught.value.problems[0])


SHORT = "model: {name_or_path: owner/name}\ndata: {train: rows.jsonl}\n"


def test_a_minimal_recipe_has_every_default(tmp_path: Path) -> None:
    loaded = written(tmp_path, SHORT)
    recipe = loaded.recipe
    assert (recipe.name, recipe.seed, recipe.adapter.kind, recipe.schedule.kind) == ("my-recipe", 42, "none", "cosine")
    assert recipe.model.name_or_path == "owner/name"
    assert recipe.data.train[0].path == str(tmp_path / "home" / "rows.jsonl")
    assert recipe.output_dir == str(tmp_path / "runs" / "my-recipe")
    assert loaded.path == tmp_path / "home" / "my recipe.yaml"
    assert loaded.text == SHORT


def test_yaml_1_2_scalars(tmp_path: Path) -> None:
    text = SHORT + "optimizer: {lr: 1e-5}\nname: no\ntrain: {max_grad_norm: never, stop_after: 3h}\n"
    recipe = written(tmp_path, text).recipe
    assert recipe.optimizer.lr == 1e-5
    assert recipe.name == "no"
    assert recipe.train.max_grad_norm is None
    assert str(recipe.train.stop_after) == "3 h"


def test_relative_paths_start_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    monkeypatch.setenv("ROWS", "/big/rows")
    text = "model: {name_or_path: ./base}\ndata: {train: ['~/a.jsonl', {path: '${ROWS}/b.jsonl'}, ../c.jsonl]}\n"
    recipe = written(tmp_path, text, ("data.eval", "held.jsonl"), ("output_dir", "out/{name}")).recipe
    assert recipe.model.name_or_path == str(tmp_path / "home" / "base")
    assert [source.path for source in recipe.data.train] == [
        "/home/ana/a.jsonl",
        "/big/rows/b.jsonl",
        str(tmp_path / "c.jsonl"),
    ]
    assert isinstance(recipe.data.eval, tuple)
    assert recipe.data.eval[0].path == str(tmp_path / "held.jsonl")
    assert recipe.output_dir == str(tmp_path / "out" / "my-recipe")


@pytest.mark.parametrize(("row", "kept"), cases(__file__, "stdin_and_hub_data_sets_are_no_paths"))
def test_stdin_and_hub_data_sets_are_no_paths(row: str, kept: bool, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "here").mkdir(parents=True)
    (home / "odd:train").write_text("")
    recipe = written(tmp_path, f"model: {{name_or_path: a/b}}\ndata: {{train: ['{row}', {{path: '{row}'}}]}}\n").recipe
    expected = row if kept else str(home / row)
    assert [source.path for source in recipe.data.train] == [expected] * 2


@pytest.mark.parametrize("flag", ["data.train.columns", "data.columns", "data.eval.columns"])
def test_a_flag_that_belongs_to_an_item_is_answered_with_one_that_loads(flag: str, tmp_path: Path) -> None:
    text = "model: {name_or_path: a/b}\ndata: {train: a.jsonl, eval: b.jsonl}\n"
    with pytest.raises(RecipeError) as caught:
        written(tmp_path, text, (flag, "{prompt: q, completion: a}"))
    _, key, value = shlex.split(f"write {caught.value.problems[0].message.partition('; write ')[2]}")
    data = written(tmp_path, text, (key.removeprefix("--"), value)).recipe.data
    sources = data.eval if flag.startswith("data.eval") else data.train
    assert isinstance(sources, tuple) and sources[0].columns == {"prompt": "q", "completion": "a"}


def test_a_source_has_columns_and_a_share(tmp_path: Path) -> None:
    text = cases(__file__, "columns_and_a_share")
    loaded = written(tmp_path, text, ("data.train.1.columns", "{text: body}"))
    data = loaded.recipe.data
    assert data.train[0].columns == {"prompt": "question", "messages": "chat.turns"}
    assert [(source.weight, source.count) for source in data.train] == [(1.0, 10_000), (1.5, None)]
    assert data.train[1].columns == {"text": "body"}
    assert (data.cache_dir, data.workers) == (str(tmp_path / "home" / "cache"), 4)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe_yaml(loaded.recipe))
    assert load_recipe(copy, cwd=tmp_path).recipe == loaded.recipe


def test_a_local_directory_wins_over_a_hub_name(tmp_path: Path) -> None:
    (tmp_path / "home" / "owner" / "name").mkdir(parents=True)
    assert written(tmp_path, SHORT).recipe.model.name_or_path == str(tmp_path / "home" / "owner" / "name")


def test_an_unset_variable_is_an_error(tmp_path: Path) -> None:
    line = refused(tmp_path, "model: {name_or_path: a/b}\ndata: {train: '${NOT_SET_ANYWHERE}/x'}\n")
    assert line.endswith("the environment has no NOT_SET_ANYWHERE")


def test_variables_expand_in_paths_only(tmp_path: Path) -> None:
    assert written(tmp_path, SHORT + "model2: 1\n".replace("model2: 1\n", "")).recipe.model.revision is None
    text = "model: {name_or_path: a/b, revision: '${X}'}\ndata: {train: x}\n"
    assert written(tmp_path, text).recipe.model.revision == "${X}"


def test_flags_win_address_items_and_null_takes_back(tmp_path: Path) -> None:
    text = (
        "model: {name_or_path: a/b}\ndata: {train: a.jsonl, eval: 5%}\noptimizer: {lr: 1e-4}\nadapter: {kind: lora}\n"
    )
    loaded = written(tmp_path, text, *cases(__file__, "flags"))
    recipe = loaded.recipe
    assert recipe.optimizer.lr == "auto"
    data = [(Path(source.path).name, source.format) for source in recipe.data.train]
    assert data == [("a.jsonl", "text"), ("b.jsonl", "auto")]
    assert recipe.adapter.model_dump()["r"] == 8
    assert recipe.adapter.model_dump()["target_modules"] == ["q_proj", "v_proj"]
    assert [str(item) for item in recipe.checkpoint.every or ()] == ["100 steps", "5 min"]
    assert (recipe.train.micro_batch_size, recipe.name, recipe.data.eval) == (4, "2026", None)
    assert recipe.model.config == {"rope_theta": 1e4}
    assert loaded.origins["adapter.r"] == "flag --adapter.r 2^3"
    assert loaded.origins["adapter.kind"] == "home/my recipe.yaml:4:17"
    shown = recipe_yaml(loaded.recipe, loaded.origins)
    assert "# flag --adapter.r 2^3" in shown
    assert "# default" in shown


@pytest.mark.parametrize(("more", "flags", "expected"), cases(__file__, "rules_between_fields"))
def test_rules_between_fields(more: str, flags: tuple[tuple[str, str], ...], expected: str, tmp_path: Path) -> None:
    assert expected in refused(tmp_path, SHORT + more, *flags)


def test_a_cadence_that_is_only_the_default_needs_no_rows(tmp_path: Path) -> None:
    assert written(tmp_path, SHORT + "eval: {samples: 0}\n").recipe.data.eval is None
    assert written(tmp_path, SHORT + "eval: {every: never}\n").recipe.eval.every is None


def test_pretraining_reads_text(tmp_path: Path) -> None:
    text = "model: {name_or_path: a/b}\nmethod: {kind: pretrain}\ndata: {train: [{path: x, format: messages}]}\n"
    assert "reads text" in refused(tmp_path, text)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads_is_short_and_survives_writing(name: str, tmp_path: Path) -> None:
    loaded = load_recipe(name, cwd=tmp_path)
    assert loaded.path == recipes_dir() / f"{name}.yaml"
    assert loaded.recipe.output_dir == str(tmp_path / "runs" / name)
    assert len(loaded.text.splitlines()) <= 25
    assert all(Path(source.path).is_file() for source in loaded.recipe.data.train)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe_yaml(loaded.recipe))
    assert load_recipe(copy, cwd=tmp_path).recipe == loaded.recipe


def test_a_template_is_a_name_or_a_path_from_where_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "bare").write_text("x")
    for written, expected in (
        ("llama3", "llama3"),
        ("./llama3", str(tmp_path / "llama3")),
        ("mine.jinja", str(tmp_path / "mine.jinja")),
        ("bare", str(tmp_path / "bare")),
    ):
        recipe = load_recipe(MINIMAL | {"tokenizer": {"chat_template": written}}, cwd=tmp_path).recipe
        assert recipe.tokenizer.chat_template == expected
        assert load_recipe(recipe_dict(recipe), cwd=tmp_path / "elsewhere").recipe.tokenizer == recipe.tokenizer


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
RECIPES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
        "tokenizer": st.fixed_dictionaries(
            {}, optional={"chat_template": TEXT.map("{}.jinja".format), "name_or_path": st.just("byte")}
        ),
        "adapter": st.fixed_dictionaries(
            {"kind": st.sampled_from(["lora", "dora"])},
            optional={
                "r": st.integers(1, 999),
                "alpha": st.floats(1e-9, 1e9),
                "target_modules": st.lists(TEXT, min_size=1, max_size=3),
                "modules_to_save": st.lists(TEXT, max_size=3),
                "use_rslora": st.booleans(),
            },
        ),
        "optimizer": st.fixed_dictionaries(
            {},
            optional={"lr": st.floats(1e-300, 1), "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2)},
        ),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "duration": st.integers(1, 10**15).map("{} tokens".format),
                "stop_after": st.sampled_from(["never", "3h", "10 steps", "1.5 min"]),
                "max_grad_norm": st.sampled_from(["never", 1, "0.5", "10%"]),
            },
        ),
        "checkpoint": st.fixed_dictionaries(
            {
                "every": st.sampled_from(["never", "5 steps", ["5 steps", "1 h"]]),
                "marks": st.sampled_from([[], ["5 steps"], ["2B tokens", "50%"]]),
            }
        ),
        "schedule": st.fixed_dictionaries({"kind": st.sampled_from(["constant", "linear", "cosine"])}),
    },
)


@given(
    more=RECIPES,
    row=TEXT,
    split=st.sampled_from([None, "2%", "200 documents", "0.125%", "held.jsonl", ["a", {"path": "b"}]]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_recipe_survives_being_written(more: dict[str, Any], row: str, split: Any, tmp_path: Path) -> None:
    data = {"train": row.replace("$", "S"), "eval": split}
    if "tokenizer" in more and "chat_template" in more["tokenizer"]:
        more["tokenizer"]["chat_template"] = more["tokenizer"]["chat_template"].replace("$", "S")
    first = load_recipe({"model": {"name_or_path": "a/b"}, **more, "data": data}, cwd=tmp_path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(first.text, encoding="utf-8")
    assert load_recipe(copy, cwd=tmp_path).recipe == first.recipe


def test_the_schema_accepts_what_loads(tmp_path: Path) -> None:
    import jsonschema

    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in shipped_recipes():
        validator.validate(recipe_dict(load_recipe(name, cwd=tmp_path).recipe))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(MINIMAL | {"optimizer": {"learning_rate": 1}})
    assert schema["$defs"]["TrainSection"]["properties"]["duration"]["default"] == "1 epoch"


def test_python_takes_a_mapping_and_reports_like_a_file() -> None:
    assert public_load(MINIMAL).recipe.name == "run"
    with pytest.raises(RecipeError, match="recipe  optimizer.learning_rate  unknown; write optimizer.lr: 1"):
        public_load(MINIMAL | {"optimizer": {"learning_rate": 1}})


@pytest.mark.parametrize(("section", "key", "expected"), cases(__file__, "unknown_keys"))
def test_unknown_keys_are_answered_with_what_was_meant(section: str | None, key: str, expected: str) -> None:
    wish = MINIMAL | ({key: 1} if section is None else {section: {key: 1}})
    with pytest.raises(RecipeError) as caught:
        load_recipe(wish)
    assert expected in str(caught.value.problems[0])


@pytest.mark.parametrize(("kind", "lr"), [("adamw", 2), ("adafactor", "1.5"), ("muon", 20)])
def test_a_rate_that_no_step_survives_is_refused(kind: str, lr: int | str) -> None:
    with pytest.raises(RecipeError, match=r"optimizer.lr  got '?[\d.]+'?; allowed: .*, at most 1 or auto$"):
        load_recipe(MINIMAL | {"optimizer": {"kind": kind, "lr": lr}})
    assert load_recipe(MINIMAL | {"optimizer": {"kind": "sgd", "lr": 2}}).recipe.optimizer.kind == "sgd"


def test_user_code_in_a_file_starts_from_the_recipes_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.config.paths import resolve_paths
    from tuner.config.yaml import Problems, tree_of

    uses: list[object] = [{"use": "my_hooks.py:Notify"}, "../a/b.py:c", {"use": "installed_name"}, "/x/y.py:z"]
    tree = tree_of({"hooks": [*uses, "${CODE}/h.py:H"], "optimizer": {"use": "o.py:O"}}, "", tmp_path)
    monkeypatch.setenv("CODE", "/code")
    resolve_paths(tree, Problems())
    found = [item["use"] if isinstance(item, dict) else item for item in tree.plain()["hooks"]]
    expected = [f"{tmp_path}/my_hooks.py:Notify", f"{tmp_path.parent}/a/b.py:c", "installed_name", "/x/y.py:z"]
    assert found == [*expected, "/code/h.py:H"]
    assert tree.plain()["optimizer"]["use"] == f"{tmp_path}/o.py:O"


def test_hooks_load_and_are_written_back(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "model: {name_or_path: a/b}\ndata: {train: rows.jsonl}\nhooks:\n  - my_hooks.py:Notify\n"
        "  - {use: named, every: [10%, 5 min], stages: [step, end], options: {channel: runs, level: 3}}\n"
    )
    flags = [Override("hooks.0.every", "100 steps"), Override("hooks.1.options.level", "4")]
    recipe = load_recipe(tmp_path / "r.yaml", flags, cwd=tmp_path).recipe
    first, second = recipe.hooks
    assert (first.use, str(first.every[0] if first.every else "")) == (f"{tmp_path}/my_hooks.py:Notify", "100 steps")
    assert first.stages == ("start", "window", "epoch", "step", "evaluation", "save", "export", "end")
    assert (second.use, second.stages, second.options) == ("named", ("step", "end"), {"channel": "runs", "level": 4})
    (tmp_path / "again.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe
    assert load_recipe(tmp_path / "r.yaml", [Override("hooks", "null")], cwd=tmp_path).recipe.hooks == ()


@pytest.mark.parametrize(("more", "expected"), cases(__file__, "a_base_to_merge_into_is_a_choice_of_quantised_runs"))
def test_a_base_to_merge_into_is_a_choice_of_quantised_runs(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"model": {"name_or_path": "x"}, "data": {"train": "x"}, **more})
    (found,) = caught.value.problems
    assert found.key == "export.base" and expected in found.message


@pytest.mark.parametrize(("line", "said"), cases(__file__, "a_key_that_is_written_as_its_flag_is_told_apart"))
def test_a_key_that_is_written_as_its_flag_is_told_apart(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"model: {{name_or_path: a/b}}\ndata: {{train: rows.jsonl}}\n{line}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert said in str(caught.value)


def section(**values: Any) -> Method:
    return load_recipe({**MINIMAL, "method": {"kind": "dpo", **values}}).recipe.method


@pytest.mark.parametrize(("written", "weights"), cases(__file__, "a_loss_is_a_name_or_several"))
def test_a_loss_is_a_name_or_several_with_weights_in_files_and_on_the_command_line(written: Any, weights: Any) -> None:
    found = section(loss=written)
    assert isinstance(found, DpoMethod) and found.loss == weights
    loaded = load_recipe({**MINIMAL, "method": {"kind": "dpo", "loss": written}})
    back = yaml.safe_load(recipe_yaml(loaded.recipe))
    assert load_recipe(back).recipe == loaded.recipe
    text = written if isinstance(written, str) else yaml.safe_dump(written, default_flow_style=True).strip()
    flags = [Override("method.kind", "dpo"), Override("method.loss", text)]
    assert load_recipe(MINIMAL, flags).recipe.method == found


@pytest.mark.parametrize(("values", "said"), cases(__file__, "what_a_loss_cannot_take_is_a_problem_of_the_recipe"))
def test_what_a_loss_cannot_take_is_a_problem_of_the_recipe(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        section(**values)


def test_terms_of_the_loss_are_figures_where_there_are_several() -> None:
    several = section(loss={"sigmoid": 1, "bco": 1}, sft_weight=0.1)
    assert [name for name in several.figures if name in ("sigmoid", "bco", "sft")] == ["sigmoid", "bco", "sft"]
    assert "sft" not in section().figures


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
