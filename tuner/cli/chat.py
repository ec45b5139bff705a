"""`tuner chat`: talk to a run, a checkpoint, a Hugging Face directory or a hub model."""

from tuner.cli.command import Console, Outcome, command
from tuner.cli.named import Engine, model_name, require_engine
from tuner.cli.output import real_stdout
from tuner.errors import RecipeError


@command("chat")
def chat(  # noqa: PLR0913, PLR0917 - one parameter for each option
    console: Console, model: str, system: str | None = None, max_new_tokens: int = 1024, temperature: float = 0.7,
    top_p: float = 1.0, top_k: int = 0, seed: int = 42, base: str | None = None, engine: Engine = "transformers",
    json: bool = False,
) -> Outcome:
    """Talk to a model, which is loaded once and remembers what was said; on a pipe, answer one prompt per line."""
    name = model_name(model)
    is_served = require_engine(name, engine)
    if is_served and base is not None:
        raise RecipeError("--base is for adapters in transformers: llama.cpp serves one file")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import served
        from tuner.cli.work import talk as work

    sampling = work.Sampling(max_new_tokens, temperature, seed, top_p, top_k)
    if is_served:
        return served.talk_to(name, sampling, system, None if json else real_stdout(), console)
    return work.talk_to(name, base, sampling, system, None if json else real_stdout(), console)
