"""Every name in a run directory, and that none of them is a link. No other module writes one of the names; a test reads
the whole package for that.

RUN/
  run.json                the record: status, launches and, of a finished run, its metrics
  recipe.yaml             the recipe as it was given
  recipe.resolved.yaml    the recipe without `auto`, with absolute paths
  metrics.jsonl           a line for each step and each evaluation
  samples.jsonl           answers to held-out prompts
  windows.json            which portions of its data a run has opened or left out, where they come in portions
  bank.json               which versions of the sources of its weights a run has taken, where it looks for newer ones
  teachers.json           which versions of its teacher a run has learned from, where it looks for newer ones
  marks/                  metrics_stepN.json: what was measured at each mark
  evaluations/step-N/     TASK.jsonl: a line for each item of a task that was scored
  checkpoints/step-N/     what training resumes from (tuner.checkpoint.manifest names them)
  tokenizer/              the tokenizer's files
  model_config/           the base model's config
  init_from.txt           what model.init_from gave the model before the first step
  id_probes.jsonl         texts with the ids that training sees of them
  logs/rankN.log          what each process said (tuner.runtime.dist.log_name); logs/export.log, logs/windows.log
  logs/rankN.metrics.jsonl the steps as another process than rank 0 had them, where the recipe asks for it
  launches/N/git.diff     the source tree's changes at each launch
  exports/step-N/         Hugging Face directories (step-N-adapter, step-N-text); exports/latest leads to the newest;
                          (.tmp-latest-* before it does); step-N-TYPE.gguf is a file for llama.cpp
  profile/                recorded steps
  prober/step-N/          activations and gradients of chosen modules
  trackers/NAME.json      the id of its run for each tracker, and the newest step that it was sent
  curves.html             the page of `tuner runs plot`
  lock                    held by whoever trains in the directory or removes it
  STOP                    made by the user: the run saves and stops

Links are never followed, since one may lead anywhere, and be written through; pipes and devices are refused likewise.
"""

import os
from pathlib import Path
from typing import Literal

from tuner.checkpoint.manifest import step_name
from tuner.errors import DataError
from tuner.runtime import files

RECORD = "run.json"
RECIPE = "recipe.yaml"
RESOLVED_RECIPE = "recipe.resolved.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
PORTIONS = "windows.json"
TEACHERS = "teachers.json"
BANK = "bank.json"
MARKS = "marks"
EVALUATIONS = "evaluations"
CHECKPOINTS = "checkpoints"
DAMAGED_CHECKPOINTS = "damaged-checkpoints"
"""Where messages have the user move checkpoints of which none is valid."""
TOKENIZER = "tokenizer"
MODEL_CONFIG = "model_config"
ID_PROBES = "id_probes.jsonl"
INIT_REPORT = "init_from.txt"
LOGS = "logs"
EXPORT_LOG = "export.log"
PORTIONS_LOG = "windows.log"
LAUNCHES = "launches"
SOURCE_DIFF = "git.diff"
EXPORTS = "exports"
LATEST = "latest"
UNFINISHED_LINK = f"{files.TMP_PREFIX}{LATEST}-"
"""What `latest` is called before it takes the place of the one before; whoever is killed then leaves it."""
PROFILE = "profile"
PROBER = "prober"
TRACKERS = "trackers"
CURVES = "curves.html"
LOCK = "lock"
STOP = "STOP"
MODEL_PREFIX = "model/"
"""Before the names of the model's tensors in a checkpoint; those of the optimizer have others."""
EMA_PREFIX = "ema/"
"""Before the names of the averages of the model's tensors in a checkpoint."""
NAMES = frozenset(
    {RECORD, RECIPE, RESOLVED_RECIPE, METRICS, SAMPLES, PORTIONS, TEACHERS, BANK, MARKS, EVALUATIONS, CHECKPOINTS}
    | {TOKENIZER, MODEL_CONFIG, ID_PROBES, INIT_REPORT, LOGS, LAUNCHES, EXPORTS, PROFILE, PROBER, TRACKERS, CURVES}
    | {LOCK, STOP}
)
"""All that a run directory may hold."""
LEFTOVERS = frozenset(
    {LOCK, CHECKPOINTS, RESOLVED_RECIPE, RECIPE, LOGS, LAUNCHES, TOKENIZER, MODEL_CONFIG, ID_PROBES, INIT_REPORT, STOP}
    | {TEACHERS, BANK}
)
"""What a launch that died before it wrote its record may leave, what may ask it to stop, and which versions it is to
take: those of the run that it is held against."""


def rank_metrics(rank: int) -> str:
    """The file, in the directory of logs, of the metrics of a process other than rank 0."""
    return f"rank{rank}.metrics.jsonl"


def mark_metrics(run_dir: Path, step: int | str) -> Path:
    """Where the figures of a mark lie."""
    return run_dir / MARKS / f"metrics_step{step}.json"


def export_dir(run_dir: Path, step: int, kind: Literal["", "adapter", "text"] = "") -> Path:
    """Where the export of a step, or of its adapter or text model alone, is written unless the user names a place."""
    return run_dir / EXPORTS / "-".join(filter(None, (step_name(step), kind)))


_DEPTH = 3
"""Down to `evaluations/step-N/TASK.jsonl`."""
_CLOSED = frozenset({CHECKPOINTS, EXPORTS})
"""Whose entries hold files that are checked one by one where they are read."""


def require_no_links(run_dir: Path) -> None:
    """Check that no name that a run writes or reads is a link, a pipe or a device. DataError for the first that is one.

    The link `exports/latest` is a run's own, and leads to its neighbour.
    """
    for name in sorted(NAMES):
        path = run_dir / name
        _require_plain(path)
        _check_below(path, 1 if name in _CLOSED else _DEPTH)


def _check_below(directory: Path, depth: int) -> None:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:  # not there, no directory, or not to be read: which is said where it is needed
        return
    for entry in entries:
        path = directory / entry.name
        if entry.is_dir(follow_symlinks=False):
            if depth > 1:
                _check_below(path, depth - 1)
        elif not entry.is_file(follow_symlinks=False) and not _is_latest(path):
            _require_plain(path)


def _is_latest(path: Path) -> bool:
    """Whether it is the link from the newest export's second name to its first, or one that was not yet renamed so."""
    is_named = path.name == LATEST or path.name.startswith(UNFINISHED_LINK)
    if not is_named or path.parent.name != EXPORTS or not path.is_symlink():
        return False
    return Path(os.readlink(path)).name == os.readlink(path)


def _require_plain(path: Path) -> None:
    """Check that a path is a file, a directory or nothing. Raises DataError."""
    if path.is_symlink():
        raise DataError(
            f"{path}: a link, to {os.readlink(path)}: links in a run directory are never followed",
            hint="put what it leads to in its place; to have a run on another disk, set output_dir",
        )
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening one may wait for ever
        raise DataError(f"{path}: neither a file nor a directory", hint="remove it: no run makes one")
