"""A comparison as one page: its curves, bars, tables and costs, and what a browser makes of it."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from browser import DARK, look
from fake_results import write_evaluation, write_json

from vocagnolm import cli
from vocagnolm.evaluation.tasks.benchmarks import PAPER_BENCHMARKS
from vocagnolm.report.compare import compare
from vocagnolm.report.curves import curve_panels
from vocagnolm.report.frame import labels_of, read_frame, settings
from vocagnolm.report.plots import COLORS
from vocagnolm.report.report import comparison_html, comparison_markdown, write_comparison

ROOT = Path(__file__).parents[2]
BATCH = 1000


def entry(step: int, loss: float, **values: float) -> dict[str, float]:
    return {"step": step, "student_loss_nats": loss, "selected_fraction": 0.4} | values


def write_run(place: Path, log: list[dict[str, float]], **options: Any) -> Path:
    """What train.py leaves."""
    defaults = {"method": "vocagnolm", "teacher": "T", "top_k": 0.4, "dataset": "d", "seed": 0}
    defaults |= {"data_seed": None, "teacher_losses": None, "global_batch_tokens": BATCH}
    write_json(place / "run.json", defaults | options)
    last = max(one["step"] for one in log)
    state = {"max_steps": last, "global_step": last, "total_flos": 3e12, "log_history": log}
    write_json(place / "trainer_state.json", state)
    return place


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two methods with a seed each, evaluated, and a third that is not."""
    excess = {f"excess_loss_p{n}_nats": value for n, value in ((10, -1.0), (50, 0.5), (90, 2.0))}
    guided = [entry(n, 3 - n / 10, tokens_per_s=100.0 + n, **excess) for n in range(1, 10)]
    paths = [
        write_run(tmp_path / "plain", [entry(1, 2.0)], method="cpt", teacher=None),
        write_run(tmp_path / "guided", [*guided, {"step": 9, "train_runtime": 7200.0}]),
        write_run(tmp_path / "wider", [entry(1, 1.0)], top_k=0.6, dataset="/home/someone/d"),
    ]
    for path, correct in zip(paths, (20, 30), strict=False):
        write_evaluation(path / "evaluation", dict.fromkeys(PAPER_BENCHMARKS, verdicts(correct)))
    return paths


def verdicts(correct: int) -> list[bool]:
    return [idx < correct for idx in range(100)]


def panels_of(paths: list[Path]) -> dict[str, dict[str, list[Any]]]:
    """The marks of every curve, by title and line."""
    several = settings(read_frame(paths))
    found: dict[str, dict[str, list[Any]]] = {}
    for panel in curve_panels(several, labels_of(several)):
        for mark in panel.marks:
            found.setdefault(panel.y_label, {}).setdefault(mark.label, []).append(mark)
    return found


# Curves


def test_curves_are_means_over_the_seeds_of_a_setting(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{seed}", [entry(n, n + seed) for n in steps], seed=seed)
        for seed, steps in ((0, (1, 2, 3)), (2, (1, 2)))
    ]
    (line,) = panels_of(paths)["loss on all tokens (nats)"].values()
    # The third step has one run only.
    assert [(mark.x, mark.y, mark.bar) for mark in line] == [(1, 2, (1, 3)), (2, 3, (2, 4))]


def test_curves_have_the_log_of_each_method(runs: list[Path]) -> None:
    found = panels_of(runs)
    guided = [f"VocAgnoLM, T, top_k {k}, dataset d" for k in (0.4, 0.6)]
    assert list(found["loss on all tokens (nats)"]) == ["CPT", *guided]
    (excess,) = found["excess, median (nats)"].values()
    assert {(mark.y, mark.bar) for mark in excess} == {(0.5, (-1.0, 2.0))}
    assert "held-out loss (nats)" not in found


def test_curve_without_its_band_is_left_out(tmp_path: Path) -> None:
    log = [entry(step, 1.0, excess_loss_p50_nats=0.5, excess_loss_p10_nats=0.1) for step in (1, 2)]
    assert "excess, median (nats)" not in panels_of([write_run(tmp_path, log)])


def test_long_curves_are_averaged(tmp_path: Path) -> None:
    log = [entry(n, n) for n in range(1, 1001)]
    (line,) = panels_of([write_run(tmp_path / "run", log)])["loss on all tokens (nats)"].values()
    assert len(line) == 200
    # Of five steps of 1,000 tokens each.
    assert (line[0].y, line[0].x) == (3.0, 3.0)
    assert line[-1].y == 998.0


# Tables


def section(text: str, title: str) -> list[list[str]]:
    """The rows of a table, without its rule."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_settings_are_listed_only_when_they_differ(runs: list[Path]) -> None:
    _, *rows = section(comparison_markdown(compare(runs)), "Settings that differ")
    assert {row[0]: row[1:] for row in rows} == {
        "teacher": ["-", "T", "T"],
        "method": ["cpt", "vocagnolm", "vocagnolm"],
        "top_k": ["0.4", "0.4", "0.6"],
        "dataset": ["d", "d", "d"],
    }
    assert "Settings that differ" not in comparison_markdown(compare(runs[:1]))


def test_costs_are_read_off_the_log(runs: list[Path]) -> None:
    head, *rows = section(comparison_markdown(compare(runs)), "Cost")
    by_run = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert list(by_run) == ["plain", "guided", "wider"]
    guided = by_run["guided"]
    assert (guided["steps"], guided["student tokens"]) == ("9", "9,000")
    assert (guided["tokens/s"], guided["hours"]) == ("105", "2.00")
    assert guided["FLOPs of the student"] == "3e+12"
    assert by_run["plain"]["tokens/s"] == "-"


def test_runs_are_compared_when_none_is_evaluated(runs: list[Path], tmp_path: Path) -> None:
    write_comparison(compare(runs[2:]), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["comparison.html", "comparison.json", "comparison.md"]
    html = (tmp_path / "out" / "comparison.html").read_text()
    assert "loss on all tokens" in html
    assert "Accuracy" not in html


@pytest.mark.parametrize(
    ("places", "names"),
    [(("first/run", "again/run2"), ("run", "run2")), (("a/run", "b/run"), ("a/run", "b/run"))],
)
def test_repeated_run_stands_beside_the_other(
    places: tuple[str, str],
    names: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [write_run(Path(place), [entry(1, 1.0), entry(2, 1.0)]) for place in places]
    for path in paths:
        write_evaluation(path / "evaluation", {"gsm8k": verdicts(20)})
    comparison = compare(paths, resamples=10)
    head, *_ = section(comparison_markdown(comparison), "Cost")
    assert head[0] == "run"
    keys = re.findall(r"</svg>([^<]+)</span>", comparison_html(comparison))
    assert keys == [f"VocAgnoLM, T, {name}" for name in names] * 2


def test_models_of_one_name_have_keys_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [write_evaluation(Path(x, "model"), {"gsm8k": verdicts(20)}) for x in "ab"]
    keys = re.findall(r"</svg>([^<]+)</span>", comparison_html(compare(paths, resamples=10)))
    assert keys == ["a/model", "b/model"]


def test_run_in_the_present_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path / "mine", [entry(1, 1.0)]))
    assert list(compare([Path()]).labels.values()) == ["mine"]
    assert read_frame([Path()]).model.tolist() == ["mine"]
    # A link has a name of its own.
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert read_frame([tmp_path / "link"]).model.tolist() == ["link"]


@pytest.mark.parametrize("argv", [[], ["--figure", "7", "--metric", "eval_loss"]])
def test_run_of_an_earlier_version_is_one_line(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [entry(1, 1.0, eval_loss=1.0)])
    settings = {"method": "vocagnolm", "teacher": "T"}
    write_json(run / "run.json", settings)
    out = ["--output_dir", str(tmp_path / "out")]
    assert cli.main(["compare", str(run), *argv, *out]) == 2
    name = "top_k" if argv else "global_batch_tokens"
    expected = f"run.json: expected a run of this train.py, found none or an unknown '{name}'"
    assert expected in capsys.readouterr().err


# The page


def test_page_has_everything_and_loads_nothing(runs: list[Path], tmp_path: Path) -> None:
    html = comparison_html(compare(runs, ["Rho-1", "8 chunks, teacher"], resamples=10))
    assert not re.search(r"(src|href)=\"(?!#)|@import|url\((?!#)|<script", html)
    assert "default-src 'none'" in html
    for words in ("plain", "guided", "wider", "reported: Rho-1", "loss on all tokens"):
        assert words in html
    assert str(tmp_path) not in html
    assert "/home/someone" not in html
    # Twelve columns of bars in three pictures, and two curves.
    assert html.count("<svg xmlns") == 3 + len(panels_of(runs))
    assert 'fill="var(--card)"' in html  # the paper's are hollow
    assert "Differences are to <b>plain</b>" in html
    titles = re.findall(r"<h2>(.*)</h2>", unescape(html))
    assert titles == [
        *(
            "Accuracy",
            "Along the training",
            "Accuracy (%)",
            "Points above plain, over the same items",
        ),
        *("Points above the reported numbers", "Settings that differ", "Cost"),
    ]


def test_page_escapes_the_names_of_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>&", [entry(1, 1.0)], teacher="<i>T")
    html = comparison_html(compare([run]))
    assert "<i>" not in html
    assert html.count("<b>") == 0
    assert "&lt;b&gt;&amp;" in html


def test_page_has_every_colour_twice() -> None:
    style = (ROOT / "vocagnolm" / "assets" / "page.css").read_text()
    for number, color in enumerate(COLORS):
        light, dark = re.findall(rf"--series-{number}: (#\w+);", style)
        assert light == color != dark


_MEASURES = """(page) => {
  const shown = (x) => page.defaultView.getComputedStyle(x);
  const svg = [...page.querySelectorAll("figure svg")];
  return {
    width: page.documentElement.scrollWidth,
    ground: shown(page.body).backgroundColor,
    bar: shown(page.querySelector(".keys rect")).fill,
    columns: new Set(svg.map((x) => Math.round(x.getBoundingClientRect().left))).size,
    letters: Math.min(...svg.flatMap((x) => [...x.querySelectorAll("text")].map(
      (text) => text.getBoundingClientRect().height))),
    outside: svg.filter((x) => x.getBoundingClientRect().right > page.body.clientWidth).length,
  };
}"""


@pytest.mark.processes
def test_browser_shows_the_page_on_phones_and_in_dark(runs: list[Path], tmp_path: Path) -> None:
    write_comparison(compare(runs, resamples=10), tmp_path / "out")
    page = tmp_path / "out" / "comparison.html"
    phone, desk = look(page, _MEASURES, 390), look(page, _MEASURES, 1200)
    assert (phone["columns"], desk["columns"]) == (1, 3)
    assert phone["width"] <= 390
    assert (phone["outside"], desk["outside"]) == (0, 0)
    assert min(phone["letters"], desk["letters"]) > 8
    dark = look(page, _MEASURES, 390, DARK)
    assert (phone["ground"], dark["ground"]) == ("rgb(251, 250, 247)", "rgb(22, 21, 19)")
    assert (phone["bar"], dark["bar"]) == ("rgb(31, 95, 191)", "rgb(125, 176, 255)")


def test_log_of_another_shape_is_refused(tmp_path: Path) -> None:
    log = [entry(1, 2.0), entry(2, 2.0) | {"excess_loss_p90_nats": [1.0]}]
    runs = [write_run(tmp_path / "plain", log), write_run(tmp_path / "b", [entry(1, 1.0)], seed=1)]
    with pytest.raises(ValueError, match=r"plain/trainer_state\.json: expected the log of train"):
        panels_of(runs)
