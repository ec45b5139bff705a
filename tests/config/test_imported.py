"""Configurations in the shapes of other tools' own, converted: what the recipe says, and what is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.config.imported import Imported, import_text
from tuner.config.load import RecipeText, flatten, load_recipe, recipe_dict
from tuner.config.other_configs import dialects
from tuner.errors import RecipeError

EXPECTED: dict[str, dict[str, Any]] = {
    case["tool"]: case for case in cases(__file__, "a_configuration_becomes_a_recipe")
}
"""By the tool: the text of a configuration, values of the recipe that comes of it, and how what is left out begins."""


def imported(tool: str, tmp_path: Path) -> Imported:
    return import_text(EXPECTED[tool]["text"], "config.yaml", directory=tmp_path)


@pytest.mark.parametrize("tool", EXPECTED)
def test_a_configuration_becomes_a_recipe(tool: str, tmp_path: Path) -> None:
    found = imported(tool, tmp_path)
    expected, left = EXPECTED[tool]["values"], EXPECTED[tool]["left"]
    assert found.tool == tool
    values = flatten(recipe_dict(found.recipe))
    assert {key: values[key] for key in expected} == expected
    assert len(found.left) == len(left), found.left
    for start in left:
        assert any(item.startswith(start) for item in found.left), (start, found.left)
        assert f"#   {start}" in found.text


@pytest.mark.parametrize("tool", EXPECTED)
def test_its_text_is_the_same_recipe_and_names_what_each_line_comes_from(tool: str, tmp_path: Path) -> None:
    found = imported(tool, tmp_path)
    (tmp_path / "import.yaml").write_text(found.text)
    again = load_recipe(tmp_path / "import.yaml", cwd=Path.cwd()).recipe
    assert again.train == found.recipe.train
    assert again.adapter == found.recipe.adapter
    assert found.text.startswith(f"# From {dialects()[found.tool].title}'s config.yaml, by tuner import.\n")
    assert "learning_rate\n" in found.text or tool in {"trl", "torchtune"}


_AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\ndatasets: [{path: r.jsonl, type: chat_template%s}]\n"
_TRL = "model_name_or_path: a/b\ndataset_name: o/s\n"
_FACTORY = "model_name_or_path: a/b\ndataset: own.json\ntemplate: llama3\ncutoff_len: 64\nfinetuning_type: lora\n"


@pytest.mark.parametrize(("text", "line"), cases(__file__, "a_key_becomes_a_line"))
def test_a_key_becomes_a_line(text: str, line: str) -> None:
    written = [" ".join(each.split("  ")).split() for each in import_text(text, "c.yaml").text.splitlines()]
    assert any(" ".join(line.split()) in " ".join(words) for words in written), written


_TUNE = "checkpointer: {checkpoint_dir: /base}\nmodel: {_component_: torchtune.models.llama3.%s}\n"


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "what_saves_memory_elsewhere_does_here"))
def test_what_saves_memory_elsewhere_does_here(text: str, expected: dict[str, Any]) -> None:
    found = import_text(text, "c.yaml")
    values = flatten(recipe_dict(found.recipe))
    assert {key: values.get(key) for key in expected} == expected, found.left


@pytest.mark.parametrize(("text", "left"), cases(__file__, "what_has_an_effect_and_no_line_is_listed"))
def test_what_has_an_effect_and_no_line_is_listed(text: str, left: str) -> None:
    found = import_text(text, "c.yaml")
    assert any(item.startswith(left) for item in found.left), found.left
    assert f"#   {left}" in found.text


@pytest.mark.parametrize("name", ["type", "formatting", "data_format", "data_files", "file_name", "column_map"])
@pytest.mark.parametrize("value", ["chatml", 0, [1], {"a": "b"}, [{"a": 1}]])
def test_a_key_of_a_data_set_that_stands_at_the_top_with_another_value_is_listed(name: str, value: Any) -> None:
    found = import_text(json.dumps({"model_name_or_path": "a/b", "dataset_name": "o/s", name: value}), "c.json")
    source = found.recipe.data.train[0]
    assert (source.format, dict(source.columns)) == ("auto", {})
    assert any(item.startswith(name) for item in found.left), found.left


def test_what_belongs_to_each_data_set_is_written_into_each() -> None:
    found = import_text(_TRL + "dataset_text_field: body\nmax_samples: 7\n", "c.yaml")
    (source,) = found.recipe.data.train
    assert (source.path, dict(source.columns), source.count) == ("o/s:train", {"text": "body"}, 7)


@pytest.mark.parametrize(("text", "kind"), cases(__file__, "a_word_for_the_whole_training_is_its_method"))
def test_a_word_for_the_whole_training_is_its_method(text: str, kind: str) -> None:
    assert import_text(f"model_name_or_path: a/b\ndataset_name: o/s\n{text}\n", "c.yaml").recipe.method.kind == kind


ANCHORS: Any = cases(__file__, "anchors")


def test_anchors_and_merged_mappings_of_other_tools_are_read() -> None:
    found = import_text(ANCHORS, "c.yaml")
    sources = [(Path(source.path).name, source.format) for source in found.recipe.data.train]
    assert sources == [("r.jsonl", "alpaca"), ("s.jsonl", "alpaca")]
    assert found.recipe.optimizer.lr == 3e-5


def test_what_stands_for_nothing_or_for_itself_is_refused_and_a_date_is_a_text() -> None:
    with pytest.raises(RecipeError, match=r"undefined alias 'later'.* line 1, column 13"):
        import_text("base_model: *later\nlater: &later a\n", "c.yaml")
    with pytest.raises(RecipeError, match="not YAML: maximum recursion"):
        import_text("base_model: &own {a: *own}\n", "c.yaml")
    assert import_text(ANCHORS + "wandb_name: 2026-01-02\n", "c.yaml")


def test_a_recipe_itself_has_no_anchors() -> None:
    with pytest.raises(RecipeError, match="a recipe has no anchors"):
        load_recipe(RecipeText("model: {name_or_path: &name a/b}\ndata: {train: r.jsonl}\n"))


def test_a_project_of_a_tracker_turns_the_tracker_on() -> None:
    logging = import_text(_AXOLOTL % "" + "wandb_project: tea\n", "c.yaml").recipe.logging
    assert (logging.trackers, logging.project) == (("wandb",), "tea")
    logging = import_text(_AXOLOTL % "" + "wandb_project: tea\nuse_wandb: false\n", "c.yaml").recipe.logging
    assert logging.trackers == ()


PROGRAM = "from trl import SFTConfig, SFTTrainer\nSFTTrainer(model='a/b', args=SFTConfig(output_dir='o')).train()\n"


@pytest.mark.parametrize("name", ["train.py", "stdin"])
def test_a_program_is_answered_with_what_can_be_read(name: str) -> None:
    with pytest.raises(RecipeError, match="a Python program, which is not run here") as caught:
        import_text(PROGRAM, name)
    assert "tuner import args.yaml --from trl" in str(caught.value.hint)


def test_what_changes_nothing_is_not_listed() -> None:
    quiet = "max_steps: -1\nload_in_4bit: false\nlr_scheduler_type: cosine_with_restarts\n"
    found = import_text(f"{_TRL}{quiet}lr_scheduler_kwargs: {{num_cycles: 1}}\nassistant_only_loss: true", "c.yaml")
    assert found.left == ()
    assert import_text(_AXOLOTL % ", roles_to_train: [assistant], train_on_eos: turn", "c.yaml").left == ()
    found = import_text(_TRL, "c.yaml")
    assert found.left == () and "completion: method.train_on: assistant" in found.text


def test_sources_keep_their_form_their_columns_and_their_share(tmp_path: Path) -> None:
    chats, questions = imported("axolotl", tmp_path).recipe.data.train
    assert (Path(chats.path).name, chats.format) == ("chats.jsonl", "sharegpt")
    assert (questions.path, questions.format) == ("owner/set:train[:5%]", "prompt_completion")
    assert questions.columns == {"prompt": "question", "completion": "answer"}
    first, second = imported("ms-swift", tmp_path).recipe.data.train
    assert (first.path, first.count, Path(second.path).name) == ("owner/set:train", 500, "own.jsonl")
    assert imported("torchtune", tmp_path).recipe.data.train[0].columns == {"messages": "talk"}


@pytest.mark.parametrize(("builder", "form", "columns", "kind"), cases(__file__, "builders_of_torchtune"))
def test_a_builder_of_torchtune_names_the_form_and_the_columns(
    builder: str, form: str, columns: dict[str, str], kind: str
) -> None:
    text = f"checkpointer: {{checkpoint_dir: /base}}\ndataset: {{_component_: torchtune.datasets.{builder}}}\n"
    found = import_text(text, "c.yaml").recipe
    (source,) = found.data.train
    assert (source.format, dict(source.columns), found.method.kind) == (form, columns, kind)


def test_llama_factorys_table_of_data_sets_is_read(tmp_path: Path) -> None:
    listed = cases(__file__, "data_sets_of_llama_factory")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    own, other = imported("llama-factory", tmp_path).recipe.data.train
    assert (Path(own.path).name, own.format, own.count) == ("own.json", "sharegpt", 500)
    assert own.columns == {"conversations": "talk"}
    assert (other.path, other.format) == ("owner/other:train", "alpaca")
    assert other.columns == {"instruction": "ask", "output": "say"}


def test_the_batch_follows_from_the_processes(tmp_path: Path) -> None:
    found = import_text(EXPECTED["llama-factory"]["text"], "c.yaml", processes=4, directory=tmp_path)
    assert found.recipe.train.global_batch_size == 32


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "what_cannot_be_imported_is_refused"))
def test_what_cannot_be_imported_is_refused(text: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        import_text(text, "c.yaml")


def test_a_configuration_that_is_taken_for_a_recipe_is_answered_with_import(tmp_path: Path) -> None:
    for tool in ("axolotl", "llama-factory", "torchtune"):
        (tmp_path / "c.yaml").write_text(EXPECTED[tool]["text"])
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / "c.yaml", cwd=tmp_path)
        hint = f"a configuration of {dialects()[imported(tool, tmp_path).tool].title}? convert it: tuner import c.yaml"
        assert caught.value.hint == f"{hint} > recipe.yaml"
    (tmp_path / "c.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\nlearning_rate: 1e-4\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "c.yaml", cwd=tmp_path)
    assert caught.value.hint is None


SCRIPT: Any = cases(__file__, "script")
"""Variables, a default of one, values on several lines, `--key=value`, a pipe, and a command of another kind."""


def test_the_command_of_a_script_is_read() -> None:
    found = import_text(SCRIPT, "train.sh")
    assert found.tool == "ms-swift" and 'name_or_path: "./base" ' in found.text and "output_dir: out/run " in found.text
    own = flatten(recipe_dict(found.recipe))
    expected = cases(__file__, "read_of_a_script")
    assert {key: own[key] for key in expected} == expected
    assert [Path(source.path).name for source in found.recipe.data.train] == ["first:train", "own.jsonl"]


@pytest.mark.parametrize(("text", "tool", "line"), cases(__file__, "a_command_line_is_a_configuration"))
def test_a_command_line_is_a_configuration(text: str, tool: str, line: str) -> None:
    found = import_text(text, "stdin")
    assert found.tool == tool and line in found.text


def test_a_commands_flags_come_on_top_of_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-4\n")
    found = import_text("trl sft --config own.yaml --learning_rate 3e-4\n", "run.sh", directory=tmp_path)
    assert (found.recipe.optimizer.lr, found.recipe.model.name_or_path) == (3e-4, "a/b")
    with pytest.raises(RecipeError, match=r"gone\.yaml: the file that the command reads: No such file"):
        import_text("trl sft --config gone.yaml\n", "run.sh", directory=tmp_path)


@pytest.mark.parametrize(("text", "message"), cases(__file__, "a_script_without_a_training_that_is_here_is_refused"))
def test_a_script_without_a_training_that_is_here_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        import_text(text, "run.sh")


def test_a_mixture_of_trl_names_its_data_sets_and_what_is_lost() -> None:
    text = cases(__file__, "a_mixture_of_trl")
    found = import_text(text, "mixture.yaml")
    assert [source.path for source in found.recipe.data.train] == ["c/d:train_sft", "e/f:train"]
    left = {item.partition(": ")[0] for item in found.left}
    assert left == {"chat_template", "dataset_mixture.datasets.1.weight", "dataset_mixture.test_split_size"}
