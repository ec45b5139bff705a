"""Write a GGUF file next to its place, have llama.cpp answer from it, and publish it with one rename.

llama.cpp is the trained model with the file where its ids, its chats, where it stops and its log-probabilities are.
"""

import importlib.metadata
import itertools
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch

import tuner
from tuner.data.encoding.template import LoadedTemplates
from tuner.errors import DataError, MachineError, RecipeError
from tuner.export.gguf import engine, file, lora, vocabulary
from tuner.export.gguf.architecture import Architecture, other_steps
from tuner.export.gguf.engine import Likeliest, served
from tuner.export.gguf.modelfile import Modelfile, modelfile, place
from tuner.export.gguf.source import GgufSource
from tuner.export.gguf.tables import table
from tuner.export.gguf.vocabulary import frame_of, is_alike, rendered
from tuner.export.hf import temporary
from tuner.export.tensors import OpenFiles
from tuner.export.verify import CLOCK, differing, not_published, short
from tuner.export.write import ends_of, load_tokenizer, quiet
from tuner.rundir.checkpoints import CheckpointHold
from tuner.runtime.files import publish_dir

N_TEXTS = 400
"""How many texts are made of the pieces of the fixed ones, besides these."""
PROMPT_TOKENS, LONG_TOKENS, TOKENS, TOP = 48, 1024, 16, 64
ROUNDING = {"f16": 1e-3, "bf16": 1e-2}
"""Nats of KL a token that a type may cost before the file counts as another model."""
BROKEN = 2.0
"""The same for types of blocks: no longer a rounding of the model."""
BOUND = 1e-4
"""Nats by which a log-probability may differ at float32, besides what steps of a table explain."""
STEPS = 2.0
"""How many times what the reference moves by itself, with other steps of its table, may explain."""
LEAST = -80.0
"""Below it a probability is nothing in float32, and its logarithm is not compared."""
SHIFT = 2e-3
"""Nats by which all log-probabilities of a position may differ at float32: a sum of as many numbers as tokens."""
TIE = 1e-3
"""Of two tokens as likely as this either may come first."""


@dataclass(frozen=True)
class Texts:
    """Texts with their ids by the trained tokenizer, bare and framed; chats as the trained template renders them."""

    texts: Sequence[str]
    ids: Sequence[tuple[list[int], list[int]]]
    chats: Sequence[Mapping[str, Any]]
    rendered: Sequence[str]
    talks: Sequence[list[int]]
    """The ids of the rendered chats."""
    ends: Sequence[int]
    names: Sequence[str]
    """The tokens that end a turn."""
    bos: str


@dataclass(frozen=True)
class Prompts:
    """Prompts, and the model in float32 that answers them."""

    ids: Sequence[list[int]]
    model: torch.nn.Module
    context: int

    def log_probabilities(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Of each token of an answer, and of the next after it ``[T + 1, V]``, float64."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
        return logits[len(prompt) - 1 :].double().log_softmax(-1)


@dataclass(frozen=True)
class Figures:
    """How far llama.cpp's answers are from the trained model's, over ``tokens`` positions.

    ``difference`` is the largest of a log-probability among the likeliest 64 in nats, without what all 64 have in
    common, which is ``shift``: llama.cpp adds up a vocabulary's probabilities in float32. ``kl`` is the mean over the
    64 and the mass of the others, nats a token; ``greedy`` counts positions with the same most likely token.
    """

    difference: float
    shift: float
    kl: float
    greedy: int
    tokens: int
    texts: int
    chats: int
    steps: float = 0.0
    """What log-probabilities of the trained model move where inputs of a table are read one step away, nats."""


@cache
def fixed() -> tuple[list[str], list[list[dict[str, str]]]]:
    """The texts and chats that every file is asked, with texts made of the texts' pieces."""
    facts = table("texts")
    pieces = sorted({text[at : at + 7] for text in facts["texts"] for at in range(0, len(text), 5)})
    draw = random.Random(0)
    made = ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(N_TEXTS)]
    return [*facts["texts"], *made], facts["chats"]


def texts_of(tokenizer: Any, recorded: Sequence[Mapping[str, Any]], ends: Sequence[int], directory: Path) -> Texts:
    """What is asked of the tokenizer. Raises DataError for a template that goes beyond its limits."""
    made, chats = fixed()
    added = sorted(token.content for token in tokenizer.added_tokens_decoder.values())
    places = (("", ""), ("a ", " b"), ("\n", "x\n"))
    around = [f"{first}{token}{last}" for token in added[:64] for first, last in places]
    texts = [*(each["text"] for each in recorded), *made, *around]
    bare, framed = (tokenizer(texts, add_special_tokens=special)["input_ids"] for special in (False, True))
    if not vocabulary.chats_begin_so(tokenizer):
        framed = [ids[frame_of(tokenizer)[0] :] for ids in framed]
    every: list[dict[str, Any]] = [{"messages": each} for each in chats]
    every += [{"messages": each["messages"], "tools": each.get("tools")} for each in recorded if each.get("messages")]
    asks, wanted = list[Mapping[str, Any]](), list[str]()
    if tokenizer.chat_template and CLOCK not in str(tokenizer.chat_template):
        templates = LoadedTemplates(tokenizer, str(directory))
        for chat in every:
            if chat["messages"][-1]["role"] == "assistant":
                chat = {**chat, "messages": chat["messages"][:-1]}  # noqa: PLW2901 - what asks for that answer
            text = rendered(partial(templates.render, tools=chat.get("tools")), chat["messages"])
            if text is not None and is_alike(tokenizer, text, chat["messages"]):
                asks.append(chat)
                wanted.append(text)
    names = tokenizer.convert_ids_to_tokens(list(ends))
    talks = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in wanted]
    ids = list(zip(bare, framed, strict=True))
    return Texts(texts, ids, asks, wanted, talks, ends, names, tokenizer.bos_token or "")


def prompts_of(texts: Texts, model: torch.nn.Module, recorded: Sequence[Mapping[str, Any]], context: int) -> Prompts:
    """Prompts of the texts that training saw, else of the fixed ones; the last is longer than a sliding window.

    ``context`` is how many tokens the file allows.
    """
    config: Any = cast(Any, model.config).get_text_config()
    limit = max(1, min(context, LONG_TOKENS) - TOKENS)
    joined = list(itertools.chain.from_iterable(bare for bare, _ in texts.ids))
    window = int(getattr(config, "sliding_window", None) or 0)
    sources = [bare for bare, _ in texts.ids[: len(recorded)] if bare] or [joined[at:] for at in (400, 800, 1200)]
    prompts = [ids[: min(PROMPT_TOKENS, limit)] for ids in sources[:3]]
    prompts.append(joined[: min(limit, max(2 * PROMPT_TOKENS, window + PROMPT_TOKENS))])
    return Prompts(prompts, model, limit + 2 * TOKENS)


@dataclass(frozen=True)
class LlamaAnswers:
    """What llama.cpp gives for texts, chats and prompts, in their order."""

    ids: Sequence[tuple[list[int], list[int]]]
    rendered: Sequence[str]
    talks: Sequence[list[int]]
    ends: Sequence[bool]
    continued: Sequence[tuple[list[int], list[Likeliest]]]


def answers_of(
    file: Path, texts: Texts, prompts: Prompts, tokens: int = TOKENS, adapter: Path | None = None
) -> LlamaAnswers:
    """Ask llama.cpp. Raises VerificationError where it does not answer."""
    try:
        with served(file, prompts.context, exact=True, adapter=adapter) as engine:
            rendered = [engine.rendered(chat["messages"], chat.get("tools")) for chat in texts.chats]
            return LlamaAnswers(
                [(engine.ids(text), engine.ids(text, framed=True)) for text in texts.texts],
                rendered,
                [engine.ids(text, framed=True) for text in rendered],
                [engine.ends(prompts.ids[0], token) for token in texts.ends],
                [engine.continued(prompt, tokens, TOP) for prompt in prompts.ids],
            )
    except (DataError, MachineError, RecipeError) as error:
        raise not_published(f"{error.message.removeprefix(f'{file}: ')}") from error


def prove(file: Path, kind: str, texts: Texts, prompts: Prompts, adapter: Path | None = None) -> Figures:
    """Ask llama.cpp and compare. Raises VerificationError naming the first thing that differs."""
    answers = answers_of(file, texts, prompts, adapter=adapter)
    _require_texts(texts, answers)
    figures = measured(texts, prompts, answers)
    if kind == "f32":
        _require_same(figures)
    elif not figures.kl <= ROUNDING.get(kind, BROKEN):
        what = "nats a token from the trained model, which rounding does not explain"
        raise not_published(f"in {kind} llama.cpp is {figures.kl:.3g} {what}")
    return figures


def _require_texts(texts: Texts, answers: LlamaAnswers) -> None:
    for text, wanted, found in zip(texts.texts, texts.ids, answers.ids, strict=True):
        for how, one, other in zip(("", ", with what frames a text"), wanted, found, strict=True):
            if one != other:
                raise not_published(f"llama.cpp gives other ids than training saw{how}: {differing(text, other, one)}")
    for wanted_text, found_text in zip(texts.rendered, answers.rendered, strict=True):
        if found_text not in {wanted_text, wanted_text.removeprefix(texts.bos)}:  # which llama.cpp adds by itself
            raise not_published(f"llama.cpp renders a chat as {short(found_text)}, training saw {short(wanted_text)}")
    for text, ids, other in zip(texts.rendered, texts.talks, answers.talks, strict=True):
        if ids != other:
            raise not_published(f"llama.cpp serves a chat with other ids: {differing(text, other, ids)}")
    for name, stops in zip(texts.names, answers.ends, strict=True):
        if not stops:
            raise not_published(f"llama.cpp does not end a turn at {name}")


def measured(texts: Texts, prompts: Prompts, answers: LlamaAnswers) -> Figures:
    """How far answers to the prompts are from the model's. Raises VerificationError where there are none."""
    difference = shift = total = steps = 0.0
    greedy = tokens = 0
    for prompt, (answer, steps_of_it) in zip(prompts.ids, answers.continued, strict=True):
        expected = prompts.log_probabilities(prompt, answer)
        with other_steps(prompts.model) as reads_a_table:
            moved = prompts.log_probabilities(prompt, answer) if reads_a_table else expected
        for at, likeliest in _aligned(answer, steps_of_it):
            ids, found = [*likeliest], torch.tensor([*likeliest.values()], dtype=torch.float64)
            wanted = expected[at][ids]
            rest, left = (_rest(each) for each in (found, wanted))
            apart = wanted - found
            compared = wanted > LEAST
            difference = max(difference, _spread(apart[compared]))
            steps = max(steps, _spread((moved[at][ids] - wanted)[compared]))
            shift = max(shift, abs(float(apart[compared].mean())))
            total += float((wanted.exp() * apart).sum()) + float(left * (left.log() - rest.log()))
            greedy += int(wanted[0] >= expected[at].max() - TIE)
            tokens += 1
    if not tokens:
        raise not_published("llama.cpp gives no log-probabilities")
    kl = max(total / tokens, 0.0)
    return Figures(difference, shift, kl, greedy, tokens, len(texts.texts), len(texts.chats), steps)


def _spread(apart: torch.Tensor) -> float:
    """The largest distance from what all have in common."""
    return float((apart - apart.mean()).abs().max())


def _aligned(tokens: Sequence[int], steps: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Which token of an answer each step chose: llama.cpp leaves out those that end inside a character.

    Steps of which that is not certain are left out too.
    """
    forward, at = list[int](), 0
    for token, _ in steps:
        forward.append(at := tokens.index(token, at))
        at += 1
    at = len(tokens)
    for number in range(len(steps) - 1, -1, -1):
        at = max(i for i in range(at) if tokens[i] == steps[number][0])
        if at == forward[number]:
            yield at, steps[number][1]


def _rest(log: torch.Tensor) -> torch.Tensor:
    """The mass of the tokens that are not among these."""
    return (1 - log.exp().sum()).clamp(min=1e-9)


def _require_same(figures: Figures) -> None:
    bound = BOUND + STEPS * figures.steps
    if not (figures.difference <= bound and figures.shift <= SHIFT) or figures.greedy < figures.tokens:
        raise not_published(
            f"llama.cpp is another model than the trained one: log-probabilities differ by {figures.difference:.3g} "
            f"nats (allowed {bound:.1g}), {figures.tokens - figures.greedy} of {figures.tokens} likeliest tokens others"
        )


@dataclass(frozen=True)
class GgufReport:
    """A published file. Figures are None where it was not verified."""

    path: Path
    type: str
    architecture: str
    bytes: int
    seconds: float
    exact: Figures | None
    """At f32, which proves names, layouts and keys."""
    figures: Figures | None
    """Of the file's own type."""
    encoded_otherwise: list[str]
    """Texts that llama.cpp gives other ids whatever the file says."""
    files: int = 1
    modelfile: Modelfile | None = None

    def proof(self) -> str:
        """What was found, for people."""
        if self.figures is None or self.exact is None:
            return "not verified: --no-verify"
        same = (
            f"llama.cpp gives the ids of {self.exact.texts:,} texts and renders {self.exact.chats:,} chats as trained; "
            f"at f32 its log-probabilities are within {self.exact.difference:.1e} nats over {self.exact.tokens} tokens"
        )
        if self.type == "f32":
            return same
        return (
            f"{same}\n{self.type}: KL {self.figures.kl:.2g} nats a token, the same likeliest token in "
            f"{self.figures.greedy} of {self.figures.tokens}"
        )

    def better(self) -> str | None:
        """The next type that is closer to the trained model; None where there is none."""
        return None if self.type in file.PLAIN else file.TYPES[file.TYPES.index(self.type) - 1]


def export_gguf(
    source: GgufSource, kind: str, output: Path | None = None, shard_bytes: int | None = None,
    with_modelfile: bool = False, verify: bool = True,
) -> GgufReport:
    """Write a file of a type, prove and publish it. ``output``, or the source's own place, must not be there.

    What is larger than ``shard_bytes`` becomes a directory of several files; a Modelfile for Ollama is next to it where
    that is wanted. Raises RecipeError where llama.cpp has no such model, MachineError where a library is missing, and
    VerificationError, with nothing published, where it answers otherwise than the trained one.
    """
    started = time.perf_counter()
    if verify:
        engine.require_library()
    if kind in table("mixes"):
        file.quantizer()
    target = output or source.place.with_name(f"{source.place.name}-{kind}.gguf")
    _check_choices(source, kind, target, shard_bytes, with_modelfile)
    with quiet(), ExitStack() as stack:
        for info in source.checkpoints:
            stack.enter_context(CheckpointHold(info.path))
        architecture = Architecture.of(source.config)
        tokenizer = load_tokenizer(source.tokenizer_directory)
        ends = ends_of(tokenizer, source.generation.get("eos_token_id"), getattr(source.config, "eos_token_id", None))
        recorded = [each for each in source.texts if is_alike(tokenizer, each["text"])]
        sample = [*fixed()[0], *(str(each["text"]) for each in recorded)]
        words = vocabulary.vocabulary(tokenizer, architecture.facts["vocab_size"], ends, sample)
        metadata = _metadata(source, tokenizer, verify)
        directory = stack.enter_context(temporary(target))

        def written(name: str, kind: str, shard_bytes: int | None = None, is_base: bool = False) -> list[Path]:
            with OpenFiles() as files:
                published = source.tensors(files)
                keys, tensors = {**architecture.keys(published), **words}, architecture.tensors(published)
                if source.low_rank and not is_base:
                    keys, tensors = lora.adapter(architecture, source.low_rank(files), tensors)
                return file.write_gguf(
                    directory / name, architecture.name, {**keys, **metadata}, tensors, kind, shard_bytes
                )

        exact = figures = base = None
        if verify:
            texts = texts_of(tokenizer, recorded, ends, source.tokenizer_directory)
            reference = architecture.computed(source.reference())
            prompts = prompts_of(texts, reference, recorded, architecture.context)
            base = written(f"base-of-{target.name}", "f32", is_base=True)[0] if source.low_rank else None
        for each in dict.fromkeys(("f32", kind) if verify else (kind,)):
            (directory / target.name).unlink(missing_ok=True)
            files = written(target.name, each, shard_bytes if each == kind else None)
            if verify:
                figures = prove(base or files[0], each, texts, prompts, files[0] if base else None)
                exact = exact or figures
        model = modelfile(target.name, tokenizer, words, ends) if with_modelfile else None
        published = _publish(files, target, model)
    size, seconds = sum(path.stat().st_size for path in published), time.perf_counter() - started
    other, count = vocabulary.encoded_otherwise(tokenizer, words), len(published)
    return GgufReport(published[0], kind, architecture.name, size, seconds, exact, figures, other, count, model)


def _publish(files: Sequence[Path], target: Path, model: Modelfile | None) -> list[Path]:
    """Give what was made its name, by one rename; returns where the files are now."""
    made = files[0] if len(files) == 1 else files[0].parent
    final = target if len(files) == 1 else target.with_name(made.name)
    publish_dir(made, final)
    if model is not None:
        model.write(target)
    return [final] if len(files) == 1 else [final / path.name for path in files]


def _check_choices(source: GgufSource, kind: str, target: Path, shard_bytes: int | None, with_modelfile: bool) -> None:
    """Raise RecipeError where a target is there or no file's name, or options do not go together."""
    if target.suffix != ".gguf":
        raise RecipeError(f"{target}: no name of a GGUF file", hint=f"write --output {target.name}.gguf")
    if source.low_rank and kind not in file.PLAIN:
        raise RecipeError(f"--type {kind}: an adapter's ranks do not fill blocks", hint="write --type bf16")
    if with_modelfile and (source.low_rank or shard_bytes):
        raise RecipeError("--modelfile is written next to one file of a whole model", hint="leave out --modelfile")
    if source.low_rank and shard_bytes:
        raise RecipeError("--shard-size: an adapter is one file", hint="leave out --shard-size")
    targets = [target, *([target.with_name(target.name.removesuffix(".gguf"))] if shard_bytes else [])]
    for each in [*targets, *([place(target)] if with_modelfile else [])]:
        if os.path.lexists(each):
            raise RecipeError(f"{each}: exists already; nothing was changed")


def _metadata(source: GgufSource, tokenizer: Any, verify: bool) -> dict[str, Any]:
    proof = f"llama.cpp of xllamacpp {importlib.metadata.version('xllamacpp')}" if verify else "not verified"
    name = vocabulary.named_for(source.lineage["general.name"], tokenizer)
    return {**source.lineage, "general.name": name, "tuner.version": tuner.__version__, "tuner.verified": proof}
