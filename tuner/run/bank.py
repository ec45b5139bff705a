"""Newer versions of the weights that a run is given (`model.init_from`): which it has, and how another is loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tuner.config.recipe import InitFrom
from tuner.errors import DataError
from tuner.init_from.give import Giver
from tuner.init_from.match import KEY
from tuner.init_from.sources import newest_version, pinned, versions_in
from tuner.init_from.target import own_names
from tuner.model.freeze import Content, content_of, frozen_names, hash_of_frozen
from tuner.parallel.layouts import whole
from tuner.parallel.values import fill
from tuner.run.state import GIVEN
from tuner.run.status import RunStatus
from tuner.rundir.versions import TakenVersion, TakenVersions, read_bank, write_bank
from tuner.runtime.console import Console
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.setup.hashes import FrozenHash
from tuner.setup.initial import newer
from tuner.train.plan import cadence
from tuner.train.progress import Progress


@dataclass
class ModelBank:
    """The versions of a run's sources of weights as far as a launch is, on every rank."""

    entries: Sequence[InitFrom]
    known: dict[int, TakenVersions]
    """Of the entries that newer versions are looked for of, by number."""
    current: dict[int, TakenVersion]
    label = "bank"
    noted: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """What manifests say from each step on, on rank 0."""
    _contents: dict[str, Content] = field(default_factory=dict)
    """What the hash of the frozen weights is made of, on rank 0, once a version was taken."""
    _giver: Giver = field(init=False)
    """Of the versions that were taken last, on rank 0."""

    @property
    def given(self) -> dict[int, Any]:
        """What checkpoints note of each entry, as of the current version."""
        return dict(enumerate(self.noted[-1][1][GIVEN]["entries"]))

    def begin(self, console: Console) -> None:
        """Say which versions a launch begins with, and warn where they overwrite what is trained."""
        for number, version in self.current.items():
            console.say(self.label, version.name)
            if trained := self.given[number]["trained"]:
                what = f"newer versions overwrite what was trained of {trained} of the weights that it gives"
                console.warn(f"{KEY}.{number}: {what}")

    def due(self, progress: Progress, assembly: Assembly) -> Sequence[int]:
        """The entries whose `every` names this step, or the end of this window."""
        plan, tokens = assembly.timetable.plan, assembly.prepared.train.tokens_per_row
        is_end, found = progress.step >= progress.plan.total_steps, []
        for number in self.known:
            every = self.entries[number].every or ()
            ends = any(one.unit == "windows" and progress.portions % int(one.count) == 0 for one in every)
            steps = cadence([one for one in every if one.unit != "windows"], plan, tokens)
            found += [number] if (is_end and ends) or steps.due_at(progress.step) else []
        return found

    def others(self, due: Sequence[int], step: int, say: Callable[[str], None]) -> dict[int, TakenVersion]:
        """The versions to have that are not the current ones. On rank 0. Raises DataError."""
        found = {number: self.look(number, step, say) for number in due}
        return {number: version for number, version in found.items() if version != self.current[number]}

    def looked_after(self, due: Sequence[int], step: int) -> None:
        """What was found after ``step`` is final."""
        self.known |= {number: self.known[number].looked_after(step) for number in due}

    def write(self, run_dir: Path) -> None:
        """Replace `bank.json`."""
        write_bank(run_dir, self.known)

    def identify(self, given: Mapping[str, Any]) -> None:
        """Note what the model was built with. Raises DataError where that is not what the run had."""
        self.noted.append((-1, {GIVEN: {name: given[name] for name in ("entries", "frozen")}}))
        for number, version in self.current.items():
            self._hold(number, version, given["entries"][number])

    def look(self, number: int, step: int, pass_over: Callable[[str], None]) -> TakenVersion:
        """The version of an entry to have after ``step``, on rank 0: as it was noted, or else the newest whole one."""
        current = self.current[number]
        if step <= self.known[number].looked:
            if (version := self.known[number].at(step)) != current:
                version.require(Path(version.name))
            return version
        path = str(newest_version(Path(self.entries[number].path), Path(current.name), pass_over))
        return current if path == current.name else TakenVersion(step, path, "")

    def take(self, chosen: Mapping[int, TakenVersion], assembly: Assembly, step: int) -> None:
        """Put other versions into the model, as it lies over the processes. Collective.

        Rank 0 reads one tensor after the other, of which each process is sent what it has a part of. Raises DataError
        where a version has other tensors than the one before it, or is not the one that the run had.
        """
        ranks, model = Collective(gloo_group()), assembly.train_state.root.model
        own, values = own_names(model), list[torch.Tensor]()  # filled on rank 0 alone
        frozen = {id(model.get_parameter(there)): name for name, there in frozen_names(model).items()}
        for index, (name, shape) in enumerate(ranks.on_rank0(partial(self._planned, chosen, assembly))):
            target = own[name]
            ranks.on_rank0(partial(self._read, index, target.dtype, values))
            value = values.pop() if values else None
            fill(target, value, target.dtype, shape)
            if id(target) in frozen:
                if shape != tuple(target.shape):  # its hash is one of all rows
                    value = whole(target.detach())
                if value is not None:
                    self._contents[frozen[id(target)]] = content_of(value)
        entries = self.given | ranks.on_rank0(lambda: dict(zip(chosen, self._giver.facts()["entries"], strict=True)))
        for number, version in chosen.items():
            self._hold(number, version, entries[number])
        given = {**self.noted[-1][1][GIVEN], "entries": list(entries.values())}
        self.noted.append((step, {GIVEN: given, "frozen_hash": hash_of_frozen(self._contents)}))

    def facts(self, step: int) -> Mapping[str, Any]:
        """What a manifest says of the weights after ``step``."""
        return [facts for since, facts in self.noted if since <= step][-1]

    def _planned(self, chosen: Mapping[int, TakenVersion], assembly: Assembly) -> list[tuple[str, tuple[int, ...]]]:
        """The places that these versions give, and how much of each. Raises DataError where they are others."""
        entries = pinned(self.entries, {n: one.name for n, one in chosen.items()})
        plan = newer(assembly.resolved, {n: entries[n] for n in chosen})
        self._giver = Giver(plan)
        for (number, version), entry in zip(chosen.items(), self._giver.facts()["entries"], strict=True):
            if entry["form"] != self.given[number]["form"]:
                words = f"{KEY}.{number}: {version.name} has other tensors than {self.current[number].name} before it"
                raise DataError(words, hint="newer versions are to have the names and shapes of the first one")
        if not self._contents:
            assert isinstance(assembly.facts.frozen_hash, FrozenHash), "on rank 0"
            self._contents = dict(assembly.facts.frozen_hash.contents())
            self.noted[0] = (-1, {**self.noted[0][1], "frozen_hash": hash_of_frozen(self._contents)})
        return [(gift.place.name, plan.shape(gift)) for gift in plan.gifts]

    def _read(self, index: int, dtype: torch.dtype, values: list[torch.Tensor]) -> None:
        values.append(self._giver.value(index, dtype))

    def _hold(self, number: int, version: TakenVersion, entry: Mapping[str, Any]) -> None:
        """Note that the model has a version of an entry. Raises DataError where it is not the one that the run had."""
        if version.sha256 not in ("", entry["sha256"]):
            changed = f"{version.name} changed since it gave the run weights after step {version.step}"
            raise DataError(f"{KEY}.{number}: {changed} ({version.sha256} -> {entry['sha256']})", hint="restore it")
        self.current[number] = replace(version, sha256=str(entry["sha256"]))
        self.known[number] = self.known[number].having(self.current[number])


def begin_bank(entries: Sequence[InitFrom], status: RunStatus) -> ModelBank:
    """The versions as a launch begins with them: as rank 0 has them noted, or the newest ones. Collective.

    Raises DataError where one that the run had, and must read again, is gone; RecipeError where there is none.
    """
    found = status.checkpoint
    step, given = (0, None) if found is None else (found.step, found.meta[GIVEN])

    def begun() -> dict[int, TakenVersions]:
        bank, before = read_bank(status.run.path), {} if given is None else versions_in(given)
        for number, entry in enumerate(entries):
            if entry.every is not None and number not in bank:
                path = before.get(number) or str(newest_version(Path(entry.path)))
                bank[number] = TakenVersions((TakenVersion(step, path, ""),), step)
        if given is None or given["frozen"]:
            for known in bank.values():
                known.at(step).require(Path(known.at(step).name))
        return bank

    known = Collective(gloo_group()).on_rank0(begun)
    return ModelBank(entries, known, {number: versions.at(step) for number, versions in known.items()})
