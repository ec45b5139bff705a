"""Data sets as other tools name them, and the items of `data.train` that they are."""

from collections.abc import Mapping
from typing import Any

from tuner.config.other_rules import listed
from tuner.config.yaml import package_table

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
_COLUMN_OF = {"sharegpt": "conversations", "messages": "messages", "text": "text"}


def table(name: str) -> dict[str, Any]:
    """A table of other_data.yaml."""
    return dict(package_table("other_data")[name])


def component_name(value: Any) -> str:
    """The last name of the dotted path by which torchtune builds something, in a section or alone."""
    path = value.get("_component_") if isinstance(value, Mapping) else value
    return str(path).rpartition(".")[2]


def is_text(sources: Any) -> bool:
    """Whether every one of our sources holds plain text, which is pre-trained."""
    forms = [item.get("format") for item in sources if isinstance(item, Mapping)] if isinstance(sources, list) else []
    return bool(forms) and len(forms) == len(sources) and set(forms) == {"text"}


def is_file(name: str) -> bool:
    """Whether the name of a data set is the path of a file or directory, as it is written."""
    return name.startswith(("./", "../", "/", "~")) or name.endswith(SUFFIXES)


def located(name: str, split: Any = None) -> str:
    """The path of a source: a file as it is, a hub data set with its split."""
    return name if is_file(name) or ":" in name.removeprefix("hf://") else f"{name}:{split or 'train'}"


def entry(found: Mapping[str, Any]) -> dict[str, Any]:
    """An item of axolotl's or of TRL's `datasets`, as one of ours."""
    files = found.get("data_files")
    named = found.get("path") or found.get("id") or "rows.jsonl"
    path = files[0] if isinstance(files, list) and files else files if isinstance(files, str) else named
    source: dict[str, Any] = {"path": located(str(path), found.get("split"))}
    kind = found.get("type")
    columns = _columns(found)
    if isinstance(kind, Mapping):
        has_input = bool(kind.get("field_input"))
        source["format"] = "alpaca" if has_input else "prompt_completion"
        ours = ("instruction", "input", "output") if has_input else ("prompt", "", "completion")
        fields = (kind.get("field_instruction"), kind.get("field_input"), kind.get("field_output"))
        columns |= {name: str(theirs) for name, theirs in zip(ours, fields, strict=True) if theirs}
    elif (form := _form_of(kind)) is not None:
        source["format"] = "sharegpt" if form == "messages" and _is_sharegpt(found) else form
    if isinstance(kind, str) and kind.partition(".")[0] in {"chatml", "llama3", "zephyr"}:
        columns |= table("pairs").get(kind.partition(".")[2], {})
    columns |= {name: str(found[f"field_{name}"]) for name in ("chosen", "rejected") if found.get(f"field_{name}")}
    return source if source.get("format") == "sharegpt" else _with_columns(source, columns)


def _with_columns(source: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A source with those of its columns that have another name here."""
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return source | ({"columns": renamed} if renamed else {})


def unread(value: Any) -> dict[str, Any]:
    """What the items of axolotl's `datasets` or the `dataset` of torchtune say that none of ours does, by its key."""
    items = value if isinstance(value, list) else [value]
    left: dict[str, Any] = {}
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            continue
        if "_component_" in item:
            left |= _lost(item)
            continue
        said = {key: found for key, found in item.items() if key not in _READ and not _says_nothing(key, found)}
        left |= {f"{index}.{key}": found for key, found in said.items()}
        kind = item.get("type")
        if isinstance(kind, Mapping):
            left |= {f"{index}.type.{key}": found for key, found in kind.items() if key not in _READ_OF_TYPE and found}
    return left


def _lost(found: Mapping[str, Any]) -> dict[str, str]:
    """What a builder of torchtune does that no key of its own says."""
    name = component_name(found)
    lost = {"source": "text (a line is a document there, the file here)"} if found.get("source") == "text" else {}
    if name in {"alpaca_dataset", "alpaca_cleaned_dataset"}:
        lost["_component_"] = f"{name} (it asks in a text of its own)"
    return lost


_SEGMENTS = {"input_output", "stepwise_supervised"}
"""axolotl's types of records that no form here reads."""


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a key of an item is as it would be without it: TRL's mixtures name every column and weigh each alike."""
    if key == "columns":
        return isinstance(value, list)
    if key == "roles_to_train":
        return isinstance(value, list) and all(role in ("assistant", "gpt") for role in value)
    if key == "train_on_eos":
        return bool(value == "turn")
    if key == "type":
        return value not in _SEGMENTS if isinstance(value, str) else True
    return value is None or (key == "weight" and value == 1) or (key in {"config", "name"} and value == "default")


_READ = {"path", "id", "data_files", "split", "field_messages", "message_property_mappings",
         "message_field_role", "message_field_content", "field", "ds_type", "field_chosen",
         "field_rejected"}  # fmt: skip
_READ_OF_TYPE = {"field_instruction", "field_input", "field_output"}


def _form_of(kind: Any) -> str | None:
    """The form of the records of one of axolotl's types; None where it follows from the records."""
    if not isinstance(kind, str) or kind == "chat_template.argilla":  # whose prompt is in the answers
        return None
    form: str | None = table("formats").get(kind.split(".")[0].split(":")[0])
    return form


def _is_sharegpt(found: Mapping[str, Any]) -> bool:
    """Whether a chat's records have `from` and `value`."""
    named = found.get("message_property_mappings") or {}
    return bool(found.get("message_field_role", named.get("role")) == "from")


def _columns(found: Mapping[str, Any]) -> dict[str, str]:
    messages, text = found.get("field_messages"), found.get("field")
    columns = {"messages": str(messages)} if messages and messages != "messages" else {}
    return columns | ({"text": str(text)} if text and text != "text" else {})


def component(found: Mapping[str, Any]) -> dict[str, Any]:
    """The `dataset` of a torchtune file, as one of our sources."""
    known = table("components").get(component_name(found))
    form, columns = (known["form"], known.get("columns", {})) if known else ("auto", {})
    hub = known.get("hub") if known else None
    path = found.get("data_files") or found.get("source") or hub or "rows.jsonl"
    source: dict[str, Any] = {"path": located(str(path), found.get("split"))}
    form = "sharegpt" if found.get("conversation_style") == "sharegpt" else form
    if form != "auto":
        source["format"] = form
    column, renamed = found.get("conversation_column", found.get("column")), found.get("column_map")
    if isinstance(column, str) and form in _COLUMN_OF:
        columns = {_COLUMN_OF[form]: column}
    elif isinstance(renamed, Mapping) and (known or {"chosen", "rejected"} & set(renamed)):
        ours = {"input": "instruction"} if "instruction" in columns else {}
        columns = columns | {ours.get(str(key), str(key)): str(theirs) for key, theirs in renamed.items() if theirs}
    return _with_columns(source, columns)


def component_settings(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the `dataset` of a torchtune file says besides its records: whether they are packed, what is trained on."""
    name = component_name(found)
    settings: dict[str, Any] = {}
    if isinstance(found.get("packed"), bool):
        settings["data.packing"] = "auto" if found["packed"] else False
    if found.get("train_on_input", name in {"alpaca_dataset", "alpaca_cleaned_dataset"}) is True:
        settings["method.train_on"] = "all"
    return settings


def counted(name: str) -> str | dict[str, Any]:
    """A data set of ms-swift: a name with, after `#`, how many records are taken."""
    path, _, count = name.partition("#")
    place = located(path.partition(":")[0] if not is_file(path) else path)
    return {"path": place, "count": int(count)} if count.isdecimal() else place


def registered(name: str, info: Mapping[str, Any], directory: str) -> str | dict[str, Any]:
    """A data set of LLaMA-Factory by its name in `dataset_info.json`; a file of that name where it is not listed."""
    row = info.get(name)
    if not isinstance(row, Mapping):
        return name if is_file(name) else f"{directory}/{name}.json"
    hub = row.get("hf_hub_url")
    place = located(str(hub), row.get("split")) if hub else f"{directory}/{row.get('file_name')}"
    source: dict[str, Any] = {"path": place}
    tags, columns = row.get("tags"), row.get("columns")
    is_of_roles = isinstance(tags, Mapping) and tags.get("role_tag") == "role"
    source["format"] = "messages" if is_of_roles else "sharegpt" if row.get("formatting") == "sharegpt" else "alpaca"
    ours = table("factory_columns")
    if source["format"] == "sharegpt":
        ours = {key: "conversations" if name == "messages" else name for key, name in ours.items()}
    given = columns if isinstance(columns, Mapping) else {}
    return _with_columns(source, {ours[key]: str(value) for key, value in given.items() if key in ours})


def guessed(given: Mapping[str, Any]) -> list[str]:
    """LLaMA-Factory's names of data sets that its table does not list and that are no files."""
    info = given.get("dataset_info")
    known = info if isinstance(info, Mapping) else {}
    names = listed(given.get("dataset"))
    return [name for name in names if not is_file(name) and not isinstance(known.get(name), Mapping)]


def plain_sources(value: Any) -> list[Any] | None:
    """What a key that holds data sets stands for: a list of names or mappings, names with commas, or a builder."""
    if isinstance(value, Mapping):
        return [component(value)] if "_component_" in value else [entry(value)]
    if isinstance(value, str):
        names = value.replace(",", " ").split()
        return [counted(name) if {*name} & {"/", "#"} else registered(name, {}, "data") for name in names] or None
    if not isinstance(value, list) or not value or not all(isinstance(item, (str, Mapping)) for item in value):
        return None
    return [entry(item) if isinstance(item, Mapping) else counted(item) for item in value]
