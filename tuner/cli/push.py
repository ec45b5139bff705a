"""`tuner push`: an export to the Hugging Face hub."""

from dataclasses import asdict

from tuner.cli.command import Console, Outcome, command
from tuner.cli.named import run_path
from tuner.errors import counted
from tuner.runtime.files import gib


@command("push")
def push(console: Console, path: str, repo: str, private: bool = False, dry_run: bool = False) -> Outcome:
    """Upload a verified export with its model card.

    The token is that of HF_TOKEN, or of hf auth login; HF_ENDPOINT names another hub.
    """
    source = run_path(path, others=True, extent="all")

    from tuner.export import hub

    plan = hub.plan_push(hub.find_export(source), repo)
    console.say("checked", f"{plan.directory}: {counted(len(plan.files), 'file')}, {gib(plan.bytes)}, as written")
    if dry_run:
        metrics = {"files": len(plan.files), "bytes": plan.bytes, "dry_run": True}
        return Outcome(str(plan.directory), artifacts={"files": sorted(plan.files), "repo": repo}, metrics=metrics)
    report = hub.push(plan, private)
    console.say("pushed", f"{report.url}, commit {report.commit[:12]} ({report.seconds:.1f} s)")
    metrics = {key: value for key, value in asdict(report).items() if key not in ("url", "repo")}
    return Outcome(report.url, artifacts={"repo": repo}, metrics=metrics, is_text=True)
