"""Ask transformers which tokenizer it makes of a directory's files: `python -m tuner.transformers_tokenizer JOB`.

Whoever reads an export gets its tokenizer from `AutoTokenizer`. For many classes that is not what tokenizer.json says:
the class rebuilds its normalizer and pre-tokenizer by rules of its own, which depend on the model's type and on the
version of transformers. Training has to see the ids that the readers will see, so `data/` starts this module in a
process of its own (transformers would cost every command a second) and keeps the answer.

JOB is a directory with `source/` (the tokenizer's files, and the config.json next to them) and perhaps `model.json`
(the config.json of the model that is trained, which an export holds) and `use.json` (code of the user's own, which is
called with the loaded tokenizer and returns the one that is asked about). It receives `answer/`: answer.json, and the
files that replace those of the source so that every reader loads the same tokenizer, with or without config.json next
to it.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from tuner.data.encoding.tokenizer import SPECIAL_NAMES, TextTokenizer, declared_special_tokens, parse_json
from tuner.data.encoding.tokenizer_files import ANSWER, BESIDE_MODEL, OWN_CODE
from tuner.data.id_probes import adversarial_texts
from tuner.errors import PluginError, TunerError
from tuner.runtime.plugins import load, naming, require_call, source_file

Files = dict[str, bytes]
TOKENIZER, CONFIG, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
MODEL_CONFIG, TRAINED_CONFIG = "config.json", "model.json"
AS_WRITTEN = "PreTrainedTokenizerFast"
"""The class that takes tokenizer.json as it is, in every version of transformers."""
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_OF_THE_CLASS = ("padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces")
"""What a class sets that another might not."""
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s")
"""How a tiktoken file begins: a token in base64, and its rank."""


class _RefusedError(Exception):
    """Why there is no answer, for people."""


def main() -> int:
    """Answer the job named on the command line; the reason on stderr and exit code 1 where there is none.

    Where the machine cannot write or read, exit code 2, and the system's number of the error in the last line; for code
    of the user's own exit code 3, and its error there as JSON.
    """
    sys.modules["torch"] = None  # type: ignore[assignment] # no tokenizer needs it, and its import takes a second
    job = Path(sys.argv[1])
    try:
        facts, replaced = _answer(job)
        _write(job / "answer", {name: content for name, content in replaced.items() if content is not None})
        removed = sorted(name for name, content in replaced.items() if content is None)
        told = json.dumps({**facts, "removed": removed}, indent=2, sort_keys=True) + "\n"
        (job / "answer" / ANSWER).write_text(told)
    except PluginError as error:
        print(json.dumps({"message": error.message, "hint": error.hint}), file=sys.stderr)
        return 3
    except (_RefusedError, TunerError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(error.errno or 0, file=sys.stderr)
        return 2
    return 0


class _Form:
    """A tokenizer as the library holds it, without truncation and padding, which callers set for themselves."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    @cached_property
    def text(self) -> str:
        """As tokenizer.json would hold it, on one line."""
        return str(self._backend.to_str())

    @cached_property
    def deciding(self) -> dict[str, Any]:
        """What of it decides about ids, by the part of tokenizer.json; the post-processor by what it adds."""
        spec = orjson.loads(self.text)
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            spec["model"][key] = spec["model"].get(key) or None
        parts = {part: spec[part] if part == "model" else _without_offsets(spec[part]) for part in _PARTS}
        return {**parts, "post_processor": self._backend.encode("a").ids}

    def departures(self, other: "_Form") -> list[str]:
        """The parts in which the other gives other ids."""
        if self.text == other.text:
            return []
        return [part for part in self.deciding if self.deciding[part] != other.deciding[part]]

    def file(self) -> bytes:
        """As transformers writes tokenizer.json."""
        return str(self._backend.to_str(pretty=True)).encode()

    def digest(self) -> str:
        """SHA-256 of what decides about ids."""
        return hashlib.sha256(orjson.dumps(self.deciding, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _without_offsets(part: Any) -> Any:
    """Without the setting that moves character offsets alone."""
    if isinstance(part, dict):
        return {key: _without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
    return [_without_offsets(item) for item in part] if isinstance(part, list) else part


def _answer(job: Path) -> tuple[dict[str, Any], dict[str, bytes | None]]:
    """The facts, and the files that differ from the source's (None: one to be left out)."""
    # Templates in directories decide about no id.
    given = {path.name: path.read_bytes() for path in (job / "source").iterdir() if path.is_file()}
    own_config = given.pop(MODEL_CONFIG, None)
    trained = job / TRAINED_CONFIG
    source = {**given, **_plain_config(given)}
    written = _read(source)
    if written is None:
        _require_readable(given)
    loaded = _load(source, own_config, job)
    if (job / OWN_CODE).is_file():
        loaded, source, written = *_made(loaded, job), None
    form = _form(loaded, written)
    changed = None if written is None else written.departures(form)
    files = _special_tokens(source, loaded.special_tokens_map)
    if changed != []:
        files[TOKENIZER] = form.file()
    configs: list[bytes | None] = [_of_now(trained.read_bytes()), None] if trained.is_file() else [None]
    files = _loaded_alike(files, loaded, form, configs, job)
    _prove(files, loaded)
    replaced = {name: files.get(name) for name in given.keys() | files.keys() if files.get(name) != given.get(name)}
    return {"class": type(loaded).__name__, "changed": changed, "ids_sha256": form.digest()}, replaced


def _require_readable(files: Mapping[str, bytes]) -> None:
    """Check that files without tokenizer.json need no code of their own, and no missing package. _RefusedError."""
    auto_map = parse_json(files, CONFIG).get("auto_map")
    own = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    code = next((str(name) for name in (own if isinstance(own, list) else [own]) if name), None)
    if code is not None:
        # Without that code transformers cuts the text by another pattern: other ids than the model was trained with.
        raise _RefusedError(
            f"it is code of its own, {code}, which is never run, and it has no {TOKENIZER}: set tokenizer.name_or_path "
            f"to a directory with the {TOKENIZER} of that tokenizer"
        )
    models = [content for name, content in files.items() if name.endswith(".model")]
    package = "tiktoken" if any(map(_TIKTOKEN_LINE.match, models)) else "sentencepiece"
    if models and find_spec(package) is None:
        kind = "SentencePiece" if package == "sentencepiece" else package
        raise _RefusedError(f"its {kind} model is read by a package that is missing: pip install {package}")


def _load(files: Mapping[str, bytes], model_config: bytes | None, job: Path) -> Any:
    """The tokenizer as `AutoTokenizer` loads it from a directory of these files. Raises _RefusedError."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    auto: Any = transformers.AutoTokenizer
    with tempfile.TemporaryDirectory(dir=job) as directory:
        _write(Path(directory), {**files, **({} if model_config is None else {MODEL_CONFIG: model_config})})
        try:
            return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a class raises over files that it cannot read
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise _RefusedError(f"transformers cannot load it: {reason}") from error


def _made(loaded: Any, job: Path) -> tuple[Any, Files]:
    """What the user's code makes of a loaded tokenizer, and the files that it saves. Raises PluginError."""
    asked = json.loads((job / OWN_CODE).read_bytes())
    use, args = asked["use"], asked["args"]
    plugin = load(use, "tuner.tokenizers", Path("/"))
    require_call(plugin, use, ("tokenizer",), args)
    called = naming(f"tokenizer.use {use}", source_file(plugin), passing=(PluginError,))
    with tempfile.TemporaryDirectory(dir=job) as directory, called:
        made = plugin(loaded, **args)
        if not hasattr(made, "backend_tokenizer"):
            kind = type(made).__name__
            raise PluginError(f"tokenizer.use {use} returned a {kind}, and has to return a fast transformers tokenizer")
        made.save_pretrained(directory)
        saved = {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}
    return made, {**saved, **_plain_config(saved)}


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _read(files: Mapping[str, bytes]) -> _Form | None:
    """The tokenizer of tokenizer.json alone, where there is one. Raises _RefusedError."""
    if TOKENIZER not in files:
        return None
    try:
        return _Form(Tokenizer.from_str(files[TOKENIZER].decode()))
    except Exception as error:  # tokenizers raises bare Exception
        raise _RefusedError(f"{TOKENIZER}: {error}") from error


def _form(loaded: Any, written: _Form | None) -> _Form:
    """The Rust tokenizer of one of transformers'; of a class in Python, what tokenizer.json says. _RefusedError."""
    if hasattr(loaded, "backend_tokenizer"):
        return _Form(loaded.backend_tokenizer)
    if written is None:
        raise _RefusedError(f"transformers loads it with {type(loaded).__name__}, which has no tokenizer.json")
    return written


def _plain_config(files: Mapping[str, bytes]) -> Files:
    """tokenizer_config.json without code of its own, which is never run, and with control tokens left in force."""
    if CONFIG not in files:
        return {}
    config = parse_json(files, CONFIG)
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "split_special_tokens")}
    return {CONFIG: files[CONFIG] if kept == config else _bytes(kept)}


def _special_tokens(files: Mapping[str, bytes], loaded: Mapping[str, str]) -> Files:
    """The files with every special token of the class named in tokenizer_config.json, where they say otherwise."""
    config = parse_json(files, CONFIG)
    wanted = {name: loaded[name] for name in SPECIAL_NAMES if name in loaded}
    if declared_special_tokens(config, parse_json(files, SPECIAL_MAP)) == wanted:
        return dict(files)
    own = declared_special_tokens(config, {})
    named = {name: wanted.get(name) for name in SPECIAL_NAMES if own.get(name) != wanted.get(name)}
    others = {name: content for name, content in files.items() if name != SPECIAL_MAP}
    return {**others, CONFIG: _bytes({**config, **named})}


def _loaded_alike(files: Files, loaded: Any, form: _Form, configs: list[bytes | None], job: Path) -> Files:
    """The files, of a class with which they are loaded to the same tokenizer next to each of the configs.

    Their own class stays where it does that. Raises _RefusedError where no class does.
    """
    for candidate in (files, {**files, **_as_written(files, loaded)}):
        with suppress(_RefusedError):
            if all(_is_alike(_load(candidate, config, job), loaded, form) for config in configs):
                return candidate
    kinds = sorted({str(json.loads(config).get("model_type")) for config in configs if config is not None})
    raise _RefusedError(
        f"transformers loads it as {type(loaded).__name__}, and {BESIDE_MODEL} ({', '.join(kinds)}) next "
        "to it as another class with other ids: no reader of an export would see the ids of training"
    )


def _is_alike(other: Any, loaded: Any, form: _Form) -> bool:
    same = hasattr(other, "backend_tokenizer") and other.special_tokens_map == loaded.special_tokens_map
    return same and not form.departures(_Form(other.backend_tokenizer))


def _as_written(files: Mapping[str, bytes], loaded: Any) -> Files:
    """tokenizer_config.json of the class that rebuilds nothing, with what the other class set besides."""
    config = parse_json(files, CONFIG)
    of_class = {key: getattr(loaded, key) for key in _OF_THE_CLASS if hasattr(loaded, key)}
    return {CONFIG: _bytes({**of_class, **config, "tokenizer_class": AS_WRITTEN})}


def _of_now(config: bytes) -> bytes:
    """config.json as an export has it: of the version of transformers that writes it."""
    import transformers

    return _bytes({**json.loads(config), "transformers_version": transformers.__version__})


def _prove(files: Mapping[str, bytes], loaded: Any) -> None:
    """Encode adversarial texts both ways. Raises _RefusedError for the first that differs."""
    ours = TextTokenizer(files, "")  # ids alone: the recipe may put another template in the place of theirs
    for text in adversarial_texts(ours):
        for framed in (False, True):
            expected = list(loaded(text, add_special_tokens=framed)["input_ids"])
            if ours.encode(text, add_special_tokens=framed) != expected:
                raise _RefusedError(
                    f"{type(loaded).__name__} of transformers gives other ids for {text!r} than its files say"
                )


def _bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
