"""`tuner verify-resume`: prove on this machine that a run resumes exactly."""

from dataclasses import asdict

from tuner.cli.command import Console, Outcome, command
from tuner.cli.named import run_path
from tuner.errors import counted


@command("verify-resume")
def verify_resume(console: Console, run: str, steps: int = 2) -> Outcome:
    """Prove on this machine that a run resumes exactly: train some steps with and without a stop, and compare."""
    path = run_path(run, extent="all")
    with console.doing("loading torch", at_once=True):
        from tuner.run.verify import verify_resume as prove

    proof = prove(path, steps, console)
    last = proof.from_step + proof.steps
    console.say(
        "verified",
        f"{counted(proof.steps, 'step')} to step {last}: log, state and {counted(proof.tensors, 'tensor')} equal, "
        f"bit for bit (sha256 {proof.sha256[:12]})",
    )
    metrics = {key: value for key, value in asdict(proof).items() if key != "run_dir"}
    return Outcome(str(proof.run_dir), metrics=metrics, next=f"tuner resume {proof.run_dir}")
