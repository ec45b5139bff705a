"""The files of a tokenizer: where they are, what transformers makes of them, and the tokenizer that they are.

What transformers loads is not what tokenizer.json says for many classes: `tuner.transformers_tokenizer` asks it, in a
process of its own, once for each tokenizer and version. The answers are kept in the cache, those of other versions too:
what changes from one version to the next is seen. The chat templates that a recipe may name ship with the program.

    <cache>/tokenizers/<files>/<version of transformers>-<format>/    answer.json, and the files it replaces
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.data.encoding.template import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from tuner.data.encoding.tokenizer import TextTokenizer, byte_files, require_ids, with_control_tokens, with_tokens
from tuner.errors import DataError, MachineError, PluginError
from tuner.runtime import files as disk
from tuner.runtime.lock import FileLock
from tuner.stages import cache_root

if TYPE_CHECKING:
    from tuner.config.recipe import TokenizerSection


BESIDE_MODEL = "with the config of the model"
"""What is said of a tokenizer that another class of transformers takes over next to the model that is trained."""
OWN_CODE = "use.json"
"""In a job: the code of the user's own that is called with the tokenizer, and its arguments."""
FORMAT = 2
"""Counts up when the same files and version would get another answer."""
ANSWER = "answer.json"
# What AutoTokenizer reads of a config.json to choose the class.
_CHOOSING = ("model_type", "model_name", "tokenizer_class")
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", TEMPLATE_FILE, TOOL_TEMPLATE_FILE),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "tiktoken.model"),
)


def load_tokenizer(
    model_path: str, revision: str | None, tokenizer: "TokenizerSection", cache_dir: Path | None = None
) -> TextTokenizer:
    """Read the recipe's tokenizer, as transformers loads it: its own, `byte`, or the model's.

    `model_path` is a directory or a hub name; a hub name is the only thing that reaches for the network, and only
    what the local cache lacks. What transformers makes of the files is kept in `cache_dir`, else `cache_root()`.
    Code of the user's own runs in a process of its own, and what it returns takes the place of what was loaded. Control
    tokens that a named template writes and the tokenizer lacks are added to it, after those of the recipe. Raises
    DataError where the files are missing or wrong, PluginError for such code.
    """
    template = None if tokenizer.chat_template is None else template_source(tokenizer.chat_template)
    named = named_template(tokenizer.chat_template)
    own = tokenizer.name_or_path is not None and str(tokenizer.name_or_path) != model_path
    cache = cache_dir or cache_root()
    if tokenizer.name_or_path == "byte":
        beside = _model_config(model_path, revision)
        context = _LoadContext("tokenizer.name_or_path: byte", None, beside, cache, model_path)
        files, ends = byte_files(), []
    else:
        directory = tokenizer_directory(str(tokenizer.name_or_path) if own else model_path, None if own else revision)
        config = _config(directory)
        beside = _model_config(model_path, revision) if own else config
        context = _LoadContext(str(directory), config, beside, cache, model_path)
        files, ends = _read_files(directory, own), _model_eos_ids(directory)
    files, loaded = context.as_loaded(files) if tokenizer.use is None else context.as_made(files, tokenizer)
    new_ids = range(0)
    if tokenizer.add_tokens or (named is not None and named.tokens):
        grown, added = with_control_tokens(files, tokenizer.add_tokens, () if named is None else named.tokens)
        if added:
            grown, new_ids = with_tokens(grown, added)
        if grown is not files:
            files, _ = context.as_loaded(grown)
            require_ids(files, added, new_ids)
    origin = context.name if template is None else f"tokenizer.chat_template: {tokenizer.chat_template}"
    found = TextTokenizer(files, template, ends, new_ids=new_ids, loaded_as=loaded, origin=origin)
    if named is not None:
        named.require_end(found.special_tokens, context.name)
    return found


def tokenizer_directory(name_or_path: str, revision: str | None) -> Path:
    """Return the local directory of a tokenizer, fetching a hub name's tokenizer files into the hub's cache."""
    if Path(name_or_path).is_dir():
        disk.require_small_configs(Path(name_or_path))
        return Path(name_or_path)
    if name_or_path.startswith(("/", ".", "~")):
        raise DataError(f"{name_or_path}: no such directory")
    from huggingface_hub import errors, snapshot_download

    patterns = [*_FILES, "config.json", "generation_config.json"]
    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=patterns))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        raise MachineError(
            f"{name_or_path}: not a directory, and not available from the hub: {str(error).splitlines()[0]}",
            hint="give a local directory, or check the name and the network",
        ) from error


def holds_tokenizer(directory: Path) -> bool:
    """Whether a directory has any of a tokenizer's files."""
    return any((directory / name).is_file() for name in _FILES)


def local_directory(name_or_path: str) -> Path | None:
    """The directory of a model, its own or the hub's cache of it; None where it is not on this machine."""
    directory = Path(name_or_path)
    if directory.is_dir():
        return directory
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name_or_path, "tokenizer.json")
    except errors.HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def local_files(name_or_path: str) -> dict[str, bytes]:
    """The files of a model's tokenizer and its config.json by name, where they are on this machine; else nothing.

    Of a hub name only what is in the hub's cache is seen; the network is left alone.
    """
    directory = local_directory(name_or_path)
    if directory is None:
        return {}
    return {name: (directory / name).read_bytes() for name in (*_FILES, "config.json") if (directory / name).is_file()}


def _read_files(directory: Path, is_named: bool) -> dict[str, bytes]:
    """The files of a tokenizer by name, of a directory `is_named` by tokenizer.name_or_path. DataError without any."""
    files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    if not files:
        raise DataError(f"{directory}: holds no tokenizer", hint=without_files(is_named))
    return files


def without_files(is_named: bool) -> str:
    """What to do about a directory without a tokenizer, which may be what `tokenizer.name_or_path` names."""
    if is_named:
        return "name a directory with a tokenizer.json, or write tokenizer.name_or_path: byte, which needs no files"
    return "set tokenizer.name_or_path (`byte` needs no files)"


@dataclass(frozen=True)
class _LoadContext:
    """What decides, besides its files, how a tokenizer is loaded."""

    name: str
    """For people."""
    config: bytes | None
    """The config.json next to the files."""
    model_config: bytes | None
    """That of the trained model, next to which they will be exported: both decide about the class."""
    cache_dir: Path
    model_path: str

    def as_loaded(self, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
        """The files with which every reader gets the tokenizer that transformers makes of `files`, and what that is.

        Files that are loaded as they are come back as they are. Raises DataError where transformers cannot load them,
        or not alike everywhere.
        """
        now = version("transformers")
        root = disk.unlinked(self.cache_dir, "tokenizers", self._key(files))
        directory = disk.unlinked(root, f"{now}-{FORMAT}")
        answer, replaced = _kept(directory) or self._ask(files, directory)
        return _merged(files, answer, replaced), {**_facts(answer), "other_versions": list(_others(root, answer))}

    def as_made(
        self, files: Mapping[str, bytes], tokenizer: "TokenizerSection"
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """The same of the tokenizer that code of the user's own makes of the one that is loaded.

        It is asked each time: what it returns may follow from more than its file and its arguments say. Raises
        PluginError for what it raises or returns, and DataError.
        """
        place = Path(tempfile.gettempdir())
        with disk.machine_errors(place), disk.scratch_dir(disk.TMP_PREFIX, place) as job:
            (job / OWN_CODE).write_bytes(disk.json_bytes({"use": tokenizer.use, "args": tokenizer.args}))
            answer, replaced = self._answered(files, job)
        return _merged(files, answer, replaced), {**_facts(answer), "use": tokenizer.use, "other_versions": []}

    def _key(self, files: Mapping[str, bytes]) -> str:
        """A hash of everything that decides how the files are loaded, but for the version of transformers."""
        digest = hashlib.sha256()
        for name in sorted(files.keys() - {TEMPLATE_FILE, TOOL_TEMPLATE_FILE}):
            digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
        own = _chosen_by(self.config, (*_CHOOSING, "transformers_version"))
        digest.update(json.dumps([own, _chosen_by(self.model_config, _CHOOSING)]).encode())
        return digest.hexdigest()[:16]

    def _ask(self, files: Mapping[str, bytes], directory: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Ask transformers in a child process, and keep the answer where the cache can be written. Raises DataError."""
        with _locked(directory.parent) as is_kept:
            if is_kept and (kept := _kept(directory)) is not None:
                return kept  # another process asked meanwhile
            place = directory.parent if is_kept else Path(tempfile.gettempdir())
            with disk.machine_errors(place), disk.scratch_dir(disk.TMP_PREFIX, place) as job:
                answer, replaced = self._answered(files, job)
                if is_kept:
                    disk.discard_dir(directory)
                    disk.publish_dir(job / "answer", directory)
        return answer, replaced

    def _answered(self, files: Mapping[str, bytes], job: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The child's answer to a job of these files, also in the directory `answer` of it, and the files in that."""
        configs = {"source/config.json": self.config, "model.json": self.model_config}
        for path, content in {**{f"source/{file}": content for file, content in files.items()}, **configs}.items():
            if content is not None:
                (job / path).parent.mkdir(parents=True, exist_ok=True)
                (job / path).write_bytes(content)
        self._run(job)
        answers = job / "answer"
        answer = {**disk.read_json(answers / ANSWER), "files": disk.file_entries(answers, exclude=(ANSWER,))}
        disk.write_atomic(answers / ANSWER, disk.json_bytes(answer))
        return answer, {file: (answers / file).read_bytes() for file in answer["files"]}

    def _run(self, job: Path) -> None:
        """Run the child on a job. Raises DataError with the child's reason, and its OSError."""
        # tiktoken would keep what it reads in a directory of a fixed name in /tmp.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}
        command = [sys.executable, "-m", "tuner.transformers_tokenizer", str(job)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        reason = (result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"])[-1]
        if result.returncode == 2 and reason.isdigit():
            raise OSError(int(reason), os.strerror(int(reason)))
        if result.returncode == 3:
            raise PluginError(**json.loads(reason))
        if result.returncode:
            text = f"{self.name}: the tokenizer cannot be loaded as its readers would load it: {reason}"
            raise DataError(text, hint=self._way_out() if BESIDE_MODEL in reason else None)

    def _way_out(self) -> str | None:
        """What to write where the class of the model's own tokenizers takes over the one that is named."""
        if self.config == self.model_config:
            return None
        if any(local_files(self.model_path).keys() - {"config.json"}):
            return f"leave out tokenizer.name_or_path: {self.model_path} has a tokenizer of its own"
        return (
            "name a tokenizer of the model's own family; with model.init: random, the config of a type without "
            "tokenizers of its own, such as llama, goes with any"
        )


def _merged(files: Mapping[str, bytes], answer: Mapping[str, Any], replaced: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in {**files, **replaced}.items() if name not in answer["removed"]}


def _facts(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"transformers": version("transformers"), "class": answer["class"], "changed": answer["changed"]}


def _chosen_by(config: bytes | None, keys: tuple[str, ...]) -> list[Any] | None:
    if config is None:
        return None
    try:
        facts = json.loads(config)
    except (ValueError, RecursionError):
        return ["unreadable", hashlib.sha256(config).hexdigest()]
    return [facts.get(key) for key in keys] if isinstance(facts, dict) else ["no object"]


def _kept(directory: Path) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """The answer of a directory and the files in it; None where there is none or it is damaged."""
    with suppress(DataError, OSError, KeyError, TypeError, AttributeError):
        disk.regular_size(directory / ANSWER)
        answer = disk.read_json(directory / ANSWER)
        disk.verify_entries(directory, answer["files"], hash=True)
        return answer, {name: (directory / name).read_bytes() for name in answer["files"]}
    return None


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold the lock of a tokenizer's answers for the length of the block; false where nothing can be written there.

    The answer is then asked for again the next time. What killed processes left goes.
    """
    with ExitStack() as held:
        is_kept = False
        with suppress(OSError, MachineError):
            root.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(root / ".lock"))
            disk.sweep(root)
            is_kept = True
        yield is_kept


def _others(root: Path, answer: Mapping[str, Any]) -> Iterator[str]:
    """Versions of transformers with other ids, of those whose answers are kept."""
    for path in sorted(root.glob(f"*-{FORMAT}/{ANSWER}")):
        with suppress(DataError):
            disk.regular_size(disk.unlinked(root, path.parent.name, ANSWER))
            if disk.read_json(path).get("ids_sha256") != answer["ids_sha256"]:
                yield path.parent.name.removesuffix(f"-{FORMAT}")


def _config(directory: Path) -> bytes | None:
    path = directory / "config.json"
    if not path.is_file():
        return None
    disk.read_json(path)
    return path.read_bytes()


def _model_config(model_path: str, revision: str | None) -> bytes | None:
    """The model's config.json; None where the model is not here, which is said where the model is needed."""
    with suppress(DataError, MachineError):
        return _config(tokenizer_directory(model_path, revision))
    return None


def _model_eos_ids(directory: Path) -> list[int]:
    paths = (directory / name for name in ("generation_config.json", "config.json"))
    values = [disk.read_json(path).get("eos_token_id") for path in paths if path.is_file()]
    every = (i for value in values for i in (value if isinstance(value, list) else [value]))
    return list(dict.fromkeys(i for i in every if isinstance(i, int)))


DIRECTORY = Path(__file__).resolve().parents[1] / "templates"
_CONTROL_TOKENS = DIRECTORY / "control_tokens.json"
"""The control tokens that each template writes, besides the tokenizer's own bos_token and eos_token."""


class NamedTemplate(NamedTuple):
    """A built-in template."""

    name: str
    source: str
    tokens: Sequence[str]
    """Control tokens that it writes; a tokenizer that lacks one is given it."""

    def require_end(self, special_tokens: Mapping[str, str], where: str) -> None:
        """Check that a tokenizer has the eos_token with which the template ends answers, if it does. DataError."""
        if "eos_token" in self.source and "eos_token" not in special_tokens:
            raise DataError(
                f"{where}: the template {self.name} ends answers with the tokenizer's eos_token, and it has none",
                hint="write tokenizer.chat_template: chatml, which brings its own end of turn",
            )


def named_template(name: str | None) -> NamedTemplate | None:
    """Return the built-in template of this name; None for a path."""
    if name not in CHAT_TEMPLATES:
        return None
    source = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    return NamedTemplate(name, source, tuple(json.loads(_CONTROL_TOKENS.read_bytes()).get(name, ())))


def template_source(name_or_path: str) -> str:
    """Return the source of a template by its name, or from its file. DataError."""
    named = named_template(name_or_path)
    if named is not None:
        return named.source
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(
            f"tokenizer.chat_template: {name_or_path}: {reason}",
            hint=f"name a file, or a template: {', '.join(CHAT_TEMPLATES)}",
        ) from error
