"""The tokenizer of a run, in its directory: its files, and the ids of texts with which exports are checked."""

from typing import Any

from tuner.data.id_probes import ID_PROBES, read_probes, text_probes, write_probes
from tuner.data.id_probes import ID_PROBES as PREPARED_PROBES
from tuner.run.build import Assembly
from tuner.rundir.directory import RunDir
from tuner.rundir.layout import TOKENIZER
from tuner.runtime.files import file_entries, fsync_path, machine_error, regular_size, sha256_file


def write_tokenizer(run: RunDir, assembly: Assembly) -> None:
    """Write the tokenizer's files, and probes of its ids: some of the prepared rows, and adversarial texts.

    Raises MachineError.
    """
    assembly.tokenizer.save(run.path / TOKENIZER)
    rows, path = assembly.prepared.path / PREPARED_PROBES, run.path / ID_PROBES
    kept = read_probes(rows) if rows.is_file() else []
    try:
        write_probes(path, [*kept, *text_probes(assembly.tokenizer)])
        fsync_path(path)
    except OSError as error:
        raise machine_error(path, error) from error


def tokenizer_meta(run: RunDir) -> dict[str, Any]:
    """What a checkpoint notes of them, so that an export can tell that they are still the same."""
    probes = run.path / ID_PROBES
    found = {ID_PROBES: {"size": regular_size(probes), "sha256": sha256_file(probes)}} if probes.is_file() else {}
    return {"tokenizer_files": file_entries(run.path / TOKENIZER), "id_probes": found}
