"""Export a checkpoint to a Hugging Face directory: build next to the target, prove it, publish it with one rename."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from tuner.checkpoint.load import CheckpointHold, is_held
from tuner.errors import DataError, MachineError, RecipeError, TunerError
from tuner.export import verify
from tuner.export.card import CARD, card, lineage
from tuner.export.form import Form, Itself
from tuner.export.frozen import require_same_frozen
from tuner.export.outputs import Trained, Values, total_bytes, trained_skeleton
from tuner.export.padding import Padding, require_batches, reward_padding, write_padding
from tuner.export.shards import Output, Shard, Written, plan_shards, write_shards
from tuner.export.source import Source, resolve, warn_of_better
from tuner.export.tensors import OpenFiles
from tuner.export.weights import DTYPES, load_trained, lora_spec, plain_base, read_config
from tuner.export.write import (
    ADAPTER_WEIGHTS,
    quiet,
    write_adapter_config,
    write_generation_config,
    write_tokenizer,
)
from tuner.model.build import is_part
from tuner.model.freeze import frozen_names
from tuner.rundir.exports import LINEAGE
from tuner.rundir.layout import export_dir
from tuner.rundir.model_path import Warn, Which, ignore_warning, with_remedies
from tuner.runtime.files import (
    MANIFEST_NAME,
    TMP_PREFIX,
    TRASH_PREFIX,
    discard_dir,
    file_entries,
    free_bytes,
    json_bytes,
    machine_error,
    make_dirs,
    publish_dir,
    read_json,
    regular_size,
    sha256_file,
    verify_entries,
    write_new,
)

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportOptions:
    """The choices that change the exported bytes."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    adapter: Literal["merge", "keep"] = "merge"
    shard_size: int = DEFAULT_SHARD_BYTES
    """Bytes of the largest weights file."""
    base_model: str | None = None
    """What a kept adapter says of its base model; by default its hub name, or the path of a local directory."""
    text_only: bool = False
    """Of a multimodal checkpoint the language model alone, as a model of its own."""

    def check(self) -> None:
        """Raise RecipeError for values that there are not, and for a base model where none is named."""
        if self.dtype not in DTYPES or self.adapter not in ("merge", "keep") or self.shard_size <= 0:
            raise RecipeError("export takes dtype bf16 or fp32, adapter merge or keep, and a positive shard size")
        if self.base_model is not None and self.adapter != "keep":
            raise RecipeError("--base-model: a merged export names no base model", hint="add --adapter keep")
        if self.base_model is not None and not self.base_model.strip():
            raise RecipeError("--base-model: is empty", hint="give a hub name or a directory")
        if self.text_only and self.adapter == "keep":
            raise RecipeError("--text-only: a kept adapter fits the whole checkpoint", hint="leave out --adapter keep")


DEFAULTS = ExportOptions()


@dataclass(frozen=True)
class ExportPlan:
    """What an export will do: its checkpoint, target, options, and whether the target already holds exactly this."""

    source: Source
    output: Path
    dtype: Literal["bf16", "fp32"]
    adapter: Literal["merge", "keep", "none"]
    shard_size: int
    manifest_sha256: str
    done: bool
    base_model: str | None = None
    text_only: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The choices that change the exported bytes."""
        named: dict[str, Any] = {} if self.base_model is None else {"base_model": self.base_model}
        named |= {"text_only": True} if self.text_only else {}
        return {"dtype": self.dtype, "adapter": self.adapter, "shard_size": self.shard_size, **named}


@dataclass(frozen=True)
class ExportReport:
    """A published export. Differences are None where the same export was there already; bytes count all files.

    `max_difference` is the largest absolute difference of the logits, `kl` the mean over the probes in nats.
    """

    path: Path
    step: int
    dtype: str
    adapter: str
    files: int
    weight_files: int
    bytes: int
    probes: int
    probes_recorded: bool
    max_difference: float | None
    kl: float | None
    seconds: float
    already_exported: bool
    id_probes: int = 0
    """Texts of which the exported tokenizer, loaded plainly, gave the ids of training."""
    max_relative_difference: float | None = None
    """The largest difference as a share of the largest logit."""

    def proof(self) -> str:
        """How closely the export matches the trained model, with the limits; empty where nothing was compared."""
        if self.max_difference is None or self.kl is None or self.max_relative_difference is None:
            return ""
        model = "the trained model" if self.probes_recorded else "the checkpoint's model (the run recorded no probes)"
        match = f"{self.probes} probes match {model}"
        exact = f"{verify.SAME_MODEL:.0e} of the largest logit"
        if self.dtype == "fp32":
            return f"{match}: largest logit difference {self.max_relative_difference:.1e} (limit {exact})"
        return (
            f"{match}: KL {self.kl:.1e} nats (limit {verify.ROUNDED_KL:g}), largest logit difference "
            f"{self.max_difference:.2g} from {self.dtype} rounding; before rounding to {self.dtype}, "
            f"logits agree to {verify.SAME_MODEL:.0e} (relative)"
        )


def plan_export(
    path: Path,
    output: Path | None = None,
    options: ExportOptions = DEFAULTS,
    warn: Warn = ignore_warning,
    step: Which = "newest",
) -> ExportPlan:
    """Find the checkpoint and the target without writing anything; `warn` hears of a run that is not finished,
    and of a kept checkpoint with a lower held-out loss than the newest one.

    The target is `<run>/exports/step-N`, of a kept adapter `step-N-adapter`, of a text model alone `step-N-text`,
    unless `output` is another.
    ``step`` chooses one of a run's checkpoints. Raises RecipeError where the target holds something else, DataError
    where the checkpoint is damaged or gone.
    """
    options.check()
    source = resolve(path, warn, shards=False, step=step)
    if step == "newest" and source.checkpoint.path != path.absolute():
        warn_of_better(source, warn)
    is_kept = options.adapter == "keep"
    if is_kept and source.adapter is None:
        raise RecipeError("--adapter keep: the run trained all parameters, it has no adapter to keep")
    if options.text_only and not source.model.get("untouched"):
        raise RecipeError("--text-only: the run trained no multimodal checkpoint", hint="leave it out")
    kind: Literal["", "adapter", "text"] = "adapter" if is_kept else "text" if options.text_only else ""
    final = (output or export_dir(source.run_dir, source.step, kind)).absolute()
    plan = ExportPlan(
        source=source,
        output=final,
        dtype=options.dtype,
        adapter="none" if source.adapter is None else options.adapter,
        shard_size=options.shard_size,
        base_model=options.base_model,
        text_only=options.text_only,
        manifest_sha256=sha256_file(source.checkpoint.path / MANIFEST_NAME),
        done=False,
    )
    return replace(plan, done=_is_done(plan))


def run_export(plan: ExportPlan) -> ExportReport:
    """Carry out a plan. The same checkpoint and options give the same bytes; a target that holds them is left alone.

    Raises DataError for a corrupt checkpoint, MachineError for a full disk and VerificationError, with nothing
    published, where the export is not the trained model.
    """
    started = time.perf_counter()
    if plan.done:
        return _report(plan, None, None, started)
    checkpoint = plan.source.checkpoint.path
    try:
        return _written_and_proven(plan, started)
    except DataError as error:  # its tensors are checked only now, as they are read
        raise with_remedies(error, checkpoint) if error.message.startswith(f"{checkpoint}/") else error from error


def _written_and_proven(plan: ExportPlan, started: float) -> ExportReport:
    with quiet():
        trained = trained_skeleton(plan.source)
        form = form_of(plan, trained)
    verify.require_memory(trained.plain, form.elements)
    with CheckpointHold(plan.source.checkpoint.path), _temporary(plan.output) as directory:
        with quiet():
            padding = reward_padding(plan.source)
            verify.require_same_tokenizer(plan.source)
            form.require_same()
            with OpenFiles() as files:
                require_same_frozen(plan.source, trained.plain, frozen_names(trained.adapted), files)
            outputs, written = write_files(plan, directory, trained, form, padding)
            id_probes = verify.require_same_ids(directory, plan.source)
            digests = verify.require_written(directory, written, outputs)
            if plan.adapter != "keep":
                form.require_written(directory)
            probes = read_probes(plan.source)
            difference = compare_logits(plan, directory, probes, form, padding)
        _write_identity(plan, directory, digests, padding)
        if _is_done(plan):  # by another process meanwhile: its bytes are the same
            return _report(replace(plan, done=True), None, None, started)
        publish_dir(directory, plan.output)
    return replace(_report(plan, difference, probes, started), id_probes=id_probes)


def form_of(plan: ExportPlan, trained: Trained) -> Form:
    """What the directory will hold of the trained model. Raises DataError and RecipeError where it cannot."""
    if not is_part(trained.plain):
        return Itself(trained, read_config(plan.source))
    from tuner.export.multimodal import Alone, Whole

    return Alone(plan.source, trained.plain) if plan.text_only else Whole(plan.source, trained.plain)


def write_files(
    plan: ExportPlan, directory: Path, trained: Trained, form: Form, padding: Padding | None = None
) -> tuple[list[Output], dict[str, Written]]:
    """Write every file but the identity; the tensors, and what was handed to the system of the files that hold them."""
    source, dtype = plan.source, DTYPES[plan.dtype]
    config = form.config
    write_tokenizer(directory, source)
    if source.head == "score":
        write_padding(directory, config, padding)
    else:
        write_generation_config(directory, source, config)
    with OpenFiles() as files:
        values = Values(source, trained, files)
        if plan.adapter == "keep":
            outputs = values.adapter(dtype)
            _require_space(plan, outputs)
            base = base_named(source, plan.base_model)
            write_adapter_config(directory, trained.adapted, lora_spec(source.adapter or {}), base)
            return outputs, write_shards(directory, [Shard(ADAPTER_WEIGHTS, tuple(outputs))])
        outputs = form.outputs(values, dtype, files)
        _require_space(plan, outputs)
        form.write_config(directory, dtype)
        return outputs, write_shards(directory, plan_shards(outputs, plan.shard_size))


def base_named(source: Source, name: str | None) -> tuple[str | None, str | None]:
    """What a kept adapter says of its base model, and of its revision: `name`, a hub name, or the path of a directory.

    Both are None where there is no base model: it was trained from random weights.
    """
    revision = source.model.get("revision")
    if name is not None:
        return name, revision if name == source.hub_name else None
    if source.model.get("init") == "random":
        return None, None
    return source.hub_name or str(Path(str(source.model["name_or_path"])).absolute()), revision


def read_probes(source: Source) -> verify.Probes:
    """The run's probes, or fixed ones that the model answers, rebuilt from the checkpoint, where it recorded none."""
    return verify.recorded_probes(source) or verify.fallback_probes(load_trained(source))


def compare_logits(
    plan: ExportPlan, directory: Path, probes: verify.Probes, form: Form, padding: Padding | None = None
) -> verify.Difference:
    """Load the export as its users will and hold its answers against those of the trained model.

    With the weights as training held them they must be the same, with those that were written close.
    """
    if plan.adapter == "keep":
        base = plain_base(plan.source)
        if plan.source.head == "score":  # as the card says to do
            base.config.get_text_config().pad_token_id = None if padding is None else padding.id
        loaded = verify.load_adapter(directory, base)
    else:
        loaded = verify.load_plain(directory, plan.source.head)
    if padding is not None:
        require_batches(loaded, probes, padding)
    difference = exact = verify.answers(loaded, probes)
    if plan.dtype != "fp32":
        _fill(plan, loaded, form)
        exact = verify.answers(loaded, probes)
    verify.require_close(exact, "the export's model is not the trained model", relative=verify.SAME_MODEL)
    verify.require_close(difference, "rounded to bf16 the export answers differently", kl=verify.ROUNDED_KL)
    return difference


def _fill(plan: ExportPlan, loaded: nn.Module, form: Form) -> None:
    """Put the weights as training held them into a loaded export: nothing is rounded then, and nothing else changes."""
    with OpenFiles() as files:
        values = Values(plan.source, trained_skeleton(plan.source), files)
        if plan.adapter == "keep":
            verify.fill_adapter(loaded, {out.name: out.source.whole() for out in values.adapter(DTYPES["fp32"])})
        else:
            verify.fill(loaded, ((form.name(name), tensor) for name, tensor in values.whole()))


def _write_identity(plan: ExportPlan, directory: Path, digests: Mapping[str, str], padding: Padding | None) -> None:
    facts = lineage(plan.source, plan.manifest_sha256, plan.options)
    text = card(plan.source, facts, plan.adapter == "keep", is_padded=padding is not None)
    write_new(directory / CARD, text.encode())
    files = file_entries(directory, exclude=(LINEAGE, *digests))
    files |= {name: {"size": regular_size(directory / name), "sha256": sha256} for name, sha256 in digests.items()}
    write_new(directory / LINEAGE, json_bytes({**facts, "files": dict(sorted(files.items()))}))


def _is_done(plan: ExportPlan) -> bool:
    """Whether the target holds this very export. Raises RecipeError where it holds anything else."""
    if not os.path.lexists(plan.output):
        return False
    hint = "give another --output; nothing was changed"
    try:
        there = read_json(plan.output / LINEAGE)
        source = there.get("source")
        same = isinstance(source, Mapping) and source.get("manifest_sha256") == plan.manifest_sha256
        if not same or there.get("export") != plan.options:
            raise RecipeError(f"{plan.output}: holds another export", hint=hint)
        verify_entries(plan.output, there.get("files") or {}, hash=True)
        if not there.get("files"):
            raise RecipeError(f"{plan.output}: holds something else", hint=hint)
    except DataError as error:
        raise RecipeError(f"{plan.output}: exists and is not this export ({error.message})", hint=hint) from error
    return True


def _require_space(plan: ExportPlan, outputs: Sequence[Output]) -> None:
    needed = total_bytes(outputs)
    free = free_bytes(plan.output.parent)
    if free < needed:
        raise MachineError(
            f"{plan.output.parent}: the export needs {needed:,} bytes, {free:,} are free",
            hint="free disk space or give another --output",
        )


@contextmanager
def _temporary(final: Path) -> Iterator[Path]:
    """A fresh locked directory next to `final`, removed unless it was published; a killed export's leftovers go too."""
    prefix = f"{TMP_PREFIX}{final.name}-"
    directory = final.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        make_dirs(final.parent)
        sweep_unfinished(final.parent, f"{final.name}-")
        directory.mkdir()
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise machine_error(directory, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield directory
    except OSError as error:
        raise machine_error(directory, error) from error
    finally:
        with suppress(TunerError):  # what failed before is reported; what stays now goes with the next export
            discard_dir(directory)
        os.close(descriptor)


def sweep_unfinished(parent: Path, prefix: str) -> None:
    """Remove what unfinished exports to targets that begin with ``prefix`` left, unless their process still runs.

    Raises MachineError.
    """
    beginnings = tuple(f"{start}{prefix}" for start in (TMP_PREFIX, TRASH_PREFIX, f"{TRASH_PREFIX}tmp-"))
    for path in sorted(parent.iterdir()):
        if path.name.startswith(beginnings) and path.is_dir() and not path.is_symlink() and not is_held(path):
            discard_dir(path)


def _report(
    plan: ExportPlan, difference: verify.Difference | None, probes: verify.Probes | None, started: float
) -> ExportReport:
    files = [path for path in plan.output.rglob("*") if path.is_file()]
    return ExportReport(
        path=plan.output,
        step=plan.source.step,
        dtype=plan.dtype,
        adapter=plan.adapter,
        files=len(files),
        weight_files=sum(path.suffix == ".safetensors" for path in files),
        bytes=sum(path.stat().st_size for path in files),
        probes=len(probes.prompts) if probes else 0,
        probes_recorded=bool(probes and probes.recorded),
        max_difference=difference.absolute if difference else None,
        kl=difference.kl if difference else None,
        max_relative_difference=difference.relative if difference else None,
        seconds=time.perf_counter() - started,
        already_exported=plan.done,
    )
