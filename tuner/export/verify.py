"""Proof that an exported directory is the trained model: equal bits on disk, equal answers and ids when loaded.

Answers to the probes of a run say, too, how much of what training changed an export keeps.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from tuner.checkpoint.load import read_probe
from tuner.checkpoint.manifest import PROBE_NAME
from tuner.checkpoint.storage import DTYPE_NAMES, tensor_bytes
from tuner.config.methods import Head
from tuner.data.encoding.template import LoadedTemplates, unless_refused
from tuner.errors import DataError, MemoryLimitError, VerificationError
from tuner.export.source import ExportSource
from tuner.export.tensors import Output, TensorSource, Written, sha256_of_same
from tuner.export.write import ADAPTER_WEIGHTS
from tuner.model.build import auto_model
from tuner.model.stored import state_names
from tuner.rundir.layout import ID_PROBES, TOKENIZER
from tuner.runtime.files import file_entries, gib, verify_entries
from tuner.runtime.memory import host_memory

SAME_MODEL = 1e-5  # float32, the same operations: only the order of sums differs
_TEXTS = ("", " ", "a", " a ", "  a  b", "\n", "a\n b\n", "Hello, world! 12345", "\u00e9 \u4e2d\u6587 \U0001f642")
"""What is encoded for a run that recorded no probes."""
CLOCK = "strftime_now"
_N_FALLBACK_PROBES, _FALLBACK_LENGTH = 8, 32


@dataclass(frozen=True)
class Probes:
    """Prompts and the trained model's logits ``[P, V]`` at the last position of each; `recorded` by the run itself."""

    prompts: tuple[tuple[int, ...], ...]
    logits: torch.Tensor
    recorded: bool


@dataclass(frozen=True)
class LogitDifference:
    """Of two sets of logits: largest absolute difference, and the same relative to the largest logit."""

    absolute: float
    relative: float


def require_memory(model: PreTrainedModel, untouched: int = 0) -> None:
    """Check that there is memory to verify an export of a model, which loads it in float32, before it is written.

    ``untouched`` are the numbers that its files hold besides. Raises MemoryLimitError.
    """
    needed, total = 4 * (untouched + sum(parameter.numel() for parameter in model.parameters())), host_memory()[0]
    if needed > total:
        raise MemoryLimitError(
            f"an export is loaded in float32 to verify it, which takes {gib(needed)} of the host's memory; "
            f"this machine has {gib(total)}",
            hint="export the run on a machine with more",
        )


def recorded_probes(source: ExportSource) -> Probes | None:
    """Those of a run's checkpoint, None where it recorded none. Raises DataError."""
    tensors = read_probe(source.checkpoint) if PROBE_NAME in source.checkpoint.manifest["files"] else {}
    rows = zip(tensors.get("input_ids", ()), tensors.get("lengths", ()), strict=True)
    prompts = tuple(tuple(map(int, row[: int(length)])) for row, length in rows)
    return Probes(prompts, tensors["logits"].float(), recorded=True) if prompts else None


def fallback_probes(model: PreTrainedModel) -> Probes:
    """Fixed random prompts answered by the model rebuilt from the checkpoint, where the run recorded none."""
    generator = torch.Generator().manual_seed(0)
    shape = (_N_FALLBACK_PROBES, _FALLBACK_LENGTH)
    rows = torch.randint(0, min(model.config.get_text_config().vocab_size, 32000), shape, generator=generator)
    prompts = tuple(tuple(map(int, row)) for row in rows)
    return Probes(prompts, last_logits(model, prompts), recorded=False)


def last_logits(model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits ``[P, V]`` in float32 at the last position of each prompt, each run alone, unpacked; scores ``[P, 1]``."""
    return answers_of(model, prompts).last


def compare(expected: torch.Tensor, actual: torch.Tensor) -> LogitDifference:
    """How far `actual` is from `expected`; infinite where one of them is not finite or the shapes differ."""
    if expected.shape != actual.shape or not (bool(expected.isfinite().all()) and bool(actual.isfinite().all())):
        return LogitDifference(float("inf"), float("inf"))
    absolute = float((expected.double() - actual.double()).abs().max())
    is_score = expected.shape[-1] == 1
    scale = max(float(expected.abs().max()), 1.0 if is_score else 1e-12)  # scores are nats: they may all be near 0
    return LogitDifference(absolute, absolute / scale)


def require_close(difference: LogitDifference, what: str, relative: float) -> None:
    """Raise VerificationError where the relative difference is above its bound."""
    if not difference.relative <= relative:
        raise not_published(
            f"{what}: the logits differ by {difference.absolute:.3g} ({difference.relative:.1e} of the largest, "
            f"allowed {relative:.0e})"
        )


def require_written(directory: Path, written: Mapping[str, Written], outputs: Sequence[Output]) -> dict[str, str]:
    """Read every safetensors file back: bytes, names, types and shapes are those that were to be written.

    ``written`` holds what was handed to the system. Returns each file's SHA-256. Raises VerificationError.
    """
    left = {output.name: output for output in outputs}
    digests: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        digest = sha256_of_same(path, written[path.name]) if path.name in written else None
        if digest is None:
            raise not_published(f"{path.name}: the disk holds other bytes than were written")
        digests[path.name] = digest
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                output, part = left.pop(name, None), file.get_slice(name)
                if output is None:
                    raise not_published(f"{path.name}: unexpected tensor {name}")
                facts = (part.get_dtype(), list(part.get_shape()))
                if facts != (DTYPE_NAMES[output.dtype], list(output.source.shape)):
                    raise not_published(f"{path.name}: {name} is {facts[0]} {facts[1]}")
    if left:
        raise not_published(f"tensors were not written: {', '.join(sorted(left)[:3])}")
    return digests


def load_plain(directory: Path, head: Head) -> PreTrainedModel:
    """The export loaded by transformers alone, in float32. Raises VerificationError unless it is complete."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model, report = auto_model(head, config, whole=True).from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise not_published(f"transformers cannot load the export: {error}") from error
    if problems := {kind: sorted(map(str, names)) for kind, names in report.items() if names}:
        raise not_published(f"transformers loads the export with {problems}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_adapter(directory: Path, base: PreTrainedModel) -> torch.nn.Module:
    """The exported adapter directory loaded by peft onto the plain base model; both in float32.

    Raises VerificationError unless peft holds every tensor of the files, by its name there.
    """
    try:
        model: Any = PeftModel.from_pretrained(base, str(directory))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise not_published(f"peft cannot load the export: {error}") from error
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, tensor in load_file(directory / ADAPTER_WEIGHTS).items():
        if name not in held:
            raise not_published(f"peft does not take {name} from the export")
        if tensor.shape != held[name].shape or tensor_bytes(tensor.to(held[name].dtype)) != tensor_bytes(held[name]):
            raise not_published(f"{name}: what was written differs from the trained tensor")
    loaded: torch.nn.Module = model.eval()
    return loaded


@torch.no_grad()
def fill(model: torch.nn.Module, values: Iterable[tuple[str, TensorSource]]) -> None:
    """Overwrite tensors of a loaded model by name, tied ones once, a block at a time.

    Raises VerificationError for one that it lacks.
    """
    there = state_names(model)
    for name, source in values:
        if name not in there or there[name].shape != source.shape:
            raise not_published(f"transformers loads the export without {name}")
        target, at = there[name].data, 0
        for block in source.blocks(source.dtype):
            if target.ndim:
                target[at : at + len(block)].copy_(block)
                at += len(block)
            else:
                target.copy_(block.reshape(()))


def fill_adapter(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """The same for an adapter, by peft's names. Raises VerificationError for one that it lacks."""
    loaded: Any = model
    report: Any = set_peft_model_state_dict(loaded, {name: tensor.float() for name, tensor in values.items()})
    if report.unexpected_keys:
        raise not_published(f"peft does not take {report.unexpected_keys[0]}")


def require_same_tokenizer(source: ExportSource) -> None:
    """Check every file of the run's tokenizer. Raises DataError naming the first that is missing, new or different."""
    directory = source.run_dir / TOKENIZER
    noted = source.meta.get("tokenizer_files")
    if not isinstance(noted, Mapping):
        raise DataError(f"{source.checkpoint.path}: its manifest does not say which tokenizer files it belongs to")
    found = file_entries(directory)
    for name in sorted(noted.keys() | found.keys()):
        if noted.get(name) != found.get(name):
            what = "is missing" if name not in found else "was not there" if name not in noted else "is another file"
            raise DataError(
                f"{directory / name}: the tokenizer changed since {source.checkpoint.path} was saved: this {what}",
                hint="restore the run's tokenizer directory",
            )


def require_same_ids(directory: Path, source: ExportSource) -> int:
    """Load the exported tokenizer plainly and encode the run's probes; how many there were.

    Each probe is a text with the ids that training had of it; those of rows also with their messages, which the chat
    template must render to that text. Raises VerificationError for the first that differs, DataError where the probes
    are not those that the checkpoint noted.
    """
    probes = list(recorded_ids(source) or _of_the_files(source.run_dir / TOKENIZER))
    auto: Any = AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a class raises over files that it cannot read
        raise VerificationError(f"transformers cannot load the exported tokenizer: {error}") from error
    templates = LoadedTemplates(tokenizer, str(source.run_dir / TOKENIZER))
    for probe in probes:
        if (messages := probe.get("messages")) is not None:  # transformers renders without limits, so ours goes first
            unless_refused(partial(templates.render, tools=probe.get("tools")), messages, False)
        _require_ids(tokenizer, probe)
    return len(probes)


def recorded_ids(source: ExportSource) -> list[dict[str, Any]]:
    """The probes that the run wrote; none for a checkpoint that notes none. Raises DataError."""
    noted = source.meta.get("id_probes")
    if not isinstance(noted, Mapping) or not noted:
        return []
    verify_entries(source.run_dir, noted, hash=True)
    try:
        return [json.loads(line) for line in (source.run_dir / ID_PROBES).read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{source.run_dir / ID_PROBES}: {error}") from error


def _of_the_files(directory: Path) -> Iterator[dict[str, Any]]:
    """Probes of what tokenizer.json says alone, which is what older runs were trained on. Raises DataError."""
    try:
        written = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{directory / 'tokenizer.json'}: {error}") from error
    for text in _TEXTS:
        yield {"text": text, "ids": written.encode(text, add_special_tokens=False).ids}


def _require_ids(tokenizer: Any, probe: Mapping[str, Any]) -> None:
    text = probe["text"]
    if (messages := probe.get("messages")) is not None and CLOCK not in str(tokenizer.chat_template):
        rendered = tokenizer.apply_chat_template(messages, tools=probe.get("tools"), tokenize=False)
        if rendered != text:
            raise not_published(f"the exported chat template renders {short(rendered)}, training saw {short(text)}")
    for key, framed in (("ids", False), ("framed_ids", True)):
        ids = list(tokenizer(text, add_special_tokens=framed)["input_ids"])
        if key in probe and ids != probe[key]:
            raise not_published(
                f"the exported tokenizer, loaded as {type(tokenizer).__name__}, gives other ids than training saw: "
                f"{differing(text, ids, probe[key])}",
                hint="the run was prepared with another version of transformers: export with that one, or train again",
            )


def not_published(why: str, hint: str | None = None) -> VerificationError:
    """The error of an export that is not the trained model."""
    return VerificationError(f"{why}; nothing was published", hint)


def differing(text: str, ids: Sequence[int], wanted: Sequence[int]) -> str:
    """From where on the ids of a text are not the wanted ones."""
    at = next((i for i, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), min(len(ids), len(wanted)))
    return f"{short(text)} differs at token {at} ({[*ids[at : at + 4]]}, not {[*wanted[at : at + 4]]})"


def short(text: str) -> str:
    """A text in quotes, as a line has room for it."""
    return repr(text if len(text) <= 80 else f"{text[:40]} ... {text[-30:]}")


POSITIONS = 16
"""The last ones of each prompt, whose distributions are compared."""
KEPT = 0.8
"""Of what training changed: where rounding costs more than a fifth, `auto` takes the type that keeps it."""
NOISE = 1e-9
"""Nats that the order of float32 sums makes."""
DIGITS = 6
"""Of a divergence in nats; what is below differs with the order of float32 sums."""


@dataclass(frozen=True)
class Answers:
    """Logits ``[P, V]`` at the last position of each prompt, scores ``[P, 1]``, and log-probabilities ``[N, V]``.

    The latter are the distributions over the next token at the last positions of each prompt; of a reward model those
    of which of each two prompts is preferred, ``[P (P - 1) / 2, 2]``.
    """

    last: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Kept:
    """How much of what training changed is in an export, and the divergences that say so, in nats a distribution."""

    share: float
    kl: float
    """From the trained model to the export."""
    gain: float
    """From the trained model to the base that it began as."""
    tokens: int
    """How many distributions these are means over."""


@torch.no_grad()
def answers_of(model: nn.Module, prompts: Sequence[Sequence[int]]) -> Answers:
    """What a model answers, in float32, each prompt run alone and unpacked."""
    last, rows = list[torch.Tensor](), list[torch.Tensor]()
    for prompt in prompts:
        logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].float()
        last.append(logits if logits.ndim == 1 else logits[-1])  # transformers' own choice of a scored token
        if logits.ndim > 1:
            rows.append(torch.log_softmax(logits[-POSITIONS:], -1))
    scores = torch.stack(last)
    if scores.shape[-1] == 1:
        rows = [torch.log_softmax(pairs(scores), -1)]
    return Answers(scores, torch.cat(rows))


def pairs(scores: torch.Tensor) -> torch.Tensor:
    """Scores ``[P, 1]`` of each two prompts ``[P (P - 1) / 2, 2]``: logits of which is preferred."""
    return torch.combinations(scores[:, 0])


def uniform(answers: Answers) -> Answers:
    """What a model answers that knows nothing: of weights that are drawn."""
    return Answers(torch.zeros_like(answers.last), torch.full_like(answers.rows, -math.log(answers.rows.shape[-1])))


def divergence(expected: Answers, found: Answers) -> float:
    """Kullback-Leibler divergence of what was found from what was expected: nats, the mean over all distributions.

    The larger one of that as they are and that with logits scaled to unit spread: a model whose answers are all but
    uniform would be close to any other. Infinite where one is not finite.
    """
    spread, scaled = _spread(expected, found)
    return round(max(_divergence(expected, found), _divergence(spread, scaled)), DIGITS)


def kept(base: Answers, trained: Answers, export: Answers) -> Kept:
    """How much of what training changed from the base is in an export.

    The changes are those of log-probabilities, and each weighs as the trained model gives it: how far the export's
    change goes along the training's is the share that is left of small ones, whose gain in loss is linear in them. What
    rounding adds across it costs nothing then; it does count in the second figure, the export's gain over the base on
    text of the trained model as a share of the training's, KL(trained, base) - KL(trained, export). The smaller one is
    taken. Answers that are all but uniform are compared with logits of unit spread.
    """
    said = _divergence(trained, base), _divergence(trained, export)
    if len(trained.rows) and float(trained.rows.std(-1).mean()) < 1:
        trained, base, export = _spread(trained, base, export)
    gain, kl = _divergence(trained, base), _divergence(trained, export)
    along = whole = 0.0
    for (one, before), after in zip(_each(trained, base), export.rows, strict=True):
        along += float(_expected(one, (after.double() - before) * (one - before)))
        whole += float(_expected(one, (one - before) ** 2))
    if gain <= NOISE:  # nothing was changed
        share = 1.0 if kl <= NOISE else 0.0
    else:
        share = min(along / whole, 1 - kl / gain, 1.0) if math.isfinite(along) and math.isfinite(kl) else 0.0
    return Kept(max(round(share, 4), 0.0), round(said[1], DIGITS), round(said[0], DIGITS), len(trained.rows))


def _spread(first: Answers, *others: Answers) -> list[Answers]:
    """Answers whose logits are scaled to unit spread of the first ones'."""
    scale = 1 / max(float(first.rows.std(-1).mean()), 1e-12) if len(first.rows) else 1.0
    return [Answers(each.last, torch.log_softmax(each.rows * scale, -1)) for each in (first, *others)]


def _divergence(expected: Answers, found: Answers) -> float:
    total = sum(float(_expected(one, one - other)) for one, other in _each(expected, found))
    mean = total / max(len(expected.rows), 1)
    return max(mean, 0.0) if math.isfinite(mean) else math.inf


def _each(first: Answers, second: Answers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one, other in zip(first.rows, second.rows, strict=True):
        yield one.double(), other.double()


def _expected(log: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean of values under a distribution; what it gives no probability counts for nothing."""
    chance = log.exp()
    return torch.where(chance > 0, chance * values, 0.0).sum()
