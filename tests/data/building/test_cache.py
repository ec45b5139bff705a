"""The cache of prepared data, and prepared data in a store: their damage, their builders and what is collected."""

import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

from tests.data import tiny
from tests.data.tiny import rows
from tests.fixtures import forked
from tests.fixtures.bits import flip_bit
from tests.fixtures.tables import cases
from tests.stores.conftest import Faulty
from tuner.config.recipe import TokenizerSection
from tuner.data.batches import GlobalBatches
from tuner.data.building import prepare as prepare_module
from tuner.data.building import stored
from tuner.data.building.cache import LEVELS, RECORDS, Entry, build_once, collect, damages, entries, find, valid
from tuner.data.building.columns import building
from tuner.data.building.prepare import PreparedInfo, check_prepared, find_prepared, prepare
from tuner.data.encoding.tokenizer_files import load_tokenizer
from tuner.data.prepared import id_spans, open_prepared
from tuner.errors import DataError, MachineError, RecipeError, TunerError
from tuner.generate import base_record
from tuner.profile.fit import KEPT
from tuner.run.settle import CHOICES
from tuner.runtime.console import Console, Level
from tuner.runtime.lock import FileLock
from tuner.setup.hashes import HASHES
from tuner.setup.proven import PROOFS
from tuner.stages import stage_of, url_of
from tuner.stores.client import Client
from tuner.stores.commit import FILES, commit_key

ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef"
MUTANT = "rename-before-manifest"


def prepared(tmp_path: Path, **data: Any) -> PreparedInfo:
    return prepare(tiny.request(tmp_path / "cache", tiny.write_rows(tmp_path / "r.jsonl", rows(20)), **data))


def test_entries_and_how_they_are_found(tmp_path: Path) -> None:
    info, other = prepared(tmp_path), prepared(tmp_path, max_length=65)
    cache = tmp_path / "cache"
    found = entries(cache)
    assert [entry.level for entry in found] == ["prepared", "prepared", "encoded"]
    assert {entry.key for entry in found[:2]} == {info.key, other.key}
    assert find(cache, info.key[:9]).path == info.path
    assert find(cache, str(info.path)).manifest is not None
    with pytest.raises(DataError, match="no such directory or key"):
        find(cache, "f" * 17)
    with pytest.raises(RecipeError, match="names 3 directories"):
        find(cache, "")
    assert entries(tmp_path / "none") == []


def test_damage_is_named_file_by_file(tmp_path: Path) -> None:
    info = prepared(tmp_path, eval="3 documents")
    entry = Entry("prepared", info.path, None)
    assert damages(entry) == []
    flip_bit(info.path / "train.rows.arrow")
    (info.path / "samples.jsonl").unlink()
    assert damages(entry) == [
        f"{info.path / 'samples.jsonl'}: missing",
        f"{info.path / 'train.rows.arrow'}: its SHA-256 differs from the manifest's",
    ]
    manifest = info.path / "manifest.json"
    written = manifest.read_text()
    manifest.write_text("{")
    assert "not valid JSON" in damages(entry)[0]
    facts = json.loads(written)
    for changed in (
        {**facts, "max_length": facts["max_length"] + 1},
        {**facts, "report": {**facts["report"], "bytes": 0}},
        {key: value for key, value in facts.items() if key != "manifest_sha256"},
    ):
        manifest.write_text(json.dumps(changed))
        assert damages(entry)[0] == f"{manifest}: its SHA-256 differs from the one that it names"
    manifest.write_text(json.dumps(facts, indent=4))
    assert len(damages(entry)) == 2, "how it is written does not matter"


@pytest.mark.parametrize(("mode", "owner", "group", "said"), cases(__file__, "a_cache_that_others_may_write"))
def test_a_cache_that_others_may_write_is_warned_of(
    tmp_path: Path, mode: int, owner: int, group: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = prepared(tmp_path).warnings
    assert not any("somebody else puts there" in text for text in warned), "as it is made"
    kept, stat = tmp_path / "cache" / "encoded", Path.stat

    def stated(path: Path, **more: Any) -> os.stat_result:
        facts = list(stat(path, **more))
        if path == kept:
            facts[0], facts[4], facts[5] = (facts[0] & ~0o777) | mode, owner or os.getuid(), group or os.getuid()
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "stat", stated)
    found = [text for text in prepared(tmp_path).warnings if "somebody else puts there" in text]
    assert [text.split(":")[0] for text in found] == ([] if said is None else [f"{kept} {said}"])


def test_a_manifest_that_was_changed_is_built_again(tmp_path: Path) -> None:
    info = prepared(tmp_path)
    manifest = info.path / "manifest.json"
    written = manifest.read_text()
    manifest.write_text(written.replace(f'"max_length": {json.loads(written)["max_length"]}', '"max_length": 63'))
    assert manifest.read_text() != written
    assert not prepared(tmp_path).cached
    assert manifest.read_text() == written


def test_leftovers_and_damage_go_and_nothing_else(tmp_path: Path) -> None:
    info = prepared(tmp_path)
    cache, parent = tmp_path / "cache", info.path.parent
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("1")
    leftovers = [f".tmp-{KEY}-12", f".trash-{KEY}-ab", f".trash-tmp-{info.key}-1-cd", f".trash-trash-{KEY}-1"]
    for name in leftovers:
        (parent / name).mkdir()
        (parent / name / "link").symlink_to(outside)
    (parent / "fedcba9876543210").mkdir()
    kept = [parent / name for name in ("notes", f".tmp-{KEY}", "fedcba987654321")]
    for path in kept:
        path.mkdir()
    (parent / f".tmp-{KEY}-99").symlink_to(outside)
    (parent / "aaaaaaaaaaaaaaaa").symlink_to(outside)
    before = sorted(path.name for path in parent.iterdir())
    would = collect(cache, dry_run=True)
    assert sorted(path.name for path in parent.iterdir()) == before
    removed = collect(cache)
    assert [(item.path, item.reason) for item in removed] == [(item.path, item.reason) for item in would]
    assert sorted(item.path.name for item in removed) == sorted([*leftovers, "fedcba9876543210"])
    assert not any(item.path.exists() for item in removed)
    assert all(path.is_dir() for path in kept)
    assert (parent / f".tmp-{KEY}-99").is_symlink()
    assert (parent / "aaaaaaaaaaaaaaaa").is_symlink()
    assert (outside / "precious").read_text() == "1"
    open_prepared(info.path, verify=True)
    assert collect(cache) == []
    assert collect(tmp_path / "none") == []


def test_records_that_launches_were_killed_over_go(tmp_path: Path) -> None:
    assert set(RECORDS) >= {CHOICES, HASHES, KEPT, PROOFS, base_record("0").parent.name}
    for name in RECORDS:
        (tmp_path / name).mkdir()
        for file in ("a.json", ".tmp-a.json-12-abcdef00"):
            (tmp_path / name / file).write_bytes(b"{}")
        (tmp_path / name / ".tmp-b").symlink_to(tmp_path)
    left = [tmp_path / name / ".tmp-a.json-12-abcdef00" for name in RECORDS]
    assert [item.path for item in collect(tmp_path, dry_run=True)] == left and all(path.exists() for path in left)
    assert [item.path for item in collect(tmp_path)] == left
    assert [sorted(os.listdir(tmp_path / name)) for name in RECORDS] == [[".tmp-b", "a.json"]] * len(RECORDS)


def test_what_is_being_built_is_left_alone(tmp_path: Path) -> None:
    info = prepared(tmp_path)
    cache = tmp_path / "cache"
    (info.path.parent / f".tmp-{KEY}-12").mkdir()
    with FileLock(info.path.parent / f".{KEY}.lock"):
        assert collect(cache) == collect(cache, dry_run=True) == []
        assert (info.path.parent / f".tmp-{KEY}-12").is_dir()
    assert [item.path.name for item in collect(cache)] == [f".tmp-{KEY}-12"]


def test_silent_damage_is_looked_for_on_request(tmp_path: Path) -> None:
    info = prepared(tmp_path)
    flip_bit(info.path / "train.rows.arrow")
    assert collect(tmp_path / "cache") == []
    assert [item.path for item in collect(tmp_path / "cache", verify=True)] == [info.path]


def test_unused_documents_go_on_request(tmp_path: Path) -> None:
    info, cache = prepared(tmp_path), tmp_path / "cache"
    tiny.write_rows(tmp_path / "other.jsonl", rows(5, 50))
    other = prepare(tiny.request(cache, tmp_path / "other.jsonl"))
    encoded = json.loads((other.path / "manifest.json").read_text())["encoded_key"]
    assert collect(cache, unused=True) == []
    for path in sorted(other.path.iterdir()):
        path.unlink()
    other.path.rmdir()
    assert collect(cache) == []
    assert [item.path.name for item in collect(cache, unused=True)] == [encoded]
    open_prepared(info.path, verify=True)


def test_documents_are_not_removed_before_they_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the building of the two levels, the first is held by nobody's manifest."""
    from tuner.data.building import rows as module

    cache, removed, link = tmp_path / "cache", [], module._link

    def collect_then_link(source: Path, target: Path) -> None:
        removed.extend(collect(cache, unused=True))
        link(source, target)

    monkeypatch.setattr(module, "_link", collect_then_link)
    open_prepared(prepared(tmp_path).path, verify=True)
    assert removed == []


def test_a_file_system_without_locks_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(MachineError, match="its file system has no locks") as caught:
        build_once(tmp_path, "prepared", KEY, lambda directory: {})
    assert "data.cache_dir" in str(caught.value.hint)


def test_check_says_what_is_missing(tmp_path: Path) -> None:
    request = tiny.request(tmp_path / "cache", tiny.write_rows(tmp_path / "r.jsonl", rows(20)))
    with pytest.raises(DataError, match="is not there; its documents must be encoded and packed"):
        check_prepared(request)
    assert not (tmp_path / "cache").exists()
    info = prepare(request)
    assert check_prepared(request) == info.path
    with pytest.raises(DataError, match="is not there; its rows must be packed"):
        check_prepared(tiny.request(tmp_path / "cache", tmp_path / "r.jsonl", max_length=65))
    (info.path / "train.rows.arrow").unlink()
    with pytest.raises(DataError, match="is damaged"):
        check_prepared(request)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "one each"])
def test_two_processes_share_a_cache_or_build_the_same_bytes(tmp_path: Path, shared: bool) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(300))
    caches = [tmp_path / ("cache" if shared else f"node{i}") for i in range(2)]
    words = [sys.executable, "-m", "tests.data.building.builder"]
    builders = [
        forked.Popen([*words, str(cache), str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for cache in caches
    ]
    results = [json.loads(builder.communicate(timeout=60)[0]) for builder in builders]
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    assert sorted(cached for _, cached, _ in results) == [False, shared]
    assert not list(tmp_path.glob("*/*/.tmp-*"))


def test_a_second_builder_waits_and_names_the_first(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "prepared" / f".{KEY}.lock"
    path.parent.mkdir()
    code = (
        "import sys; from pathlib import Path; from tuner.runtime.lock import FileLock\n"
        "with FileLock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"

        class Listening(Console):
            def say(self, label: str, text: str, level: Level = "info") -> None:
                said.append(text)
                assert holder.stdin is not None
                holder.stdin.close()

        _, found = build_once(tmp_path, "prepared", KEY, lambda directory: {}, Listening())
    assert not found
    assert said[0].startswith(f"process {holder.pid} on ")


@pytest.mark.slow
def test_the_campaign_finds_nothing_and_its_mutants_turn_it_red() -> None:
    def run(*words: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "tools.prepare_campaign", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    # The calls around the first level's rename. Workers that are killed have tests of their own.
    code, figures = run("--kills", "6", "--races", "2", "--workers", "1", "--first", "36")
    assert (code, figures["ok"], figures["killed"]) == (0, 8, 6), figures
    code, figures = run("--kills", "6", "--races", "0", "--workers", "1", "--first", "28", "--mutant", MUTANT)
    assert code == 1
    assert figures["half_made"] > 0


LINKED: dict[str, Callable[[Path], object]] = {
    "prepared": lambda cache: build_once(cache, "prepared", KEY, lambda _: {}),
    "encoded": lambda cache: build_once(cache, "encoded", KEY, lambda _: {}),
    "reference": lambda cache: building(cache, "reference", KEY).__enter__(),
    "teacher": lambda cache: building(cache, "teacher", KEY).__enter__(),
    f"prepared/{KEY}": lambda cache: build_once(cache, "prepared", KEY, lambda _: {}),
    f"teacher/{KEY}": lambda cache: building(cache, "teacher", KEY).__enter__(),
    "tokenizers": lambda cache: load_tokenizer("", None, TokenizerSection(name_or_path="byte"), cache),
    "exports": lambda _: base_record(KEY),
    f"exports/{KEY}.json": lambda _: base_record(KEY),
}


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_the_cache_is_not_followed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    monkeypatch.setenv("TUNER_CACHE", str(cache))
    outside.mkdir()
    (cache / name).parent.mkdir(parents=True, exist_ok=True)
    (cache / name).symlink_to(outside)
    with pytest.raises(DataError, match=f"{cache / name}: a link, to {outside}"):
        LINKED[name](cache)
    if name in LEVELS:
        for lists in (entries, collect):
            with pytest.raises(DataError, match=f"{cache / name}: a link"):
                lists(cache)
    elif name.partition("/")[0] in LEVELS:
        assert (entries(cache), collect(cache)) == ([], [])
    assert (cache / name).is_symlink()
    assert not any(outside.iterdir())


def test_a_manifest_that_is_a_link_or_a_pipe_is_damage(tmp_path: Path) -> None:
    info = prepared(tmp_path)
    manifest = info.path / "manifest.json"
    manifest.rename(tmp_path / "manifest.json")
    manifest.symlink_to(tmp_path / "manifest.json")
    assert valid(info.path, "prepared") is None
    manifest.unlink()
    os.mkfifo(manifest)
    assert valid(info.path, "prepared") is None
    assert damages(Entry("prepared", info.path, None)) == [f"{manifest}: not a regular file"]
    assert (tmp_path / "manifest.json").exists()


def test_a_cache_that_is_a_link_as_a_whole_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    info = prepared(tmp_path)
    assert [entry.key for entry in entries(tmp_path / "cache") if entry.level == "prepared"] == [info.key]
    assert {path.name for path in (tmp_path / "disk").iterdir()} >= {"prepared", "encoded"}


BLOCK = 512


class Library(Faulty):
    """obstore, which counts the blocks that it gives, and may answer otherwise."""

    blocks = 0

    def answer(self, data: bytes) -> bytes:
        return data

    def get_range(self, store: Any, key: str, **words: int) -> bytes:
        self.blocks += 1
        return self.answer(bytes(obstore.get_range(store, key, **words)))


class Machines:
    """Machines that share a bucket, each with a cache of its own."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.patch, self.library = place, monkeypatch, Library()
        self.stores: dict[str, MemoryStore] = {}
        texts = [tiny.chat(f"question {i}", f"answer {i}" + " very" * (i % 9)) for i in range(60)]
        self.rows = tiny.write_rows(place / "rows.jsonl", texts)

    def client(self, url: str) -> Client:
        return Client(url, self.stores.setdefault(url, MemoryStore()), self.library)

    def on(self, machine: str) -> Path:
        """Where this process is from now on; its cache directory there."""
        self.patch.setenv("TUNER_CACHE", str(self.place / machine))
        return stage_of("s3://bucket/cache")

    def prepare(self, machine: str) -> PreparedInfo:
        self.said = io.StringIO()
        return prepare(tiny.request(self.on(machine), self.rows), Console(stream=self.said))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    monkeypatch.setattr(Client, "connect", staticmethod(found.client))
    monkeypatch.setattr(stored, "WHOLE_BYTES", 0)
    monkeypatch.setattr(stored, "BLOCK_BYTES", BLOCK)
    return found


def steps(path: Path, rank: int = 0) -> list[list[list[int]]]:
    """The ids of each micro-batch of each step of a rank, over two epochs."""
    rows = open_prepared(path).train
    batches = GlobalBatches(
        rows, seed=1, shuffle=True, global_batch_size=4, micro_batch_size=1, rank=rank, world_size=2
    )
    taken = (batches.step(i).micro for i in range(2 * batches.steps_per_epoch))
    return [[batch.input_ids.tolist() for batch in micro] for micro in taken]


def test_another_machine_trains_on_the_same_rows_and_fetches_their_ids_as_it_reads_them(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = machines.prepare("a")
    monkeypatch.setattr(prepare_module, "build_once", None)  # nothing is built from here on
    assert machines.prepare("a").cached and not machines.library.blocks
    there = machines.prepare("b")
    assert (there.cached, there.key, there.report) == (True, built.key, built.report)
    assert there.path != built.path
    ids = there.path / "train.documents.arrow"
    assert ids.read_bytes() != (whole := (built.path / ids.name).read_bytes()) and len(whole) == ids.stat().st_size
    mine, theirs = open_prepared(built.path).train, open_prepared(there.path, verify=True).train
    assert np.array_equal(mine.trained_per_row, theirs.trained_per_row) and not machines.library.blocks
    theirs.row(0)
    assert 0 < machines.library.blocks <= 6
    machines.on("b")
    with ThreadPoolExecutor(2) as ranks:  # each with maps and blocks of its own, over one file
        found = list(ranks.map(lambda rank: steps(there.path, rank), range(2)))
    assert found == [steps(built.path, rank) for rank in range(2)]
    assert ids.read_bytes() == whole
    before = machines.library.blocks
    assert steps(there.path) == found[0] and machines.library.blocks == before, "all of it is here"
    entry = next(each for each in entries(machines.on("b")))
    assert damages(entry) == []


def test_blocks_that_a_killed_machine_left_half_written_are_fetched_again(machines: Machines) -> None:
    expected = steps(machines.prepare("a").path)
    ids = (there := machines.prepare("b").path) / "train.documents.arrow"
    steps(there)
    whole, written = ids.read_bytes(), machines.library.blocks
    with ids.open("r+b") as file:
        for start, stop in id_spans(ids):
            os.pwrite(file.fileno(), bytes((stop - start) // 2), start)
    assert ids.read_bytes() != whole
    assert steps(there) == expected and machines.library.blocks > written and ids.read_bytes() == whole
    os.truncate(ids, 100)  # another size is damage, and the entry fetched again
    assert steps(machines.prepare("b").path) == expected


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [("once", 0, ""), ("always", 3, "other bytes"), ("gone", 3, "is gone"), ("503", 4, "the store does not answer")],
)
def test_bytes_that_are_not_those_that_were_published_are_never_trained_on(
    machines: Machines, wrong: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(machines.prepare("a").path)
    there = machines.prepare("b").path
    client = machines.client(str(url_of(there)))
    if wrong == "gone":
        client.delete(client.names(FILES))

    def answer(data: bytes) -> bytes:
        if wrong == "503":
            raise obstore.exceptions.GenericError("status code: 503 Service Unavailable")
        return data[:-1] if wrong == "always" or machines.library.blocks == 1 else data

    monkeypatch.setattr(machines.library, "answer", answer)
    if not code:
        assert steps(there) == expected
        return
    with pytest.raises(TunerError, match=f"s3://bucket/cache/prepared/.*{words}") as caught:
        steps(there)
    assert caught.value.exit_code == code


def test_of_two_that_prepare_the_same_one_commit_stays(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machines.prepare("a")
    client = machines.client(str(url_of(first.path)))
    commit = client.get(commit_key(1))
    with monkeypatch.context() as patch:
        patch.setattr(stored, "find_entry", lambda _: None)  # as it was when the other one began
        assert not machines.prepare("b").cached
    found = stored.find_entry(client)
    assert client.get(commit_key(1)) == commit and found is not None
    assert set(client.names(FILES)) == found.data, "what the second one has uploaded is gone"
    shutil.rmtree(machines.on("b"))
    assert machines.prepare("b").report == first.report


def test_data_that_cannot_be_published_are_published_later_and_what_is_gone_is_built_again(machines: Machines) -> None:
    machines.library.fail("", 1000, carried_out=False)
    url = str(url_of(machines.prepare("a").path))
    said = " ".join(machines.said.getvalue().split())
    assert f"not published: {url}: the store does not answer" in said and not machines.client(url).names("")
    machines.library.left = 0
    assert find_prepared(tiny.request(machines.on("a"), machines.rows)) is not None, "which publishes nothing"
    assert not machines.client(url).names("")
    machines.prepare("a")
    assert "publishing" in machines.said.getvalue() and "not published" not in machines.said.getvalue()
    assert find_prepared(tiny.request(machines.on("b"), machines.rows)) is not None
    machines.stores.clear()
    assert find_prepared(tiny.request(machines.on("b"), machines.rows)) is None, "its blocks are nowhere"
    assert find_prepared(tiny.request(machines.on("a"), machines.rows)) is not None
