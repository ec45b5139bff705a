"""Documents that are placed one by one, and why others are not."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tuner.data.encoding.place import Document, Placer
from tuner.data.encoding.turns import Planner, Plans
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import Conversation, Example, Tokens

APART = "answers encoded apart from their prompt: a token of both together would reach over the cut"


class Placed(NamedTuple):
    """The documents of one example."""

    documents: list[Document]
    by_answer: bool = False
    """Whether each of them is one answer of a conversation."""
    left_out: tuple[str, ...] = ()
    """The reasons of answers that have no document."""


class Alone:
    """Documents of examples by their number, the problems of those that have none, and what is to be said of them."""

    def __init__(self, planner: Planner, placer: Placer) -> None:
        self.documents: dict[int, list[Document]] = {}
        self.problems: dict[int, RecordProblem] = {}
        self.by_answer: dict[int, tuple[str, ...]] = {}
        """Conversations of which each answer is a document -> the reasons of answers that have none."""
        self.notes: dict[int, tuple[str, ...]] = {}
        self.escaped = 0
        self._planner = planner
        self._placer = placer

    def place(self, i: int, example: Example, plans: Plans | None = None) -> None:
        """Place example `i`, whose plans may be known."""
        try:
            placed = self._tokens(example) if isinstance(example, Tokens) else self._placed(i, example, plans)
        except RecordProblem as problem:
            self.problems[i] = problem
            self.by_answer.pop(i, None)
            return
        self.documents[i] = placed.documents
        self.by_answer.pop(i, None)
        if placed.by_answer:
            self.by_answer[i] = placed.left_out

    def note(self, i: int, notes: Iterable[str]) -> None:
        """Say this of example `i`, in the place of what was said before."""
        self.notes[i] = tuple(dict.fromkeys(notes))

    def counted(self) -> Counter[str]:
        """How many examples each note is about; not those that have a problem."""
        return Counter(note for i, notes in self.notes.items() if i not in self.problems for note in notes)

    def _tokens(self, example: Tokens) -> Placed:
        return Placed([self._placer.tokens(example)])

    def _placed(self, i: int, example: Example, plans: Plans | None) -> Placed:
        plans = self._planner.plans(example) if plans is None else plans
        if not plans.by_answer:
            try:
                document = self._placer.place(plans.plans[0])
            except RecordProblem as problem:
                if not isinstance(example, Conversation):
                    raise
                plans = self._planner.by_answer(example, self._planner.readable(example), problem)
            else:
                self._say(i, plans, [document])
                return Placed([document])
        documents: list[Document] = []
        refused: list[RecordProblem] = []
        for plan in plans.plans:
            try:
                documents.append(self._placer.place(plan))
            except RecordProblem as problem:
                refused.append(problem)
        if not documents:
            raise refused[0]
        self._say(i, plans, documents)
        return Placed(documents, True, (*plans.left_out, *(problem.kind for problem in refused)))

    def _say(self, i: int, plans: Plans, documents: list[Document]) -> None:
        notes = [note for plan in plans.plans for note in plan.notes]
        if not plans.plans[0].framed and any(document.apart for document in documents):
            notes.append(APART)
        self.note(i, notes)
        self.escaped += sum(plan.escaped for plan in plans.plans)
