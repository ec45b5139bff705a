"""What a case may do to the directory that it starts from, by the names that tables of cases have."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch


def apply(changes: Sequence[str | Mapping[str, Any]], place: Path) -> None:
    """Do them one after the other: a name alone, with a list of arguments, or with a mapping of named ones."""
    for change in changes:
        ((name, arguments),) = ({change: ()} if isinstance(change, str) else change).items()
        by_name = arguments if isinstance(arguments, Mapping) else {}
        CHANGES[name](place, *(() if by_name else arguments), **by_name)


def files(place: Path, **texts: str) -> None:
    """Write files, and the directories that they are in."""
    for name, text in texts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def directory(place: Path, name: str) -> None:
    """An empty directory."""
    (place / name).mkdir(parents=True)


def records(place: Path, name: str, *lines: object) -> None:
    """Write a file of JSON lines."""
    (place / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def append(place: Path, name: str, *lines: object) -> None:
    """Add JSON lines to a file."""
    with (place / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def numbered(place: Path, name: str, *lines: Mapping[str, Any]) -> None:
    """Write 24 rows, of these one after the other, each with a prompt of its own."""
    records(place, name, *({"prompt": f"{number} ", **lines[number % len(lines)]} for number in range(24)))


def repeated(place: Path, name: str, line: object, times: int) -> None:
    """Write one JSON line many times."""
    records(place, name, *[line] * times)


def copy(place: Path, source: str, target: str) -> None:
    """Copy a file or a directory, the first one that a pattern matches."""
    path = next(place.glob(source))
    (place / target).parent.mkdir(exist_ok=True)
    (shutil.copytree if path.is_dir() else shutil.copy)(path, place / target)


def move(place: Path, source: str, target: str) -> None:
    """Rename something."""
    (place / source).rename(place / target)


def remove(place: Path, *names: str) -> None:
    """Delete files."""
    for name in names:
        (place / name).unlink()


def overwrite(place: Path, pattern: str, text: str) -> None:
    """Damage all files that a pattern matches."""
    for path in place.glob(pattern):
        path.write_text(text)


def checkpoints_up_to(place: Path, steps: int) -> None:
    """No checkpoints of the run but the first so many."""
    for checkpoint in sorted((place / "runs/r/checkpoints").iterdir())[steps:]:
        shutil.rmtree(checkpoint)


def cut_weights(place: Path) -> None:
    """Weights that were not downloaded whole."""
    path = place / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def one_file_of_two(place: Path) -> None:
    """Weights in two files, of which one is missing."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    move(place, "model/model.safetensors", f"model/{first}")
    files(place, **{"model/model.safetensors.index.json": json.dumps({"weight_map": {"a": first, "b": second}})})


def config(place: Path, **values: Any) -> None:
    """Change the model's config.json; its weights do not fit it any more."""
    path = place / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def family(place: Path, name: str) -> None:
    """The config of a tiny model of another family, without weights."""
    from tests.model.tiny import tiny_config

    tiny_config(name).save_pretrained(place / "model")


def causal_type(place: Path, name: str) -> None:
    """The config of the tiny model that the campaign of causal types takes."""
    from tools.causal_cases import tiny_config

    tiny_config(name).save_pretrained(place / "model")


def saved(place: Path, model_type: str, **values: Any) -> None:
    """The config of a tiny model of a type of transformers, without weights."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **{"vocab_size": 300, "hidden_size": 32, **values}).save_pretrained(
        place / "model"
    )


def bytes_in_patches(place: Path) -> None:
    """The config of a BLT, whose attention to patches is bidirectional: what only the proof at the start finds."""
    from tools import causal_cases

    with patch.dict(causal_cases._SIZES, vocab_size=300):
        causal_type(place, "blt")


def mixture(place: Path) -> None:
    """The config of a model whose shared experts have layers of the names of routed ones."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    routed = {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
    rest = {"head_dim": 8, "first_k_dense_replace": 1, "architectures": ["Glm4MoeForCausalLM"]}
    saved(place, "glm4_moe", **shape, **routed, **rest)


def pictures(place: Path, alone: bool) -> None:
    """A multimodal model, whose language model has a class of its own or not."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tests.model.tiny import SHAPE

    text: dict[str, Any] = SHAPE | {"vocab_size": 300}
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
    if alone:
        text["model_type"] = "mistral"
        vision |= {"model_type": "pixtral", "image_size": 8, "patch_size": 4, "head_dim": 8}
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    else:
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    kind = "mistral3" if alone else "qwen2_5_vl"
    shutil.rmtree(place / "model")
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=not alone)
    AutoModelForImageTextToText.from_config(config).save_pretrained(place / "model")


def rewrite(path: Path, change: Callable[[str, Any], Iterator[tuple[str, Any]]], target: Path | None = None) -> None:
    """Write a file of weights again, with what becomes of each tensor."""
    from safetensors.torch import load_file, save_file

    tensors = dict(pair for name, tensor in load_file(path).items() for pair in change(name, tensor))
    save_file(tensors, target or path, {"format": "pt"})


def scaled(place: Path, name: str, factor: float) -> None:
    """Weights that are so many times as large."""
    rewrite(place / name, lambda name, tensor: iter([(name, tensor * factor)]))


def outliers(place: Path) -> None:
    """A model of whose weights codes of 4 bits keep one in each row."""

    def change(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        if "_proj" in name:
            tensor[:, 3] = 3.0
        yield name, tensor

    rewrite(place / "model/model.safetensors", change)


def other_weights(place: Path, names: Mapping[str, str | None] = MappingProxyType({}), rows: int = 300) -> None:
    """The weights of another model, some under other names or left out, or with fewer embeddings."""

    def change(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        if (new := names.get(name, name)) is not None:
            yield new, tensor[:rows].clone() if new == "model.embed_tokens.weight" else tensor

    copy(place, "model/config.json", "other/config.json")
    rewrite(place / "model/model.safetensors", change, place / "other/model.safetensors")


def peft_adapter(place: Path) -> None:
    """An adapter as peft saves it."""
    from tests.init_from.built import write_peft

    write_peft(place / "model", place / "other")


def poor_tokenizer(place: Path) -> None:
    """A tokenizer that has no token for an end and no template."""
    from tuner.config.recipe import TokenizerSection
    from tuner.data.encoding.tokenizer_files import load_tokenizer

    load_tokenizer(str(place / "model"), None, TokenizerSection(name_or_path="byte")).save(place / "tok")
    for path in (place / "tok").glob("*.json"):
        values = json.loads(path.read_text())
        if isinstance(values, dict) and values.pop("eos_token", None):
            path.write_text(json.dumps(values))
    (place / "tok" / "chat_template.jinja").unlink()


def teacher_of_other_tokens(place: Path) -> None:
    """A teacher with tokens of its own."""
    from tuner.config.recipe import TokenizerSection
    from tuner.data.encoding.tokenizer_files import load_tokenizer

    section = TokenizerSection(name_or_path="byte", add_tokens=("<other>",))
    load_tokenizer(str(place / "model"), None, section).save(place / "t/step-1")
    path = place / "t/step-1/tokenizer.json"
    path.write_text(path.read_text().replace("<|eos|>", "<|end|>"))


def published_points(place: Path) -> None:
    """Published points of a ladder."""
    from tests.ladder.made import Truth, ladder

    lines = [f"{one.rung},{one.parameters:.0f},{one.tokens:.0f},{one.figures['loss']}" for one in ladder(Truth())]
    (place / "points.csv").write_text("\n".join(["rung,parameters,tokens,loss", *lines]) + "\n")


ALL = (
    append, bytes_in_patches, causal_type, checkpoints_up_to, config, copy, cut_weights, directory, family, files,
    mixture, move, numbered, one_file_of_two, other_weights, outliers, overwrite, peft_adapter, pictures,
    poor_tokenizer, published_points, records, remove, repeated, saved, scaled, teacher_of_other_tokens,
)  # fmt: skip
CHANGES: Mapping[str, Callable[..., None]] = {change.__name__: change for change in ALL}
