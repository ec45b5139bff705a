"""Every field of the recipe x every way to write it wrong, in YAML and as a flag: refused, one line, place and name."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import commands
from tests.fixtures.tables import cases
from tuner.config.fields import Field, fields, item_fields
from tuner.config.load import Override, RecipeText, load_recipe
from tuner.config.numbers import CadenceSpan, Real, Span, Whole
from tuner.config.other_tools import foreign
from tuner.config.value_types import OneOf, Several, Switch, Table, Text, WebAddress
from tuner.errors import RecipeError

SECTIONS: dict[str, list[Field]] = {}
"""The keys of each section: a test for each of them would take as long as what it tests."""
for _field in fields().values():
    SECTIONS.setdefault(_field.key.partition(".")[0], []).append(_field)
HERE = Path("/where/relative/paths/start")
KINDS = {"adapter": "lora", "method": "sft", "optimizer": "adamw", "schedule": "cosine"}
NEEDS: Any = cases(__file__, "needs")
"""By section and kind, keys that it asks for."""
WRONG_ITEMS: Any = cases(__file__, "wrong_items")
"""Lists of sections that are wrong."""
ALONE = ("ladder.", "data.windows.", "health.before_saves", "health.times_every", "health.slow_rank", "notify.events",
         "notify.timeout", "prober.gradients", "adapter.config")  # fmt: skip
"""Keys that no other tool has anything like, with the beginnings of such."""
MAY_BE_EMPTY = set(cases(__file__, "may_be_empty"))
VALID = {"eval.every": "never", "schedule.periods": "9 steps", "adapter.config": "{peft_type: IA3}"}
VALID |= {f"{s}.use": "my.py:own" for s in NEEDS}
"""A value to write twice, where the default is none."""
BASE = {"model.name_or_path": "owner/name", "data.train": "rows.jsonl"}


def base(without: str = "") -> dict[str, object]:
    """A recipe without one key, of the kind of section that has it."""
    recipe: dict[str, dict[str, object]] = {}
    for key, value in BASE.items():
        section, _, name = key.partition(".")
        recipe.setdefault(section, {})
        if key != without:
            recipe[section][name] = value
    field = fields().get(without)
    for section, usual in KINDS.items():
        if section != without.partition(".")[0]:
            continue
        kind = field.kinds[0] if field is not None and field.kinds and field.section == section else usual
        if without != f"{section}.kind":
            required = NEEDS.get(section, {}).get(kind, {})
            recipe[section] = {"kind": kind} | {k: v for k, v in required.items() if without != f"{section}.{k}"}
    return dict(recipe)


def write(recipe: dict[str, object], extra: list[tuple[str, str]]) -> str:
    """YAML text of the base with more `key: raw text` lines, each in its section, at its end."""
    lines: list[str] = []
    tops = [(key, raw) for key, raw in extra if "." not in key]
    sections = dict.fromkeys([*recipe, *(key.split(".")[0] for key, _ in extra if "." in key)])
    for section in sections:
        lines.append(f"{section}:")
        lines += [f"  {name}: {value}" for name, value in dict(recipe.get(section, {})).items()]  # type: ignore[call-overload]
        own = [(key.split(".")[1:], raw) for key, raw in extra if key.startswith(f"{section}.")]
        lines += [f"  {name}: {raw}" for (name, *deeper), raw in own if not deeper]
        for parent in dict.fromkeys(name for (name, *deeper), _ in own if deeper):
            lines.append(f"  {parent}:")
            lines += [f"    {'.'.join(deeper)}: {raw}" for (name, *deeper), raw in own if deeper and name == parent]
    lines += [f"{key}: {raw}" for key, raw in tops]
    return "\n".join(lines) + "\n"


def misspelt(key: str) -> str:
    section, dot, name = key.rpartition(".")
    wrong = (
        name + name[-1] if len(name) < 4 else name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + "x"
    )
    return f"{section}{dot}{wrong}"


def wrong_types(field: Field) -> list[str]:
    if isinstance(field.value_type, Table):
        return ["5", "[1, 2]", "word"]
    if isinstance(field.value_type, (Several, CadenceSpan)):
        return ["true", "{a: 1}"] + ([] if isinstance(field.value_type, Several) and field.value_type.empty else ["[]"])
    if isinstance(field.value_type, Text):
        return ["5", "true", "[a, b]", "{a: 1}"]
    if field.value_type is None:
        return ["5", "true", "{a: 1}", "[5]"] + ([] if field.key in MAY_BE_EMPTY else ["[]"])
    return ["[1, 2]", "{a: 1}", "'some words'"] + ([] if isinstance(field.value_type, Switch) else ["true"])


def wrong_values(field: Field) -> list[str]:  # noqa: PLR0912 - one case for each type
    match field.value_type:
        case OneOf():
            return ["bogus", "null"]
        case Switch():
            return ["yes", "1", "null"]
        case Whole():
            return ["-1", "1.5", ".inf", ".nan", "99999999999999999999999"] + (
                [] if field.value_type.ge == 0 else ["0"]
            )
        case Real():
            return ["-1", ".inf", ".nan", "1e9999"] + (
                [] if field.value_type.le is None and field.value_type.lt is None else ["7"]
            )
        case CadenceSpan():
            return ["500", "0 steps", "3 parsecs", "[5 steps, 7]", "-1", "null"]
        case Span():
            return ["500", "0 steps", "3 parsecs", "-1", "null"] if not field.value_type.null else ["500", "3 parsecs"]
        case Several():
            return ["[[]]", "[{a: 1}]", "null"]
        case Text():
            return ["''", "'  '", '"a\\u0007b"'] + (["'a b/c'"] if field.key == "name" else [])
        case Table():
            return ["null"]
        case WebAddress():
            return ["ftp://host/x", "https://user:word@host/x", "host/x"]
        case _:
            return list(WRONG_ITEMS.get(field.key, WRONG_ITEMS["data.train"]))


def problems(text: str) -> tuple[str, ...]:
    """What is wrong with a recipe, which is in no file: of so many that would take as long as all else."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(RecipeText(text, "r.yaml"), cwd=HERE)
    assert caught.value.exit_code == 2
    lines = tuple(map(str, caught.value.problems))
    assert all("\n" not in line and "Traceback" not in line for line in lines)
    return lines


def flag_problems(flags: list[tuple[str, str]], without: str = "") -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(base(without), [Override(key, text) for key, text in flags])
    assert caught.value.exit_code == 2
    return tuple(map(str, caught.value.problems))


def only(lines: tuple[str, ...]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelt_key_gets_its_own_name_back(section: str) -> None:
    for field in SECTIONS[section]:
        wrong = misspelt(field.key)
        text = write(base(), [(wrong, "1")])
        line = only(problems(text))
        assert re.match(rf"r\.yaml:\d+:\d+  {re.escape(wrong)}  ", line)
        assert line.endswith(f"did you mean {field.key}?"), line
        line = only(flag_problems([(wrong, "1")]))
        assert line.startswith(f"flag --{wrong}  ")
        assert line.endswith(f"did you mean --{field.key}?"), line


@pytest.mark.parametrize("section", SECTIONS)
def test_a_wrong_type_or_value_is_refused_in_its_place(section: str) -> None:
    for field in SECTIONS[section]:
        for raw in wrong_types(field) + wrong_values(field):
            lines = problems(write(base(field.key), [(field.key, raw)]))
            assert len(lines) == 1 or field.value_type is None
            for line in lines:
                assert re.match(rf"r\.yaml:\d+:\d+  {re.escape(field.key)}", line), (raw, line)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_wrong_value_of_a_flag_is_refused(section: str) -> None:
    for field in SECTIONS[section]:
        if isinstance(field.value_type, Text):
            wrong = ["", "  ", "a\ab"]
        elif field.value_type is None:
            wrong = ["", "[5]", "{a: 1}", "[{pat: x}]", "[{path: x, format: csv}]"]
            wrong += [] if field.key in MAY_BE_EMPTY else ["[]"]
        else:
            # On the command line null takes a value back, and quotes are the shell's.
            wrong = [raw.strip("'") for raw in wrong_types(field) + wrong_values(field) if raw != "null"]
        for raw in wrong:
            lines = flag_problems([(field.key, raw)], field.key)
            assert len(lines) == 1 or field.value_type is None
            assert all(line.startswith(f"flag --{field.key}") for line in lines), (raw, lines)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_duplicate_is_refused(section: str) -> None:
    for field in SECTIONS[section]:
        value = next((str(value) for key, value in BASE.items() if key == field.key), None)
        value = value or VALID.get(field.key, field.default_text)
        if field.key.endswith(".kind") and field.section in KINDS:
            value = KINDS[field.section]
        lines = problems(write(base(field.key), [(field.key, value), (field.key, value)]))
        line = only(lines)
        assert re.match(rf"r\.yaml:\d+:\d+  {re.escape(field.key)}  ", line)
        assert re.search(r"duplicate key; first written on line \d+", line)
        assert "duplicate flag" in only(flag_problems([(field.key, value), (field.key, value)], field.key))


def test_every_field_has_another_tools_name() -> None:
    named = set(foreign()) - {f"data.train.{name}" for name in item_fields("data.train")}
    assert named == {key for key in fields() if not key.startswith(ALONE)}
    ours = {key.rpartition(".")[2] for key in fields()}
    for key, names in foreign().items():
        section = key.rpartition(".")[0]
        assert names, key
        taken = {name for name in names if f"{section}.{name}" in fields() or name in fields()}
        assert not taken, (taken, ours & taken)


@pytest.mark.parametrize("key", foreign())
def test_another_tools_name_is_answered_with_ours(key: str) -> None:
    section, name = key.rpartition(".")[0].split(".")[0], key.rpartition(".")[2]
    written = problems(write(base(), [(theirs, "1") for theirs in foreign()[key]]))
    flags = flag_problems([(f"train.{theirs}", "1") for theirs in foreign()[key]])
    for theirs, line, flag in zip(foreign()[key], written, flags, strict=True):
        assert re.match(rf"r\.yaml:\d+:1  {theirs}  (unknown; |not supported: )", line)
        assert "a recipe has" not in line
        assert name in line
        assert section in line
        assert flag.startswith((f"flag --train.{theirs}  unknown; ", f"flag --train.{theirs}  not supported: "))
        assert name in flag


def test_items_of_sources_are_checked_too() -> None:
    text = "model: {name_or_path: a/b}\ndata:\n  train:\n    - {path: x, fromat: text}\n    - {path: y, format: tex}\n"
    lines = problems(text)
    assert lines == tuple(cases(__file__, "problems_of_items"))


@pytest.mark.parametrize(("item", "expected"), cases(__file__, "a_hook_is_checked"))
def test_a_hook_is_checked(item: str, expected: str) -> None:
    text = f"model: {{name_or_path: a/b}}\ndata: {{train: x}}\nhooks:\n  - {item}\n"
    assert expected in only(problems(text)).replace(f"{HERE}/", "")


@pytest.mark.parametrize(("item", "expected"), cases(__file__, "an_items_share_and_columns_are_checked"))
def test_an_items_share_and_columns_are_checked(item: str, expected: str) -> None:
    text = f"model: {{name_or_path: a/b}}\ndata:\n  train:\n    - {item}\n"
    assert expected in only(problems(text))


LARGE = (("x: " + "[" * 500 + "]" * 500 + "\n", "deep"), ("a: " + "x" * (1 << 20), "larger than"))


@pytest.mark.parametrize(("text", "expected"), [*cases(__file__, "what_is_not_a_recipe"), *LARGE])
def test_what_is_not_a_recipe_is_refused_with_a_place(text: str, expected: str) -> None:
    lines = problems(text)
    assert any(expected in line for line in lines), lines
    assert all(re.match(r"r\.yaml:\d+:\d+  ", line) for line in lines)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"model:\n  name_or_path: \xff\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, cwd=tmp_path)
    assert [str(one) for one in caught.value.problems] == ["r.yaml:2:17  not UTF-8 text"]
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(RecipeError, match="larger than 1,048,576 bytes"):
        load_recipe(path, cwd=tmp_path)


def test_every_problem_is_reported_at_once() -> None:
    text = cases(__file__, "problems_of_many_keys")
    lines = problems(text)
    for key in cases(__file__, "keys_with_problems"):
        assert sum(f"  {key}  " in line for line in lines) == 1, (key, lines)
    assert len(lines) == 8


SAMPLE: Any = cases(__file__, "real_commands")


@pytest.mark.parametrize(
    ("words", "expected"), SAMPLE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_real_commands_exit_2_with_one_error_and_a_document(words: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: x}\n")
    done = commands.tuner(*words, "--json", cwd=tmp_path, code=2)
    assert expected in done.stderr
    assert done.stderr.removeprefix("loading   libraries\n").startswith("error: ")
    assert commands.document(done, 2)["status"] == "failed"
