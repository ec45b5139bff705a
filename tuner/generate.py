"""Text from a model, for people to look at: prompts through the tokenizer's chat template, answers token by token."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors import SafetensorError

from tuner.data.encoding.template import EndlessTemplateError, LoadedTemplates
from tuner.errors import DataError, MachineError, RecipeError, first_line
from tuner.export.source import ExportSource, resolve
from tuner.export.weights import DTYPES, base_of_kind, load_trained
from tuner.export.write import ends_of, load_tokenizer, quiet
from tuner.model.build import auto_model, position_limit
from tuner.model.tokens import resize_embeddings
from tuner.model.vetting import vet_adapter, vet_config, vet_patterns, vet_weights
from tuner.rundir.checkpoints import LINEAGE
from tuner.rundir.layout import MODEL_CONFIG, TOKENIZER
from tuner.rundir.model_path import RunCheckpoint, Warn, ignore_warning, is_run_path, resolve_model_path
from tuner.runtime.files import read_json, sha256_file, unlinked
from tuner.stages import cache_root

Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the most likely at temperature 0, else drawn with the seed; at most `max_new_tokens`.

    They are drawn from the `top_k` most likely (0: from all), and of these from the fewest whose probabilities add up
    to `top_p`.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 42
    top_p: float = 1.0
    top_k: int = 0

    def check(self) -> None:
        """Raise RecipeError for values that there are not, or that do nothing."""
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise RecipeError("sampling takes max_new_tokens above 0, temperature and top_k from 0, top_p in (0, 1]")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise RecipeError("top-p and top-k do nothing at temperature 0", hint="add --temperature 0.7")

    def times(self, samples: int) -> list[Sampling]:
        """This one and others with the next seeds. Raises RecipeError for several at temperature 0, which are alike."""
        if samples > 1 and self.temperature == 0:
            raise RecipeError(f"{samples} samples at temperature 0 are the same answer", hint="add --temperature 0.7")
        return [replace(self, seed=self.seed + number) for number in range(samples)]


@dataclass(frozen=True)
class Prompt:
    """Messages for a chat template, or plain text to continue; `shown` is what people see of it."""

    shown: str
    messages: tuple[Message, ...] = ()
    text: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a model answered, without end tokens; `cut` where it stopped at the limit and not at an end of its own."""

    text: str
    tokens: int
    cut: bool


class _Shown(transformers.TextStreamer):
    """Hands on each piece of text once it cannot change any more."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show, self.shown = show, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on a piece of text."""
        if text:
            self.shown += text
            self._show(text)


@dataclass
class Generator:
    """A loaded model with its tokenizer and every token id that ends a turn."""

    model: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer renders messages."""
        return self.tokenizer.chat_template is not None

    @cached_property
    def _templates(self) -> LoadedTemplates:
        return LoadedTemplates(self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt, opened for the model's answer. Raises RecipeError for an empty prompt."""
        if prompt.text is not None or not self.has_template:
            text = prompt.text if prompt.text is not None else "\n".join(m["content"] for m in prompt.messages)
            ids = self.tokenizer(text)["input_ids"]
        else:
            try:
                text = self._templates.render(prompt.messages, True)
            except EndlessTemplateError:
                raise
            except DataError as error:
                raise RecipeError(error.message) from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise RecipeError("the prompt is empty")
        return list(ids)

    def answer(self, prompt: Prompt, sampling: Sampling) -> str:
        """The text of the model's answer. The same prompt, sampling and device give the same one."""
        return self.generate(prompt, sampling).text

    @torch.no_grad()
    def generate(self, prompt: Prompt, sampling: Sampling, show: Callable[[str], None] | None = None) -> Answer:
        """The model's answer; `show` gets it piece by piece as it is made.

        With `show`, KeyboardInterrupt ends the answer, which is then what was shown, and cut. Raises RecipeError for a
        prompt that fills the model.
        """
        sampling.check()
        ids = self.encode(prompt)
        limit = position_limit(self.model.config)
        room = sampling.max_new_tokens if limit is None else min(sampling.max_new_tokens, limit - len(ids))
        if room <= 0:
            raise RecipeError(f"the prompt has {len(ids):,} tokens, the model takes {limit:,}")
        given = torch.tensor([ids], dtype=torch.int64, device=self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(sampling.seed)
            streamer = None if show is None else _Shown(self.tokenizer, show)
            try:
                output = self.model.generate(
                    input_ids=given, attention_mask=torch.ones_like(given),
                    generation_config=self._config(sampling, room), streamer=streamer,
                )
            except KeyboardInterrupt:
                if streamer is None:
                    raise
                return Answer(streamer.shown, 0, cut=True)
        made = output[0, len(ids) :]
        text = self.tokenizer.decode(made, skip_special_tokens=True)
        is_cut = len(made) >= room and int(made[-1]) not in self.eos_ids
        return Answer(text if isinstance(text, str) else "".join(text), len(made), is_cut)

    def _config(self, sampling: Sampling, room: int) -> transformers.GenerationConfig:
        ends = list(self.eos_ids) or None
        pad = self.tokenizer.pad_token_id
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        choice = drawn if sampling.temperature > 0 else {}
        return transformers.GenerationConfig(
            max_new_tokens=room, eos_token_id=ends, pad_token_id=pad if pad is not None else (ends[0] if ends else 0),
            use_cache=True, do_sample=bool(choice), **choice,
        )


def load_generator(
    name_or_path: str, revision: str | None = None, base: str | None = None, warn: Warn = ignore_warning
) -> Generator:
    """Load a run, a checkpoint, a Hugging Face directory or a hub name, on CUDA (bf16) or else the CPU (float32).

    An adapter directory goes onto `base` or the model that it names. A run is read in float32, into the host's memory,
    and rounded as its export would be on the way to CUDA; `warn` is called where it is not finished. Raises RecipeError
    for a directory that holds no model, DataError for one that does not load, MachineError for a name that cannot be
    fetched.
    """
    path = Path(name_or_path)
    if path.is_dir() or path.is_absolute() or name_or_path.startswith(("./", "../", "~")):
        found = resolve_model_path(path, warn)
        if isinstance(found, RunCheckpoint):
            source = ExportSource.of(found)
            _require_text(name_or_path, source.head == "tokens")
            return _from_run(source)
    device, dtype = _device()
    with _readable_errors(name_or_path), quiet():
        if (path / "adapter_config.json").is_file():
            model = _with_adapter(path, base, dtype)
        else:
            model = _plain_model(name_or_path, revision, dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
        defaults = _generation_defaults(name_or_path, revision)
    return make_generator(model, tokenizer, defaults, device)


def make_generator(
    model: Any, tokenizer: transformers.PreTrainedTokenizerBase, defaults: transformers.GenerationConfig | None,
    device: torch.device,
) -> Generator:
    """A generator from loaded parts; the ends of a turn are those of the defaults, config, tokenizer and template."""
    own = [getattr(part, "eos_token_id", None) for part in (model.config, model.config.get_text_config())]
    ends = ends_of(tokenizer, getattr(defaults, "eos_token_id", None), own[0] or own[1])
    # Sampling defaults that a model ships must not reach greedy answers: only `Sampling` decides.
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends or None)
    return Generator(model.to(device).eval(), tokenizer, tuple(ends), device)


def _from_run(source: ExportSource) -> Generator:
    device, dtype = _device()
    with quiet():
        model = load_trained(source)
        _place(model, device, dtype)
        model.set_attn_implementation("sdpa")
        tokenizer = load_tokenizer(source.run_dir / TOKENIZER)
        defaults = _generation_defaults(str(source.run_dir / MODEL_CONFIG), None)
    return make_generator(model, tokenizer, defaults, device)


@torch.no_grad()
def _place(model: transformers.PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Round parameters and take them to the device one by one, so that it never holds a wide copy of the model.

    Buffers stay as they are: what a model computes itself, such as the frequencies of its rotations, is not rounded.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype).to(device)


def _with_adapter(path: Path, base: str | None, dtype: torch.dtype) -> Any:
    vet_adapter(path)
    facts = read_json(path / "adapter_config.json")
    _require_text(str(path), facts.get("task_type") != "SEQ_CLS")
    name, revision = base or facts.get("base_model_name_or_path"), None if base else facts.get("revision")
    if not name:
        name, revision = base_of(str(path))
    if os.path.isabs(str(name)) and not Path(str(name)).is_dir():
        raise RecipeError(f"{path}: its base model is gone: {name}", hint="name it: --base MODEL")
    model = _plain_model(name, revision, dtype)
    _quantize(model, path)
    # What it holds of new tokens belongs to ids that the base model has no rows for.
    resize_embeddings(model, len(load_tokenizer(path)))
    vet_patterns(path, [name for name, _ in model.named_modules()])
    try:
        return PeftModel.from_pretrained(model, str(path))
    except Exception as error:  # peft raises whatever its config leads to
        raise DataError(f"{path}: cannot be loaded: {first_line(error)}") from error


@torch.no_grad()
def _quantize(model: transformers.PreTrainedModel, adapter: Path) -> None:
    """Turn the weights of an adapter's base into what it was trained on, where that was quantised, in their type."""
    found = read_json(adapter / LINEAGE).get("quantized_base") if (adapter / LINEAGE).is_file() else None
    if not isinstance(found, Mapping):
        return

    base = base_of_kind(str(found.get("kind")), model, tuple(found.get("left_out") or ()))
    base.apply(model, DTYPES.get(str(found.get("dtype")), torch.float32))


def _plain_model(name_or_path: str, revision: str | None, dtype: torch.dtype) -> transformers.PreTrainedModel:
    vet_config(name_or_path, revision)
    vet_weights(name_or_path, revision)
    named = transformers.PretrainedConfig.get_config_dict(name_or_path, revision=revision)[0].get("architectures") or ()
    _require_text(name_or_path, not any("ForSequenceClassification" in str(name) for name in named))
    config = transformers.AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
    model: transformers.PreTrainedModel = auto_model("tokens", config).from_pretrained(
        name_or_path, revision=revision, dtype=dtype, use_safetensors=True, trust_remote_code=False
    )
    return model


def _require_text(name: str, writes: bool) -> None:
    if not writes:
        raise RecipeError(
            f"{name}: is a reward model: it scores text and writes none",
            hint=f"measure how it ranks held-out pairs: tuner eval {name} RECIPE",
        )


def _generation_defaults(name_or_path: str, revision: str | None) -> transformers.GenerationConfig | None:
    with contextlib.suppress(OSError):
        return transformers.GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")
    return None


def _device() -> tuple[torch.device, torch.dtype]:
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


@contextlib.contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        if Path(name).is_dir():
            raise DataError(f"{name}: cannot be loaded: {reason}") from error
        raise MachineError(
            f"{name}: cannot be fetched or loaded: {reason}", hint="check the name and the network"
        ) from error


def base_record(lineage_sha256: str) -> Path:
    """Where this machine keeps the local base model of an export with this `tuner.json`. DataError for a link there."""
    return unlinked(cache_root(), "exports", f"{lineage_sha256}.json")


def base_of(name_or_path: str) -> tuple[str, str | None]:
    """Base model, and its revision, from which a run, a checkpoint or an export was trained.

    An export inside its run directory asks the run; any other asks its lineage, then this machine's record. Raises
    RecipeError where nobody knows.
    """
    path = Path(name_or_path).absolute()
    run = next((each for each in (path, path.parent.parent) if is_run_path(each)), None)
    if run is not None:
        source = resolve(run)
        if source.is_random:
            raise RecipeError(f"{name_or_path}: was trained from random weights and has no base")
        return source.name_or_path, source.revision
    hint = "name it: --base MODEL"
    if not (path / LINEAGE).is_file():
        raise RecipeError(f"{name_or_path}: does not say from which model it was trained", hint=hint)
    base = read_json(path / LINEAGE).get("base_model") or {}
    if base.get("name"):
        return str(base["name"]), base.get("revision")
    record = base_record(sha256_file(path / LINEAGE))
    if not record.is_file():
        raise RecipeError(
            f"{name_or_path}: was trained from a local directory that this machine does not know", hint=hint
        )
    noted = read_json(record)
    return str(noted.get("base")), noted.get("revision")
