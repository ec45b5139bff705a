"""Configurations in the shapes of other tools' own, converted: what the recipe says, and what is left out.

Preference and reward trainings come with their losses, weights and traps. ArcticTraining's recipes, XTuner V1's
configurations, OLMo-core's ladders and RecIS's arguments are files of their tools' tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.tables import cases
from tests.fixtures.trainings import lines
from tuner.config.imported import Imported, import_text
from tuner.config.load import Override, RecipeText, flatten, load_recipe, recipe_dict
from tuner.config.methods import DistillMethod
from tuner.config.other_configs import dialects
from tuner.config.other_methods import kind_of
from tuner.errors import RecipeError
from tuner.run.main import train
from tuner.run.options import LaunchOptions
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

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


AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\ndatasets: [{path: r.jsonl, type: chatml.intel}]\n"
FACTORY = "model_name_or_path: a/b\nfinetuning_type: lora\ncutoff_len: 512\ndataset: own.json\n"
TRL = "model_name_or_path: a/b\ndataset_name: o/s\nmax_length: 512\n"
TORCHTUNE: Any = cases(__file__, "torchtune")
SWIFT = "model: a/b\nrlhf_type: %s\ndataset: [own.jsonl]\nmax_length: 512\ntuner_type: lora\n"


def method_of(text: str) -> dict[str, Any]:
    """The keys of the method in the recipe that comes of a configuration, with what is not the method's default."""
    method = import_text(text, "c.yaml").recipe.method
    default = type(method)()
    names = type(method).model_fields
    found = {name: getattr(method, name) for name in names if getattr(method, name) != getattr(default, name)}
    return found | {"kind": method.kind}


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "a_method_comes_with_its_losses_and_weights"))
def test_a_method_comes_with_its_losses_and_weights(text: str, expected: dict[str, Any]) -> None:
    assert method_of(text) == expected


TAUGHT = "checkpointer: {checkpoint_dir: a/b}\nteacher_checkpointer: {checkpoint_dir: o/t}\n"


@pytest.mark.parametrize(("text", "expected"), cases(__file__, "a_teacher_of_torchtune"))
def test_a_teacher_of_torchtune_comes_with_the_share_of_its_loss(text: str, expected: list[object]) -> None:
    found = import_text(TAUGHT + text, "c.yaml", "torchtune")
    method = found.recipe.method
    assert isinstance(method, DistillMethod) and method.teacher == "o/t"
    left = [item.partition(":")[0] for item in found.left if not item.startswith("data.train")]
    assert [method.ce_weight, method.beta, method.rows, left] == expected


@pytest.mark.parametrize(("command", "kind"), cases(__file__, "a_command_says_what_it_trains"))
def test_a_command_says_what_it_trains(command: str, kind: str) -> None:
    assert import_text(command, "run.sh").recipe.method.kind == kind


def test_a_row_holds_both_answers_where_others_count_one() -> None:
    pairs, labelled = import_text(AXOLOTL + "rl: dpo", "c.yaml"), import_text(AXOLOTL + "rl: kto", "c.yaml")
    assert (pairs.recipe.data.max_length, labelled.recipe.data.max_length) == (1024, 512)
    assert "# 2 x sequence_len: a row holds both answers of a pair" in pairs.text


def test_a_type_that_writes_its_own_template_names_it_and_its_columns() -> None:
    (source,) = import_text(AXOLOTL + "rl: dpo", "c.yaml").recipe.data.train
    assert (source.format, source.columns) == ("auto", {"prompt": "question"})
    assert import_text(AXOLOTL + "rl: dpo", "c.yaml").recipe.tokenizer.chat_template == "chatml"


def test_a_builder_of_pairs_names_its_columns() -> None:
    (source,) = import_text(TORCHTUNE, "c.yaml").recipe.data.train
    assert source.path == "lvwerra/stack-exchange-paired:train"
    assert source.columns == {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}


def test_rates_are_those_of_the_other_trainer() -> None:
    rates = {text: import_text(TRL + text, "c.yaml").recipe.optimizer.lr for text in ("beta: 0.1", "rl: rm", "")}
    assert rates == {"beta: 0.1": 2e-5, "rl: rm": 1e-4, "": 2e-5}
    assert import_text(TRL + "loss_type: sigmoid", "c.yaml").recipe.optimizer.lr == 1e-6


@pytest.mark.parametrize(("text", "left"), cases(__file__, "what_is_not_here"))
def test_what_is_not_here_is_listed_with_what_to_write(text: str, left: str) -> None:
    found = import_text(TRL + text, "c.yaml")
    assert found.recipe.method.kind == "dpo"
    assert any(item.startswith(left) for item in found.left), found.left


@pytest.mark.parametrize("kind", ["grpo", "ppo", "rloo", "online_dpo", "gdpo", "gkd"])
def test_a_kind_that_is_not_here_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(RecipeError, match=f"rl: {kind}: not supported: "):
        import_text(AXOLOTL + f"rl: {kind}", "c.yaml")


@pytest.mark.parametrize(
    "given", [{}, {"stage": "sft", "loss_type": "sigmoid"}, {"loss_type": "nll"}, {"reward_model": "path"}]
)
def test_other_trainings_are_taken_for_none(given: dict[str, Any]) -> None:
    assert kind_of(given) is None


FILES: list[dict[str, Any]] = cases(__file__, "a_file_becomes_what_it_says")
TRAINED = [file for file in FILES if file["tool"] in {"arctictraining", "xtuner"}]


def text_of(file: dict[str, Any]) -> str:
    """A file's text; of a tool whose files are JSON what they have in common, with its own keys."""
    common: Any = cases(__file__, "what_is_in_common")
    return file["given"] if isinstance(file["given"], str) else json.dumps(common[file["tool"]] | file["given"])


def asked_of(found: Any, wanted: Any) -> Any:
    """Of what was found only what is wanted to be in it."""
    if isinstance(wanted, dict):
        return {key: asked_of(found.get(key), value) for key, value in wanted.items()}
    nested = isinstance(wanted, list) and any(isinstance(item, dict) for item in wanted)
    return [asked_of(*pair) for pair in zip(found, wanted, strict=True)] if nested else found


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file['tool']}, {file['name']}")
def test_a_file_becomes_what_it_says(file: dict[str, Any]) -> None:
    made = import_text(text_of(file), "file.yml")
    left = {"olmo-core": ["model.name_or_path"], "recis": ["data.train", "model.name_or_path"]}.get(file["tool"], [])
    assert made.tool == file["tool"] and sorted(item.partition(":")[0] for item in made.left) == left
    assert asked_of(flatten(recipe_dict(made.recipe)), file["values"]) == file["values"]


def two_steps(text: str, name: str, place: Path, **more: str) -> None:
    """Import a configuration and train two steps of it, in small."""
    trainings.prepare(place, 1, layers=1)
    (place / "texts.jsonl").write_text('{"text": "abababababab"}\n' * 40)
    (place / "made.yaml").write_text(import_text(text, name, directory=place).text)
    flags = {"tokenizer.name_or_path": "byte", "train.stop_after": "2 steps", "train.device": "cpu",
             "train.precision": "fp32", "eval.samples": "0", "train.compile": "false"} | more  # fmt: skip
    overrides = [Override(key, value) for key, value in flags.items()]
    loaded = load_recipe(place / "made.yaml", overrides, cwd=place)
    result = train(loaded, LaunchOptions(), RankInfo(), Console(main=False))
    steps = [line for line in lines(result.run_dir) if line["kind"] == "train"]
    assert len(steps) == 2 and all(line["loss"] > 0 for line in steps)


@pytest.mark.parametrize("file", TRAINED, ids=lambda file: f"{file['tool']}, {file['name']}")
def test_what_it_becomes_trains(file: dict[str, Any], tmp_path: Path) -> None:
    on_cuda = {"checkpoints": {"optimizer.offload": "none"}, "lora": {"profile.memory": "false"}}
    two_steps(text_of(file), "file.yml", tmp_path, **on_cuda.get(file["name"], {}))


@pytest.mark.parametrize("file", cases(__file__, "what_is_not_carried_over_is_said"), ids=lambda file: file["tool"])
def test_what_is_not_carried_over_is_said(file: dict[str, Any]) -> None:
    left = " ".join(import_text(text_of(file), "file.yml").left)
    assert all(part in left for part in file["left"]), left
