"""An export on the Hugging Face hub: checked before it is uploaded, in one commit."""

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from tuner.checkpoint.manifest import step_dirs
from tuner.errors import DataError, MachineError, RecipeError, first_line
from tuner.export.card import CARD
from tuner.rundir.checkpoints import LINEAGE
from tuner.rundir.layout import EXPORTS, LATEST, require_no_links
from tuner.rundir.run_json import is_run
from tuner.runtime.files import json_bytes, read_json, verify_entries

REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", flags=re.ASCII)
ADAPTER_CONFIG, GGUF = "adapter_config.json", ".gguf"


@dataclass(frozen=True)
class Upload:
    """What goes to a repository: files as they are, and bytes in place of those that name the repository."""

    directory: Path
    repo: str
    files: dict[str, Path | bytes]
    step: int | None

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(each) if isinstance(each, bytes) else each.stat().st_size for each in self.files.values())


@dataclass(frozen=True)
class PushReport:
    """A published upload: where it is, its commit, and how much it was."""

    url: str
    commit: str
    repo: str
    files: int
    bytes: int
    seconds: float


def find_export(path: Path) -> Path:
    """The export that a path means: itself, a GGUF file, or the newest one of a run. Raises RecipeError for none.

    Raises DataError for a run with links among its names.
    """
    if (path / LINEAGE).is_file() or (path.suffix == GGUF and path.is_file()):
        return path
    if not is_run(path):
        raise RecipeError(
            f"{path}: neither an export nor a run",
            hint="give what tuner export-hf or export-gguf wrote, or a run that was exported",
        )
    require_no_links(path)
    latest = path / EXPORTS / LATEST
    there = [each for _, each in step_dirs(path / EXPORTS)] + sorted((path / EXPORTS).glob("step-*-adapter"))
    found = next((each for each in [latest.resolve(), *there] if (each / LINEAGE).is_file()), None)
    if found is None:
        raise RecipeError(f"{path}: the run has no export yet", hint=f"export it first: tuner export-hf {path}")
    return found


def plan_push(directory: Path, repo: str) -> Upload:
    """Check every byte of an export, and write its card and `tuner.json` for the repository; uploads nothing.

    Files that the export did not write are not uploaded. Raises RecipeError for a name that is none, and for an adapter
    of a base model that only this machine has; DataError for an export that is not as it was written.
    """
    if not REPO.fullmatch(repo):
        raise RecipeError(f"{repo}: no name of a repository", hint="write OWNER/NAME, such as me/my-model")
    if directory.suffix == GGUF and directory.is_file():
        from tuner.export.gguf.upload import files_of  # the library gguf is there where such a file was written

        found, written_at = files_of(directory)
        return Upload(directory.parent, repo, dict(found), written_at)
    facts = read_json(directory / LINEAGE)
    entries = facts.get("files")
    if not isinstance(entries, dict) or not entries:
        raise DataError(f"{directory / LINEAGE}: lists no files", hint="export it again: tuner export-hf RUN")
    verify_entries(directory, entries, hash=True)
    base = _base_of(directory)
    files: dict[str, Path | bytes] = {name: directory / name for name in entries}
    if CARD in entries:
        card = _card_for(repo, (directory / CARD).read_text(encoding="utf-8"), base)
        files[CARD] = card
        entries = {**entries, CARD: {"size": len(card), "sha256": hashlib.sha256(card).hexdigest()}}
    files[LINEAGE] = json_bytes({**facts, "files": dict(sorted(entries.items()))})
    step = facts.get("source", {}).get("step")
    return Upload(directory, repo, files, step if type(step) is int else None)


def push(upload: Upload, private: bool = False, endpoint: str | None = None) -> PushReport:
    """Create the repository where it is not there, and upload in one commit.

    The token is that of HF_TOKEN, or of `hf auth login`. ``endpoint`` is by default HF_ENDPOINT's. The hub's library
    sends a file again where that fails, and the hub takes a large one by its SHA-256 alone. Raises MachineError.
    """
    started = time.perf_counter()
    if (token := get_token()) is None:
        raise MachineError("there is no token for the hub", hint="set HF_TOKEN, or log in: hf auth login")
    api = HfApi(endpoint=endpoint or constants.ENDPOINT, token=token, library_name="tuner")
    message = "Upload by tuner" + ("" if upload.step is None else f", step {upload.step}")
    added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in upload.files.items()]
    with _hub_errors(upload.repo):
        api.create_repo(upload.repo, private=True if private else None, exist_ok=True)
        done = api.create_commit(upload.repo, operations=added, commit_message=message)
    url = f"{api.endpoint}/{upload.repo}"
    return PushReport(url, done.oid, upload.repo, len(upload.files), upload.bytes, time.perf_counter() - started)


def _base_of(directory: Path) -> str | None:
    """The base model that an adapter names; None for a whole model. Raises RecipeError for a local directory."""
    if not (directory / ADAPTER_CONFIG).is_file() or (directory / "config.json").is_file():
        return None
    base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or Path(str(base)).is_absolute():
        raise RecipeError(
            f"{directory / ADAPTER_CONFIG}: names the base model {base}, which others do not have",
            hint="export it again: tuner export-hf RUN --adapter keep --base-model OWNER/NAME --output DIR",
        )
    return str(base)


def _card_for(repo: str, card: str, base: str | None) -> bytes:
    """The export's model card, which shows how to load the repository in place of a directory."""
    text = re.sub(r"\bDIRECTORY\b", f'"{repo}"', card)
    if base is not None:
        text = re.sub(r"\bBASE_MODEL\b", f'"{base}"', text)
    return text.encode()


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Raise MachineError where the hub, or the way to it, fails, or the hub refuses."""
    try:
        yield
    except Exception as error:  # what the library's HTTP client raises has no promised class
        reason, cause = first_line(error), error
        while isinstance(cause, RuntimeError) and isinstance(cause.__cause__, Exception):  # of one file's upload
            cause = cause.__cause__
        if isinstance(cause, OfflineModeIsEnabled):
            raise MachineError("HF_HUB_OFFLINE is set", hint="unset it to push") from error
        is_hub, response = isinstance(cause, HfHubHTTPError), getattr(cause, "response", None)
        status = getattr(response, "status_code", None)
        if is_hub and status is not None and status < 500 and status != 429:
            raise MachineError(
                f"the hub refuses {repo}: {reason}",
                hint="the token needs the right to write there: hf auth login, or HF_TOKEN",
            ) from error
        is_transport = is_hub or type(cause).__module__.split(".")[0].startswith("httpx")
        if not is_transport and not isinstance(cause, (ConnectionError, TimeoutError)):
            raise
        raise MachineError(
            f"{repo}: the hub cannot be reached: {reason}", hint="push it again: large files that are there stay"
        ) from error
