"""Export a checkpoint to a Hugging Face directory: build next to the target, prove it, publish it with one rename.

The report says what was done, and how closely the export answers as the trained model does.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tuner.errors import DataError, TunerError
from tuner.export import verify
from tuner.export.card import CARD, base_facts, card, lineage
from tuner.export.form import Form, LanguageModelAlone, WholeModel
from tuner.export.outputs import ExportedValues, Trained, trained_skeleton
from tuner.export.padding import VocabularyPadding, reward_padding, write_padding
from tuner.export.plan import ExportPlan, is_done
from tuner.export.proof import ExportProof, Merge, measured, prove
from tuner.export.source import ExportSource
from tuner.export.tensors import OpenFiles, Output, Written, plan_shards, write_shards
from tuner.export.verify import KEPT
from tuner.export.weights import DTYPES, load_trained, read_config, require_same_frozen
from tuner.export.write import ADAPTER_WEIGHTS, quiet, write_adapter_config, write_generation_config, write_tokenizer
from tuner.model.build import is_part
from tuner.model.freeze import frozen_names
from tuner.rundir.checkpoints import LINEAGE, CheckpointHold, is_held, link_latest, version_dirs
from tuner.rundir.layout import EXPORTS
from tuner.rundir.model_path import with_remedies
from tuner.runtime import files
from tuner.runtime.stop import undone


@dataclass(frozen=True)
class ExportReport:
    """A published export. Differences are None where the same export was there already; bytes count all files.

    `max_difference` is the largest absolute difference of the logits at the ends of the probes.
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
    seconds: float
    already_exported: bool
    id_probes: int = 0
    """Texts of which the exported tokenizer, loaded plainly, gave the ids of training."""
    max_relative_difference: float | None = None
    """The largest difference as a share of the largest logit."""
    base: str | None = None
    """What the adapter of a quantised base was merged into, original or quantized; None where neither."""
    kl_original: float | None = None
    """Of a quantised base: the KL from the trained model of what is merged into the original one, nats a token."""
    kl_quantized: float | None = None
    """The same of what is merged into the quantised one."""
    kl_tokens: int | None = None
    """Positions of the probes over which each KL is a mean."""
    kept: float | None = None
    """The share of what training changed that the written weights keep; None where nothing was rounded."""
    kl: float | None = None
    """The KL of their next-token distributions from the trained model's, nats a token."""
    gain: float | None = None
    """That of the base's from the trained model's: what training changed."""
    bf16_kept: float | None = None
    """The share that bf16 would have kept, where `auto` took fp32 for it."""
    auto_dtype: str | None = None
    """The type that `auto` takes, as far as this export shows it."""
    weights: str = "trained"
    """Which weights these are: the trained ones, or what average."""

    def choice(self) -> str:
        """Of a quantised base, how far what is merged into either one is from the trained model; else empty."""
        if self.kl_quantized is None:
            return ""
        figures = f"{self.kl_quantized:.2g} nats a token on the quantised base"
        if self.kl_original is not None:
            figures += f", {self.kl_original:.2g} on the original one"
        what = f"merged into the {self.base} base in {self.dtype}" if self.base else "the adapter is kept apart"
        return f"{what}; KL from the trained model over {self.kl_tokens:,} tokens: {figures}"

    def proof(self) -> str:
        """How closely the export matches the trained model, with the limits; empty where nothing was compared."""
        if self.max_difference is None or self.max_relative_difference is None:
            return ""
        model = "the trained model" if self.probes_recorded else "the checkpoint's model (the run recorded no probes)"
        model = model if self.weights == "trained" else f"the {self.weights}, rebuilt from the run"
        match = f"{self.probes} probes match {model}"
        exact = f"{verify.SAME_MODEL:.0e} of the largest logit"
        if self.base == "original":
            return f"{match} with the weights that were trained on in place of the original ones, to {exact}"
        if self.dtype == "fp32":
            return f"{match}: largest logit difference {self.max_relative_difference:.1e} (limit {exact})"
        moved = f"rounding moves them by at most {self.max_relative_difference:.1%} of it"
        return (
            f"{match}: every tensor is the trained one, rounded to {self.dtype} once; before rounding, logits agree to "
            f"{verify.SAME_MODEL:.0e} of the largest; {moved}"
        )

    def rounding(self) -> str:
        """What rounding keeps of what training changed; empty where nothing was rounded."""
        if self.bf16_kept is not None:
            return f"bf16 would keep {self.bf16_kept:.0%} of what training changed, so the weights are fp32"
        if self.dtype == "fp32" == self.auto_dtype:
            return "without the base model nobody knows what bf16 would keep, so the weights are fp32"
        if self.kept is None:
            return ""
        what = "the original base" if self.base == "original" else self.dtype
        figures = f"KL {self.kl:.2g} of {self.gain:.2g} nats a token, {self.kl_tokens:,} tokens"
        return f"{what} keeps {self.kept:.0%} of what training changed ({figures})"

    def remedy(self) -> str:
        """The options that keep what this export loses, where that is more than a fifth; else empty."""
        if self.kept is None or self.kept >= KEPT:
            return ""
        return f"{'--base quantized' if self.base == 'original' else '--dtype fp32'} --output {self.path}-kept"


def run_export(plan: ExportPlan) -> ExportReport:
    """Carry out a plan. The same checkpoint and options give the same bytes; a target that holds them is left alone.

    Raises DataError for a corrupt checkpoint, MachineError for a full disk and VerificationError, with nothing
    published, where the export is not the trained model.
    """
    started = time.perf_counter()
    if plan.done:
        _lead_to(plan)
        return _report(plan, None, None, started)
    checkpoint = plan.source.checkpoint.path
    try:
        if plan.dtype != "auto":
            report = _attempt(plan, started)
        else:  # in bf16, or in fp32 where rounding to bf16 would cost more than a fifth of the training
            report = _attempt(replace(plan, dtype="bf16"), started, otherwise=replace(plan, dtype="fp32"))
    except DataError as error:  # its tensors are checked only now, as they are read
        raise with_remedies(error, checkpoint) if error.message.startswith(f"{checkpoint}/") else error from error
    _lead_to(plan)
    return report


def _lead_to(plan: ExportPlan) -> None:
    """Have the run's `exports/latest` lead to the trained weights of its newest exported step."""
    exports = plan.source.run_dir / EXPORTS
    is_newest = all(step <= plan.source.step for step, _ in version_dirs(exports))
    if plan.output.parent == exports and plan.source.weights.kind == "trained" and is_newest:
        link_latest(exports, plan.output.name)


def _attempt(
    plan: ExportPlan, started: float, otherwise: ExportPlan | None = None, lost: ExportProof | None = None
) -> ExportReport:
    """Write, prove and publish; what loses too much is not published where there is another plan for it.

    ``lost`` is what bf16 loses, where that is why it is not bf16.
    """
    with quiet():
        trained = trained_skeleton(plan.source)
        form = form_of(plan, trained)
    verify.require_memory(trained.plain, form.elements)
    with ExitStack() as held, temporary(plan.output) as directory:
        for info in plan.source.checkpoints:
            held.enter_context(CheckpointHold(info.path))
        with quiet():
            padding = reward_padding(plan.source)
            verify.require_same_tokenizer(plan.source)
            form.require_same()
            with OpenFiles() as opened:
                require_same_frozen(plan.source, trained.plain, frozen_names(trained.adapted), opened)
            probes = read_probes(plan.source)
            merge = None if plan.source.quantize == "none" else measured(plan, trained, probes)
            outputs, written = write_files(plan, directory, trained, form, padding, merge)
            id_probes = verify.require_same_ids(directory, plan.source)
            digests = verify.require_written(directory, written, outputs)
            if plan.adapter != "keep":
                form.require_written(directory)
            proof = prove(plan, directory, trained, probes, form, padding, merge)
        again = otherwise if proof.is_rounded_away else None
        if again is None:
            facts = lineage(plan.source, plan.manifest_sha256, plan.options) | _measures(plan, merge, proof, lost)
            text = card(plan.source, facts, plan.adapter == "keep", is_padded=padding is not None)
            files.write_new(directory / CARD, text.encode())
            entries = files.file_entries(directory, exclude=(LINEAGE, *digests))
            entries |= {name: {"size": written[name].size, "sha256": sha256} for name, sha256 in digests.items()}
            files.write_new(directory / LINEAGE, files.json_bytes({**facts, "files": dict(sorted(entries.items()))}))
            if is_done(plan):  # by another process meanwhile: its bytes are the same
                return _report(replace(plan, done=True), None, None, started)
            files.publish_dir(directory, plan.output)
    if again is not None:
        return _attempt(again, started, lost=proof)
    return replace(_report(plan, proof, probes, started), id_probes=id_probes)


def form_of(plan: ExportPlan, trained: Trained) -> Form:
    """What the directory will hold of the trained model. Raises DataError and RecipeError where it cannot."""
    if not is_part(trained.plain):
        return Form(trained, read_config(plan.source))
    return (LanguageModelAlone if plan.text_only else WholeModel)(plan.source, trained)


def write_files(
    plan: ExportPlan, directory: Path, trained: Trained, form: Form, padding: VocabularyPadding | None = None,
    merge: Merge | None = None,
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
        values = ExportedValues(source, trained, files, original=merge is not None and merge.base == "original")
        if plan.adapter == "keep":
            outputs = values.adapter(dtype)
            assert trained.adapter is not None, "the plan says so"
            write_adapter_config(directory, trained.adapted, trained.adapter, base_named(source, plan.base_model))
            return outputs, write_shards(directory, {ADAPTER_WEIGHTS: outputs})
        outputs = form.outputs(values, dtype, files)
        form.write_config(directory, dtype)
        return outputs, write_shards(directory, plan_shards(outputs, plan.shard_size))


def base_named(source: ExportSource, name: str | None) -> tuple[str | None, str | None]:
    """What a kept adapter says of its base model, and of its revision: `name`, a hub name, or the path of a directory.

    Both are None where there is no base model: it was trained from random weights.
    """
    if name is not None:
        return name, source.revision if name == source.hub_name else None
    if source.is_random:
        return None, None
    return source.hub_name or str(Path(source.name_or_path).absolute()), source.revision


def read_probes(source: ExportSource) -> verify.Probes:
    """The run's probes, or fixed ones that the model answers, rebuilt from the checkpoint, where it recorded none.

    Averaged weights answer none in training: their model is rebuilt, too, and answers the run's prompts.
    """
    recorded = verify.recorded_probes(source)
    if source.weights.kind == "trained" and recorded is not None:
        return recorded
    model = load_trained(source)
    if recorded is None:
        return verify.fallback_probes(model)
    return replace(recorded, logits=verify.last_logits(model, recorded.prompts), recorded=False)


def _measures(plan: ExportPlan, merge: Merge | None, proof: ExportProof, lost: ExportProof | None) -> dict[str, Any]:
    """What the export says of what was measured, and which type `auto` takes where that was found."""
    facts: dict[str, Any] = {}
    if merge is not None:
        facts["quantized_base"] = base_facts(plan.source, merge, plan.adapter == "keep")
    if proof.kept is not None:
        facts["kept"] = asdict(proof.kept)
    if lost is not None:
        facts["bf16_kept"] = None if lost.kept is None else asdict(lost.kept)
    if lost is not None or plan.dtype == "bf16":
        facts["auto_dtype"] = "fp32" if lost is not None or proof.is_rounded_away else "bf16"
    return facts


@contextmanager
def temporary(final: Path) -> Iterator[Path]:
    """A fresh locked directory next to `final`, removed unless it was published; a killed export's leftovers go too."""
    prefix = f"{files.TMP_PREFIX}{final.name}-"
    directory = final.parent / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
    with undone(lambda: files.discard_whatever_is_left(directory)), files.machine_errors(final):
        files.make_dirs(final.parent)
        sweep_unfinished(final.parent, f"{final.name}-")
        directory.mkdir()
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield directory
        finally:
            with suppress(TunerError):  # what failed before is reported; what stays now goes with the next export
                files.discard_dir(directory)
            os.close(descriptor)


def sweep_unfinished(parent: Path, prefix: str) -> None:
    """Remove what unfinished exports to targets that begin with ``prefix`` left, unless their process still runs.

    Raises MachineError.
    """
    starts = (files.TMP_PREFIX, files.TRASH_PREFIX, f"{files.TRASH_PREFIX}tmp-")
    beginnings = tuple(f"{start}{prefix}" for start in starts)
    for path in sorted(parent.iterdir()):
        if path.name.startswith(beginnings) and path.is_dir() and not path.is_symlink() and not is_held(path):
            files.discard_dir(path)


def _report(plan: ExportPlan, proof: ExportProof | None, probes: verify.Probes | None, started: float) -> ExportReport:
    paths = [path for path in plan.output.rglob("*") if path.is_file()]
    facts = files.read_json(plan.output / LINEAGE)
    quantized, kept = facts.get("quantized_base") or {}, facts.get("kept") or {}
    kl = quantized.get("kl") or {}
    return ExportReport(
        path=plan.output, step=plan.source.step, dtype=facts["export"]["dtype"], adapter=plan.adapter, files=len(paths),
        weight_files=sum(path.suffix == ".safetensors" for path in paths),
        bytes=sum(path.stat().st_size for path in paths), probes=len(probes.prompts) if probes else 0,
        probes_recorded=bool(probes and probes.recorded), max_difference=proof.difference.absolute if proof else None,
        max_relative_difference=proof.difference.relative if proof else None,
        kept=kept.get("share"), kl=kept.get("kl"), gain=kept.get("gain"),
        kl_tokens=kept.get("tokens") or quantized.get("tokens"), bf16_kept=(facts.get("bf16_kept") or {}).get("share"),
        auto_dtype=facts.get("auto_dtype"), seconds=time.perf_counter() - started, already_exported=plan.done,
        weights=plan.options.get("weights", "trained"),
        base=quantized.get("merged_into"), kl_original=kl.get("original"), kl_quantized=kl.get("quantized"),
    )  # fmt: skip
