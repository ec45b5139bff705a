"""What of a training is kept in the host's memory between its uses: said before it begins."""

from tuner.config.optimizers import keeps_states_on_host
from tuner.config.recipe import Recipe
from tuner.run.parts.part import Part
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.setup.resolve import Resolved
from tuner.setup.specs import assembly_spec


class Offload(Part):
    """Shards (`parallel.offload`), optimizer state (`optimizer.offload`), activations (`train.offload_activations`)."""

    def __init__(self, recipe: Recipe) -> None:
        self._is_on_host = keeps_states_on_host(recipe.optimizer) or recipe.parallel.offload == "host"

    def after_plan(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> None:
        """How much goes to the host, and what that takes."""
        if assembly_spec(resolved).offload:
            from tuner.setup.host_states import offload_line

            console.say("offload", offload_line(resolved))
        if self._is_on_host:
            from tuner.setup.host_states import announce_on_host

            announce_on_host(console, resolved, rank_info)
