"""The reference of a preference method: its values of the run's documents, and the proof that the policy is it."""

from tuner.run.parts.part import Part, Preflight
from tuner.runtime import phase, startup
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly


class Reference(Part):
    """The model before its first step, whose log-probabilities the loss compares with."""

    def after_build(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """The reference's columns at the rows, unless each step computes them; compared where the run begins."""
        if assembly.train_state.method.reference == "none":
            return assembly
        from tuner.run.reference import referred

        phase.enter("reference")
        with startup.phase("reference"):
            return referred(ready, assembly, console, lambda: signals.requested)
