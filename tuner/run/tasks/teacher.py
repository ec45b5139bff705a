"""The task that looks for a newer version of the teacher on a cadence, and has the run learn from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.run.teacher_versions import TeacherVersions
from tuner.rundir.teachers import TeacherEntry, Teachers, write_teachers
from tuner.runtime.process import Collective, gloo_group
from tuner.train.plan import cadence
from tuner.train.tasks import Event, Request, Task


class TeacherTask(Task):
    """Takes the newest version where it is due: before the evaluation and the save of the step, which show it.

    It looks after a launch's last step, too: whoever resumes there continues with what an unbroken run has.
    """

    def __init__(self, context: LaunchContext, versions: TeacherVersions, log: LogTask) -> None:
        self._context, self._versions, self._log = context, versions, log
        assembly = context.assembly
        plan, tokens = assembly.timetable.plan, assembly.prepared.train.tokens_per_row
        self._due = cadence(versions.method.teacher_every, plan, tokens)

    def start(self) -> Iterable[Event]:
        """Note the version that the launch begins with, and say which it is. Collective."""
        versions = self._versions
        self._note(versions.known)
        self._context.console.say("teacher", f"{versions.path.name} of {versions.path.parent}")
        return ()

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Look where it is due. Collective. Raises what a version that cannot be learned from does."""
        step = self._context.progress.step
        if not self._due.due_at(step):
            return
        yield from self._log.settle()
        versions, assembly, ranks = self._versions, self._context.assembly, Collective(gloo_group())

        def looked() -> TeacherEntry:
            found = versions.look(step)
            for name, problem in versions.passed_over.items():
                self._context.console.say("teacher", f"{name} is passed over: it {problem}")
            versions.passed_over.clear()
            if found != versions.at_hand:
                versions.check(found, assembly.tokenizer)
            return found

        with self._log.clock.pause() as pause:
            entry = ranks.on_rank0(looked)
            is_another = entry != versions.at_hand
            if is_another:
                versions.take(entry, assembly)
            self._note(versions.noted(step))
        if is_another:
            self._context.console.say("teacher", f"{entry.name} from here on, loaded in {pause.seconds:.1f} s")

    def _note(self, known: Teachers) -> None:
        """Write down, before the first step with it, what a launch after this one is to take. Collective."""
        Collective(gloo_group()).on_rank0(lambda: write_teachers(self._context.run.path, known))
