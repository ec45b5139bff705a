"""The teacher of a distillation: a frozen model that is built, given kernels and sharded as the student is.

What is made of it is in :mod:`tuner.setup.build`.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tuner.config.methods import DistillMethod
from tuner.config.recipe import NoAdapter, TokenizerSection
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.tokenizer_files import holds_tokenizer, load_tokenizer, tokenizer_directory
from tuner.data.id_probes import text_probes
from tuner.errors import DataError, RecipeError, TunerError
from tuner.model.build import ModelSpec, meta_model, model_config
from tuner.model.kernels import has_liger
from tuner.rundir.checkpoints import version_dirs
from tuner.runtime.files import read_json
from tuner.runtime.safetensors_header import read_header
from tuner.setup.precision import frozen_dtype
from tuner.setup.resolve import Resolved, route_for

READ = (
    "config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""What is read of a teacher besides weights: its config, vocabularies, and what else a tokenizer may consist of."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def teacher_of(resolved: Resolved, method: DistillMethod) -> Resolved:
    """The resolved recipe with the teacher in the place of its model; frozen weights have the type of the products."""
    recipe = resolved.recipe
    spec = teacher_model(method) if resolved.teacher is None else ModelSpec(resolved.teacher)
    config = model_config(spec)
    kernels = "torch" if recipe.model.kernels == "liger" and not has_liger(config.model_type) else recipe.model.kernels
    changed: dict[str, Any] = {
        "name_or_path": spec.name_or_path, "revision": spec.revision, "init": "pretrained", "config": {},
        "dtype": frozen_dtype(recipe.train.precision, resolved.facts), "quantize": "none", "kernels": kernels,
        "freeze": (), "init_from": (),
    }
    model = recipe.model.model_copy(update=changed)
    data = recipe.data.model_copy(update={"packing": "auto" if recipe.data.packs_rows else False})
    own = recipe.model_copy(update={"model": model, "adapter": NoAdapter(), "data": data})
    route, _ = route_for(own, meta_model(config, torch.float32))
    return replace(resolved, recipe=own, config=config, new_ids=range(0), route=route)


def teacher_model(method: DistillMethod) -> ModelSpec:
    """The teacher as the model package takes it: of several versions the newest. Raises RecipeError without one."""
    if method.teacher_every is None:
        return ModelSpec(method.teacher, method.teacher_revision)
    return ModelSpec(str(newest_teacher(Path(method.teacher))))


def newest_teacher(directory: Path) -> Path:
    """The newest whole `step-N` of a directory of versions. Raises RecipeError where there is none."""
    problems = []
    for _, path in version_dirs(directory):
        if (problem := incomplete(path)) is None:
            return path
        problems.append(f"; {path.name} {problem}")
    raise RecipeError(
        f"method.teacher: {directory} holds no version of a teacher (a directory step-N with a model)"
        + next(iter(problems), ""),
        hint="name the exports of a run, such as runs/NAME/exports, and export once; or leave out teacher_every",
    )


def incomplete(version: Path, names: Collection[str] = ()) -> str | None:
    """What a version lacks that is being copied, in words; None where it is whole.

    It has the files ``names`` of those in `READ`, a config, a tokenizer, and every file of weights to its last byte.
    """
    missing = next((name for name in ("config.json", *sorted(names)) if not (version / name).is_file()), None)
    if missing is not None:
        return f"holds no {missing}"
    if not any((version / name).is_file() for name in READ[1:5]):
        return "holds no tokenizer"
    try:
        for name in READ:
            if name.endswith(".json") and (version / name).is_file():
                read_json(version / name)
        index = version / INDEX
        files = set(read_json(index)["weight_map"].values()) if index.is_file() else {WEIGHTS}
        cut = next((name for name in sorted(files) if not _is_whole(version / Path(name).name)), None)
    except (DataError, KeyError, AttributeError):
        return "holds JSON that is not whole"
    return None if cut is None else f"holds no whole {cut}"


def files_read(version: Path) -> frozenset[str]:
    """The files of `READ` that a version has, as every later one must."""
    return frozenset(name for name in READ if (version / name).is_file())


def _is_whole(weights: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    with suppress(DataError, OSError, SafetensorError):
        read_header(weights)  # which refuses what no reader is to be given
        with safe_open(weights, "pt"):
            return True
    return False


def check_teacher(method: DistillMethod, student: TextTokenizer, cache_dir: Path) -> None:
    """Check that teacher and student read the same tokens, and that the teacher has a probability for each.

    Their vocabularies may be padded to different sizes. Raises RecipeError with the first difference.
    """
    spec = teacher_model(method)
    with blaming_teacher():
        embedded = int(model_config(spec).get_text_config().vocab_size)
        directory = tokenizer_directory(spec.name_or_path, spec.revision)
        if not holds_tokenizer(directory):
            raise DataError(
                f"{directory} holds no tokenizer, by which its tokens are compared with the student's",
                hint="copy the files of its tokenizer there (tokenizer.json, tokenizer_config.json)",
            )
        taught = load_tokenizer(spec.name_or_path, spec.revision, TokenizerSection(), cache_dir)
    difference = _difference(student, taught)
    if difference is None and student.vocab_size > embedded:
        difference = f"it has {embedded:,} embeddings for {student.vocab_size:,} tokens"
    if difference is not None:
        raise RecipeError(
            f"method.teacher: {spec.name_or_path} reads other tokens than the student: {difference}",
            hint="take a teacher of the student's family, or train the student with the teacher's tokenizer: "
            "tokenizer.name_or_path",
        )


def _difference(student: TextTokenizer, teacher: TextTokenizer) -> str | None:
    """What two tokenizers do not have in common of what decides ids; None where every id means the same."""
    if student.hash == teacher.hash:
        return None
    for token_id in range(student.vocab_size):
        own, other = student.token(token_id), teacher.token(token_id)
        if own != other:
            return f"id {token_id:,} is {own!r} to the student and {other!r} to the teacher"
    for probe in text_probes(student):
        if (ids := teacher.encode(probe.text)) != probe.ids:
            return f"{probe.text!r} is {probe.ids[:8]} to the student and {ids[:8]} to the teacher"
    return None


@contextmanager
def blaming_teacher() -> Iterator[None]:
    """What is wrong with the teacher is no fault of `model.name_or_path`."""
    try:
        yield
    except TunerError as error:
        message = error.message.replace("model.name_or_path", "method.teacher")
        named = message if "method.teacher" in message else f"method.teacher: {message}"
        raise type(error)(named, error.hint) from error
