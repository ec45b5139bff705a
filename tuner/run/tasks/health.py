"""The task that checks devices, collectives and copies of the model, on a cadence and before saves."""

import socket
from collections.abc import Iterator

from tuner.checkpoint.manifest import step_name
from tuner.config.recipe import HealthSection
from tuner.errors import MachineError, TunerError, VerificationError, counted
from tuner.parallel.health import Copy, KnownProducts, first_difference, sums_of, wrong_collective
from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.runtime import phase
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import run_tensors
from tuner.train.plan import cadence
from tuner.train.tasks import Event, Request, Task


class HealthTask(Task):
    """Checks at the start of a launch, every so often, and before saves; an error ends the run before it saves.

    What is not trained is also compared with what it was when the launch began, on each process by itself.
    """

    def __init__(self, context: LaunchContext, section: HealthSection, log: LogTask) -> None:
        self._assembly, self._progress, self._console = context.assembly, context.progress, context.console
        self._log, self._run_dir = log, context.run.path
        self._checkpoints = context.run.checkpoints
        self._before_saves, prepared = section.before_saves, self._assembly.prepared
        self._due = cadence(section.every, self._assembly.timetable.plan, prepared.train.tokens_per_row)
        # Kept from before the first forward: a unit that is gathered shows other tensors.
        self._frozen = {
            name: parameter
            for name, parameter in self._assembly.train_state.root.model.named_parameters()
            if not parameter.requires_grad
        }
        self._frozen_sums: dict[str, int] = {}
        self._products: KnownProducts | None = None
        self._whole_at: int | None = None
        """The last step whose state was found whole."""

    def start(self) -> None:
        """Compute the known products for the first time, and check. Collective."""
        config = self._assembly.train_state.step_config
        self._products = KnownProducts(config.device, config.autocast)
        with self._log.clock.pause() as pause:
            n_tensors = self._check()
        processes = self._assembly.mesh.size
        copies = f", collectives and the copies of {counted(n_tensors, 'tensor')}" if processes > 1 else ""
        devices = f"{processes} devices" if processes > 1 else "the device"
        self._console.say("health", f"{devices}{copies} checked in {pause.seconds:.2f} s")

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Check where it is due."""
        progress = self._progress
        if not self._due.due_at(progress.step):
            return
        yield from self._log.settle()
        with self._log.clock.pause() as pause:
            self._check()
        facts = {"kind": "health", "step": progress.step, "tokens": progress.tokens}
        line = facts | {"check_s": round(pause.seconds, 3)}
        self._log.metrics.add(line)
        yield Event("figures", progress.step, progress.tokens, line)

    def before_save(self) -> None:
        """Check where the recipe wants that before a save. Collective; raises MachineError and VerificationError."""
        if self._before_saves and self._whole_at != self._progress.step:
            self._check()

    def _check(self) -> int:
        """Check everything; returns of how many tensors several processes have copies."""
        phase.enter(f"health check after step {self._progress.step}")
        ranks = Collective(gloo_group())
        self._check_devices(ranks)
        count = self._check_copies(ranks)
        self._whole_at = self._progress.step
        return count

    def _check_devices(self, ranks: Collective) -> None:
        products, device = self._products, self._assembly.train_state.step_config.device
        assert products is not None, "the launch has begun"
        computed, carried = products.problem(), wrong_collective(device, ranks)
        own = f"{socket.gethostname()}, {device}", computed or carried
        for rank, (where, problem) in enumerate(ranks.on_all_ranks(lambda: own)):
            if problem is not None:
                raise self._failed(MachineError, f"rank {rank} ({where}): {problem}")

    def _check_copies(self, ranks: Collective) -> int:
        named = self._frozen | run_tensors(self._assembly.train_state)
        held = [Copy.of(name, tensor, ranks.size) for name, tensor in named.items()]
        wanted = [copy for copy in held if copy.copies > 1 or copy.name in self._frozen]
        sums = sums_of(wanted)
        found = dict(zip((copy.name for copy in wanted), sums, strict=True))
        frozen = {name: found[name] for name in self._frozen}
        before = self._frozen_sums or frozen
        changed = [name for name, value in frozen.items() if before[name] != value]
        for rank, names in enumerate(ranks.on_all_ranks(lambda: changed)):
            if names:
                others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
                what = f"{names[0]}{others}, which nothing trains, changed since the launch began"
                raise self._failed(VerificationError, f"rank {rank}: {what}")
        self._frozen_sums = before
        several = [copy for copy in wanted if copy.copies > 1]
        difference = first_difference(several, [found[copy.name] for copy in several], ranks)
        if difference is not None:
            raise self._failed(VerificationError, str(difference))
        return len(several)

    def _failed(self, kind: type[TunerError], what: str) -> TunerError:
        """The error, with what there is to go back to."""
        step, saved, whole = self._progress.step, self._progress.saved_step, self._whole_at
        since = "" if whole is None else f"; all was well after step {whole}"
        hint = "look at the memory and the links of that machine, or leave it out; "
        if saved is None:
            hint += "no checkpoint was saved yet"
        elif whole is not None and saved > whole:
            newest = self._checkpoints / step_name(saved)
            hint += f"{newest} was saved after the last check: resume from one before it"
        else:
            hint += f"then: tuner resume {self._run_dir}"
        return kind(f"health check after step {step}: {what}{since}", hint=hint)
