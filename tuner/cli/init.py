"""`tuner init`: look at the rows, write a commented recipe."""

from tuner.cli.command import Outcome, command


@command("init")
def init(model: str | None = None, data: str | None = None, example: str | None = None) -> Outcome:
    """Look at the first rows and print a commented recipe."""
    from tuner.cli.work.init import first_recipe

    return first_recipe(model, data, example)
