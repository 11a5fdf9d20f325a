"""A comparison as a report of Weights & Biases: its tables, and curves that the server draws."""

from types import ModuleType

from vocagnolm.host.trackers import STEP
from vocagnolm.report.compare import Comparison
from vocagnolm.report.report import comparison_markdown
from vocagnolm.report.runs import TEXTS, reject


def import_reports(project: str) -> ModuleType:
    """Import what writes reports; a ValueError where it is missing, or a project without entity."""
    if project.count("/") != 1:
        reject("--wandb_report ENTITY/PROJECT", repr(project), "name both")
    try:
        import wandb_workspaces.reports.v2 as reports
    except ImportError as error:
        needed = "--wandb_report needs the package wandb-workspaces, which is not installed"
        raise ValueError(f"{needed}: `pip install 'vocagnolm[wandb]'`") from error
    return reports


def write_report(comparison: Comparison, project: str) -> str:
    """Save the report in a project, and return its address."""
    reports = import_reports(project)
    import wandb

    entity, name = project.split("/")
    labels = list(comparison.labels.values())
    panels = [
        reports.LinePlot(title=title, x=STEP, y=[metric])
        for title, metric in TEXTS["wandb_curves"].items()
    ]
    runset = reports.Runset(entity=entity, project=name)
    blocks = [
        reports.MarkdownBlock(text=comparison_markdown(comparison)),
        reports.H2(text="Along the training"),
        reports.PanelGrid(runsets=[runset], panels=panels),
        reports.H2(text="What differs"),
        reports.PanelGrid(runsets=[runset], panels=[reports.RunComparer(diff_only="split")]),
    ]
    title = f"Comparison of {', '.join(labels)}"
    try:
        report = reports.Report(entity=entity, project=name, title=title[:128], blocks=blocks)
        return str(report.save().url)
    except (wandb.errors.Error, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--wandb_report {project}: {reason}") from error
