"""The paper's figures from runs of ours: the plotted numbers, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from fake_results import write_json, write_results

from vocagnolm import cli
from vocagnolm.evaluation.tasks.benchmarks import PAPER_BENCHMARKS
from vocagnolm.method import Method
from vocagnolm.report import panels, plots
from vocagnolm.report.figures import NUMBERS, make
from vocagnolm.report.frame import METHOD_LABELS, read_frame
from vocagnolm.report.paper import REPORTED_FILE, paper_models, teacher_name
from vocagnolm.report.view import read_views
from vocagnolm.run import parse as config

MISTRAL, QWEN = "gair-prox/Mistral-7B-ProXMath", "Qwen/Qwen2.5-Math-7B-Instruct"
NAMES = ["Mistral-ProXMath", "Qwen2.5-Math-Instruct"]
LAST_STEP = 100
IOU, IOS = {8: 0.9, 16: 0.8, 32: 0.7, 64: 0.6}, {8: 0.95, 16: 0.85, 32: 0.75, 64: 0.65}


class House:
    """Directories to draw from; every path is given by a short name."""

    def __init__(self, root: Path):
        self.root = root

    def __getitem__(self, names: str) -> list[Path]:
        return [self.root / name for name in names.split()]

    def evaluation(
        self,
        name: str,
        exact: float,
        model: str = "m",
        benchmarks: Sequence[str] = PAPER_BENCHMARKS,
    ) -> Path:
        """What evaluate_math.py leaves; SAT is 10 points higher."""
        values = {one: exact + 10 * (one == "sat") for one in benchmarks}
        return write_results(self.root / name, values, name=model)

    def run(
        self, name: str, exact: float | None = None, loss: float | None = None, **options: Any
    ) -> Path:
        """What train.py leaves, and evaluate_math.py beside it."""
        defaults = {
            **{"student": "TinyLlama", "teacher": None, "teacher_losses": None, "dataset": "d"},
            **{"method": "vocagnolm", "top_k": 0.4, "uld_weight": 0.5, "chunks": 32},
            **{"chunk_guidance": "teacher", "seed": 0, "data_seed": None, "max_steps": LAST_STEP},
            "corpus_digest": "c",
        }
        write_json(self.root / name / "run.json", defaults | options)
        if loss is not None:
            log = [
                {"step": 1, "loss": 9.0},
                {"step": 50, "eval_loss": 9.0},
                {"step": LAST_STEP, "eval_loss": loss},
                {"step": LAST_STEP, "train_loss": 9.0},
            ]
            state = {"max_steps": LAST_STEP, "log_history": log}
            write_json(self.root / name / "trainer_state.json", state)
        if exact is not None:
            self.evaluation(f"{name}/evaluation", exact)
        return self.root / name

    def audit(self, name: str, *teachers: str, dataset: str = "data/math.jsonl") -> Path:
        """What vocagnolm audit leaves: each teacher has 1 point less than the one before."""
        audits = [
            {
                "teacher": teacher,
                "vocabulary_overlap": {
                    "raw": {"teacher": 0.5 - less, "student": 0.1, "union": 0.2},
                    "bytes": {"teacher": 0.8 - less, "student": 0.3, "union": 0.4},
                },
                "mapping": {"mapped": 1.0},
                "token_level": {"iou": 0.88 - less, "ios": 1.0},
                "chunks": [{"chunks": n, "iou": IOU[n] - less, "ios": IOS[n] - less} for n in IOU],
            }
            for less, teacher in zip((0.0, 0.01), teachers, strict=False)
        ]
        audit = {"format": 1, "student": "TinyLlama", "dataset": dataset, "teachers": audits}
        return write_json(self.root / name / "audit.json", audit).parent


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    def save(figure: Any, path: Path, *suffixes: str) -> None:
        figure.savefig(path, dpi=20)

    # In the size and forms of the command: `test_command_draws_several_figures`.
    monkeypatch.setattr(panels, "save_plot", save)
    return House(tmp_path)


def drawn(
    number: int,
    paths: Sequence[Path],
    metric: str | None = None,
    reported: Sequence[str] = (),
    output: Path | None = None,
) -> dict[str, Any]:
    """The JSON of a figure, after its files are checked; its marks as lines of its panels."""
    output = output or paths[0].parent / "figures"
    (image,) = make([number], paths, output, metric, reported)
    assert image == output / f"figure-{number}.png"
    assert image.read_bytes().startswith(b"\x89PNG")
    figure = dict(json.loads(image.with_suffix(".json").read_text()))
    for panel in figure["panels"]:
        panel["lines"] = {}
    for mark in figure["marks"]:
        line = mark["label"] or f"token level {mark['style']}"
        figure["panels"][mark["panel"]]["lines"].setdefault(line, []).append(mark)
    return figure


def error_of(
    number: int, paths: Sequence[Path], metric: str | None = None, reported: Sequence[str] = ()
) -> str:
    with pytest.raises(ValueError, match=r"expected .*, found .*: ") as caught:
        make([number], paths, paths[0].parent / "figures", metric, reported)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def xy(marks: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    return [(mark["x"], pytest.approx(mark["y"])) for mark in marks]


# Figure 1


def test_vocabulary_figure_plots_overlap_against_quality(house: House) -> None:
    house.audit("audit", MISTRAL, QWEN)
    house.evaluation("teacher", 60.0, MISTRAL)
    figure = drawn(1, house["audit teacher"], reported=NAMES[1:])
    for panel, shares in zip(figure["panels"], ((50, 49), (80, 79)), strict=True):
        (ours,), (theirs,) = panel["lines"].values()
        assert (ours["x"], ours["y"]) == pytest.approx((shares[0], 60 + 10 / 9))
        assert ours["bar"] == pytest.approx([58 + 10 / 9, 62 + 10 / 9])
        assert (theirs["x"], theirs["y"]) == (pytest.approx(shares[1]), 84.0)
        assert [ours["text"], theirs["text"]] == NAMES
        assert (ours["reported"], theirs["reported"]) == (False, True)
    assert list(panel["lines"]) == ["teachers, evaluated", "teachers, reported"]
    assert "hollow: as reported (arXiv 2503.19123v1)" in figure["notes"]


def test_vocabulary_figure_plots_another_column(house: House) -> None:
    house.audit("audit", MISTRAL)
    house.evaluation("teacher", 60.0, MISTRAL)
    panel = drawn(1, house["audit teacher"], "sat", NAMES[:1])["panels"][0]
    assert [marks[0]["y"] for marks in panel["lines"].values()] == [70.0, 75.0]
    assert panel["y_label"] == "accuracy, SAT (%)"


# Figure 3


def test_chunk_figure_plots_the_audit(house: House) -> None:
    figure = drawn(3, [house.audit("audit", MISTRAL, QWEN)])
    for panel, curve, token in zip(figure["panels"], (IOU, IOS), (88, 100), strict=True):
        assert panel["columns"] == ["8", "16", "32", "64", "token level"]
        first, first_token, second, _ = panel["lines"].values()
        expected = [(str(n), pytest.approx(100 * share)) for n, share in curve.items()]
        assert [(mark["x"], mark["y"]) for mark in first] == expected
        assert first_token[0]["y"] == pytest.approx(token)
        assert second[0]["y"] == pytest.approx(100 * curve[8] - 1)
        assert [first[0]["label"], second[0]["label"]] == NAMES
        assert first[0]["style"] == first_token[0]["style"] != second[0]["style"]


def test_chunk_figure_names_several_corpora(house: House) -> None:
    house.audit("a", MISTRAL)
    house.audit("b", MISTRAL, dataset="gsm8k")
    lines = drawn(3, house["a b"])["panels"][0]["lines"]
    labels = [label for label in lines if "token level" not in label]
    assert labels == ["Mistral-ProXMath, math.jsonl", "Mistral-ProXMath, gsm8k"]


# Figure 4


def test_method_figure_plots_every_column(house: House) -> None:
    house.run("cpt", 20.0, method="cpt")
    house.run("uld", 21.0, method="uld", teacher=[MISTRAL])
    house.evaluation("base", 10.0)
    row = "Mistral-ProXMath VocAgnoLM"
    (panel,) = drawn(4, house["cpt uld base"], reported=[row])["panels"]
    lines = panel["lines"]
    assert list(lines) == ["CPT", "ULD, Mistral-ProXMath", "base", f"reported: {row}"]
    assert panel["columns"][:2] == ["GSM8K", "MATH"]
    assert len(panel["columns"]) == 12
    assert xy(lines["ULD, Mistral-ProXMath"])[0] == ("GSM8K", 21.0)
    assert lines["CPT"][0]["bar"] == [18.0, 22.0]
    assert dict(xy(lines[f"reported: {row}"]))["TAB"] == 21.7


def test_method_figure_plots_mean_and_deviation_over_seeds(house: House) -> None:
    for seed in range(3):
        house.run(f"{seed}", 20.0 + seed, seed=seed, corpus_digest=f"{seed}")
    figure = drawn(4, house["0 1 2"], "gsm8k")
    (mark,) = figure["marks"]
    assert (mark["y"], mark["bar"], mark["seeds"]) == (21.0, [20.0, 22.0], 3)
    assert sorted(mark["runs"]) == sorted(map(str, house["0 1 2"]))
    assert figure["notes"] == ["means over 3 seeds, bars: standard deviation"]


def test_seeds_are_pooled_when_named_in_paths_only(house: House) -> None:
    for n in range(2):
        house.run(f"{n}", loss=1.0 + n, student=f"/x/seed{n}/student", method="cpt")
    (mark,) = drawn(4, house["0 1"], "eval_loss")["marks"]
    assert (mark["y"], mark["seeds"], mark["x"]) == (1.5, 2, "held-out loss")


def test_labels_name_the_options_that_differ(house: House) -> None:
    paths = [house.run(f"{k}", loss=k, top_k=k) for k in (0.4, 0.6)]
    (panel,) = drawn(4, paths, "eval_loss")["panels"]
    assert list(panel["lines"]) == ["VocAgnoLM, top_k 0.4", "VocAgnoLM, top_k 0.6"]
    assert panel["y_label"] == "held-out loss (nats per token)"


def test_method_figure_marks_partial_numbers(house: House) -> None:
    path = house.run("run", 20.0) / "evaluation" / "results.json"
    results = json.loads(path.read_text())
    results["benchmarks"]["gsm8k"]["marked"] = ["partial"]
    write_json(path, results)
    figure = drawn(4, house["run"], "gsm8k")
    assert figure["marks"][0]["marked"] == ["partial"]
    assert "*: partial" in figure["notes"]


def test_method_figure_leaves_out_columns_without_number(house: House) -> None:
    house.run("run")
    house.evaluation("run/evaluation", 20.0, benchmarks=["gsm8k"])
    house.evaluation("m", 10.0)
    lines = drawn(4, house["run m"])["panels"][0]["lines"]
    assert [len(marks) for marks in lines.values()] == [1, 12]


# Figure 5


@pytest.fixture
def students(house: House) -> list[Path]:
    """Two methods with the same two teachers, and none."""
    paths = [
        house.run(f"{method}-{number}", exact, method=method, teacher=[teacher])
        for method, start in (("vocagnolm", 20.0), ("uld", 10.0))
        for number, (teacher, exact) in enumerate(((MISTRAL, start), (QWEN, start + 5)))
    ]
    return [*paths, house.run("cpt", 5.0, method="cpt")]


def test_teacher_figure_plots_students(students: list[Path], house: House) -> None:
    teachers = [house.evaluation("t1", 60.0, MISTRAL), house.evaluation("t2", 50.0, QWEN)]
    (panel,) = drawn(5, [*students, *teachers], "math", ["Llemma VocAgnoLM"])["panels"]
    lines = panel["lines"]
    assert xy(lines["VocAgnoLM"]) == [(50.0, 25.0), (60.0, 20.0)]
    assert xy(lines["ULD"]) == [(50.0, 15.0), (60.0, 10.0)]
    assert xy(lines["CPT"]) == [(None, 5.0)]
    assert xy(lines["reported: VocAgnoLM"]) == [(17.2, 5.2)]
    assert [mark["text"] for mark in lines["VocAgnoLM"]] == NAMES[::-1]
    assert not any(mark["text"] for mark in lines["ULD"])
    assert lines["VocAgnoLM"][0]["style"] == lines["reported: VocAgnoLM"][0]["style"]


def test_teacher_is_named_once(students: list[Path], house: House) -> None:
    teachers = [house.evaluation("t1", 60.0, MISTRAL), house.evaluation("t2", 50.0, QWEN)]
    figure = drawn(5, [*students, *teachers], "math", ["Mistral-ProXMath VocAgnoLM"])
    assert sorted(mark["text"] for mark in figure["marks"] if mark["text"]) == NAMES


def test_teacher_figure_says_when_teachers_are_reported(students: list[Path]) -> None:
    (panel,) = drawn(5, students, reported=NAMES)["panels"]
    assert xy(panel["lines"]["ULD"]) == [(59.2, 10 + 10 / 9), (84.0, 15 + 10 / 9)]
    assert panel["x_label"] == "teacher, as reported: accuracy, AVG (%)"


# The paper's numbers alone


def test_methods_are_drawn_when_only_the_paper_is_given(tmp_path: Path) -> None:
    figure = drawn(4, [], None, ["Table 1"], tmp_path)
    lines = figure["panels"][0]["lines"]
    assert len(lines) == 17
    assert [len(marks) for marks in lines.values()].count(12) == 16
    assert len(lines["reported: Rho-1"]) == 7
    assert all(mark["reported"] for mark in figure["marks"])
    # A whole table stands for its rows that have the metric.
    assert len(drawn(4, [], "AVG", ["Table 1"], tmp_path)["panels"][0]["lines"]) == 16


def test_students_are_drawn_when_only_the_paper_is_given(tmp_path: Path) -> None:
    (panel,) = drawn(5, [], None, ["Table 1"], tmp_path)["panels"]
    lines = panel["lines"]
    counts = {name: len(marks) for name, marks in lines.items()}
    methods = {"reported: KLD": 2, "reported: VocAgnoLM": 7, "reported: ULD": 5}
    assert counts == methods | {"reported: TinyLlama": 1, "reported: TinyLlama-CPT": 1}
    assert (84.0, 29.9) in xy(lines["reported: VocAgnoLM"])
    assert xy(lines["reported: TinyLlama"]) == [(None, 13.3)]
    assert panel["x_label"] == "teacher, as reported: accuracy, AVG (%)"


# Figure 6


@pytest.fixture
def chunked(house: House) -> list[Path]:
    """Chunks guided and random, and token level, with an audit."""
    paths = [house.audit("audit", MISTRAL, QWEN)]
    for n in IOU:
        own = {"method": "chunk", "chunks": n}
        paths.append(house.run(f"c{n}", loss=n, teacher=[MISTRAL], **own))
        paths.append(house.run(f"r{n}", loss=n + 1, chunk_guidance="random", **own))
    return [*paths, house.run("token", loss=3.0, teacher=[MISTRAL])]


def test_alignment_figure_plots_quality_against_overlap(chunked: list[Path]) -> None:
    figure = drawn(6, chunked, "eval_loss")
    for panel, overlap, token in zip(figure["panels"], (IOU, IOS), (88, 100), strict=True):
        lines = panel["lines"]
        places = [pytest.approx(100 * share) for share in overlap.values()]
        assert xy(lines["the teacher's chunks"]) == list(zip(places, IOU, strict=True))
        above = [n + 1 for n in IOU]
        assert xy(lines["random chunks"]) == list(zip(places, above, strict=True))
        assert xy(lines["token level"]) == [(pytest.approx(token), 3.0)]
        # The number of chunks stands beside the higher marks.
        assert [mark["text"] for mark in lines["random chunks"]] == ["8", "16", "32", "64"]


def test_alignment_figure_plots_table_2(chunked: list[Path]) -> None:
    figure = drawn(6, chunked[:1], reported=["Table 2"])
    lines = figure["panels"][0]["lines"]
    assert all(mark["reported"] for mark in figure["marks"])
    assert [y for _, y in xy(lines["reported: the teacher's chunks"])] == [18.2, 18.4, 18.6, 17.8]
    assert [y for _, y in xy(lines["reported: random chunks"])] == [17.7, 17.5, 17.9, 17.6]
    assert xy(lines["reported: token level"]) == [(pytest.approx(88), 19.2)]


# Figure 7


def test_sweep_figure_plots_both_sweeps(house: House) -> None:
    paths = [
        house.run(f"{teacher[:4]}-{name}-{value}", loss=value, teacher=[teacher], **own)
        for teacher in (QWEN, MISTRAL)
        for name, value, own in (
            *(("k", k, {"top_k": k}) for k in (0.8, 0.4)),
            *(("w", w, {"method": "uld", "uld_weight": w}) for w in (1.5, 0.3)),
        )
    ]
    cpt = house.run("cpt", loss=2.0, method="cpt")
    left, right = drawn(7, [*paths, cpt], "eval_loss")["panels"]
    assert list(left["lines"]) == list(right["lines"]) == [*NAMES, "CPT"]
    assert xy(left["lines"][NAMES[0]]) == [(40.0, 0.4), (80.0, 0.8)]
    assert xy(right["lines"][NAMES[1]]) == [(0.3, 0.3), (1.5, 1.5)]


def test_sweep_figure_has_one_panel_per_sweep(house: House) -> None:
    paths = [house.run(f"{k}", 10 * k, teacher=[QWEN], top_k=k) for k in (0.4, 0.5)]
    (panel,) = drawn(7, paths)["panels"]
    assert panel["y_label"] == "accuracy, AVG w/o SAT (%)"
    assert xy(panel["lines"][NAMES[1]]) == [(40.0, 4.0), (50.0, 5.0)]


# Figure 8


def write_view(path: Path, text: str) -> Path:
    settings = {"student": "S", "teacher": "T", "method": "vocagnolm", "top_k": 0.4}
    settings |= {"aggregation": "max", "unmapped": "include", "competition": "each sequence"}
    token = {"text": text, "start": 0, "end": len(text), "status": "kept", "is_trained": True}
    token |= {"student_loss_nats": 2.0, "teacher_loss_nats": 1.0, "pieces": []}
    shown = {"text": text, "document": 0, "start": 0, "block": 0, "tokens": [token]}
    return write_json(path, {"format": 1, "settings": settings, "texts": [shown]})


def test_guidance_figure_is_the_page_of_each_source(house: House) -> None:
    write_view(house.root / "inspected" / "guidance.json", "one")
    # Of a run, the last step is shown.
    run = house.run("run")
    assert set(read_frame(house["inspected run"]).run) == {str(run)}
    write_view(house.root / "run" / "guidance" / "step-000100.json", "two")
    write_view(house.root / "run" / "guidance" / "step-000200.json", "three")
    pages = make([8], house["inspected run"], house.root / "out")
    assert [page.name for page in pages] == ["figure-8.html", "figure-8-2.html"]
    for page, text in zip(pages, ("one", "three"), strict=True):
        assert f">{text}</span>" in page.read_text()
        assert read_views(page.with_suffix(".json")).texts[0].text == text


def test_guidance_figure_is_refused_when_damaged(house: House) -> None:
    write_json(house.run("run") / "guidance.json", {"format": 99})
    with pytest.raises(ValueError, match="is no guidance view"):
        make([8], house["run"], house.root / "out")


# Refusals


@pytest.fixture
def everything(house: House, students: list[Path], chunked: list[Path]) -> House:
    """All that the refusals below are about."""
    house.audit("am", MISTRAL)
    house.audit("am2", MISTRAL)
    house.audit("gsm8k", MISTRAL, dataset="gsm8k")
    house.evaluation("t1", 60.0, MISTRAL)
    house.run("plain")
    for name in ("one", "two"):
        house.run(name, 20.0)
    house.run("longer", 1.0, teacher=[MISTRAL], max_steps=200)
    house.run("other", loss=1.0, teacher=[QWEN])
    house.run("finer", loss=1.0, method="chunk", chunks=128, teacher=[MISTRAL])
    for k in (0.4, 0.5):
        house.run(f"k{k}", loss=k, teacher=[QWEN], top_k=k)
    house.run("sum", loss=1.0, teacher=[QWEN], aggregation="sum")
    return house


STUDENTS = "vocagnolm-0 vocagnolm-1 uld-0 uld-1 cpt"
RUNS = "c8 c16 c32 c64 r8 r16 r32 r64 token"
REFUSALS: list[tuple[int, str, str | None, list[str], str]] = [
    (1, "one", None, [], "an audit of the teachers for --figure 1"),
    (1, "am", None, [], "the quality of Mistral-ProXMath"),
    (1, "am", None, [], "--reported NAME if the paper has it"),
    (1, "am", None, ["Llemma"], "to name an audited teacher"),
    (
        1,
        "am",
        "AVG w/o SAT",
        NAMES[:1],
        "'AVG w/o SAT' in the reported row 'Mistral-ProXMath', found",
    ),
    (1, "am", None, ["GPT-4"], "'GPT-4'"),
    (3, "am", "AVG", [], "--metric for a figure of quality"),
    (3, "am", None, ["Llemma"], "--reported for a figure whose numbers"),
    (3, "am am2", None, [], "one audit of Mistral-ProXMath, found two"),
    (3, "one", None, [], "an audit"),
    (4, "plain", None, [], "evaluate_math.py --model"),
    (4, "plain cpt", None, [], "evaluate_math.py --model"),
    (4, "am", None, [], "found none: make some with train.py"),
    (4, "one two", None, [], "seeds of their own"),
    (4, "one", "demo", [], "'AVG w/o SAT'"),
    (4, "one", "eval_loss", [], "finish its training"),
    (4, "one", "sat", ["Rho-1"], "in the reported row 'Rho-1'"),
    (5, f"{STUDENTS} t1", None, [], "the quality of Qwen2.5-Math-Instruct"),
    (5, STUDENTS, None, NAMES[:1], "for all teachers or for none"),
    (5, STUDENTS, None, ["Llemma"], "to name a teacher or a guided student"),
    (5, "cpt", None, [], "runs with a teacher for --figure 5"),
    (5, f"{STUDENTS} longer", None, NAMES, "one setting of VocAgnoLM, Mistral-ProXMath for each"),
    (5, f"{STUDENTS} longer", None, NAMES, "which differ in max_steps"),
    (6, RUNS, "eval_loss", [], "an audit of Mistral-ProXMath for --figure 6"),
    (6, f"audit {RUNS} other", "eval_loss", [], "of one teacher"),
    (6, f"audit {RUNS} gsm8k", "eval_loss", [], "2 audits of them"),
    (6, f"audit {RUNS} finer", "eval_loss", [], "audit again with --chunks 128"),
    (6, "audit", None, [], "runs guided by chunks or tokens"),
    (6, f"audit {RUNS}", "eval_loss", ["Table 2"], "'eval_loss' in the reported row '8 chunks, r"),
    (5, STUDENTS, None, [*NAMES, "8 chunks, teacher"], "to name a teacher or a guided student"),
    (6, f"audit {RUNS}", "eval_loss", ["Llemma"], "expected no --reported but 'Table 2'"),
    (7, "k0.4", "eval_loss", [], "differ in top_k or uld_weight"),
    (7, "k0.4 k0.5 sum", "eval_loss", [], "differ in aggregation"),
    (7, "k0.4 k0.5", "eval_loss", ["Llemma"], "found --figure 7: leave it out"),
    (8, "plain", None, [], "vocagnolm inspect --output_dir D"),
    (8, "plain", "AVG", [], "expected --metric for a figure of quality"),
    (8, "plain", None, ["Llemma"], "expected --reported for a figure"),
    (4, "one one/evaluation", None, [], "twice: give it once"),
]


def test_figures_are_refused_when_something_is_wrong(everything: House) -> None:
    for number, names, metric, reported, message in REFUSALS:
        assert message in error_of(number, everything[names], metric, reported)


# Sources


def test_run_is_read_when_its_evaluation_is_named(house: House) -> None:
    run = house.run("run", 20.0)
    frame = read_frame([run / "evaluation"])
    assert set(frame.run) == {str(run)}
    assert set(frame.source) == {"trained"}


def test_teacher_is_named_by_stores(house: House) -> None:
    stores = [{"store": "/s", "teacher": QWEN}, {"store": "/t", "teacher": "x/other"}]
    frame = read_frame([house.run("run", teacher_losses=stores)])
    assert frame.teacher.tolist() == ["Qwen2.5-Math-Instruct + other"]


def test_settings_of_train_py_are_read(tmp_path: Path) -> None:
    argv = ["--teacher", QWEN, MISTRAL, "--use_cpu", "True"]
    run = write_json(tmp_path / "run" / "run.json", config.parse(argv).settings).parent
    (row,) = read_frame([run]).itertuples()
    assert row.method == "VocAgnoLM"
    assert row.teacher == "Qwen2.5-Math-Instruct + Mistral-ProXMath"
    assert {"method", "top_k", "uld_weight", "chunks", "chunk_guidance"} <= row.options.keys()


def test_methods_are_those_of_train_py() -> None:
    method = get_type_hints(Method)["method"]
    assert set(get_args(method)) == set(METHOD_LABELS)


def break_run(content: object) -> Callable[[Path], None]:
    return lambda run: write_json(run / "run.json", content) and None


def break_state(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        state = json.loads((run / "trainer_state.json").read_text())
        write_json(run / "trainer_state.json", state | changes)

    return change


def break_audit(run: Path) -> None:
    (run / "run.json").unlink()
    write_json(run / "audit.json", {"format": 1, "teachers": [{"teacher": "t"}], "dataset": "d"})


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda run: (run / "run.json").unlink(), "expected run.json, results.json"),
    "list": (break_run([1]), "expected an object, found list"),
    "method": (
        break_run({"method": "magic"}),
        "a method of this train.py, found none or an unknown 'magic'",
    ),
    "store": (
        break_run({"method": "uld", "teacher_losses": [{}]}),
        "a method of this train.py, found none or an unknown 'teacher'",
    ),
    "batch": (
        break_run({"method": "cpt", "global_batch_tokens": {}}),
        "found --global_batch_tokens must be int, got {} (dict)",
    ),
    "log": (break_state(log_history=[{"eval_loss": 1.0}]), "expected the log of train.py"),
    "step": (break_state(global_step={}), "expected the log of train.py, of numbers, found unsup"),
    "log_type": (break_state(log_history=[1]), "expected the log of train.py"),
    "unfinished": (break_state(max_steps=200), "expected 'eval_loss' of"),
    "not_finite": (
        break_state(log_history=[{"step": LAST_STEP, "eval_loss": float("nan")}]),
        "with a finite eval_loss, found nan",
    ),
    "audit": (break_audit, "expected what vocagnolm audit writes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_command_fails_in_one_line_when_broken(
    house: House, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = BROKEN[name]
    run = house.run("run", loss=1.0)
    change(run)
    argv = ["compare", str(run), "--figure", "4", "--metric", "eval_loss"]
    assert cli.main([*argv, "--output_dir", str(house.root / "out")]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("vocagnolm compare: error: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


# The command and the paper's numbers


def test_command_draws_several_figures(
    chunked: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(panels, "save_plot", plots.save_plot)
    out = tmp_path / "figures"
    argv = [*map(str, chunked), "--figure", "6", "--figure", "4", "--metric", "eval_loss"]
    assert cli.main(["compare", *argv, "--output_dir", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'figure-6.png'}\n{out / 'figure-4.png'}\n"
    assert len(list(out.iterdir())) == 6
    assert all(path.read_bytes().startswith(b"%PDF") for path in out.glob("*.pdf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "4"], "--figure needs --output_dir: say where"),
        (
            ["--figure", "4", "--output_dir", "o", "--seed", "1"],
            "--seed has no effect with --figure",
        ),
        (["--figure", "4", "--output_dir", "o", "--resamples", "9"], "--resamples has no effect"),
        (["--metric", "AVG"], "--metric has no effect without --figure"),
        (["--figure", "2"], "invalid choice: 2"),
        (["--figure", "9"], "invalid choice: 9"),
        (["--figure", "x"], "invalid int value: 'x'"),
    ],
)
def test_command_refuses_options_that_do_not_apply(
    house: House, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", str(house.run("run", 1.0)), *options]) == 2
    assert message in capsys.readouterr().err
    assert NUMBERS == (1, 3, 4, 5, 6, 7, 8)


def test_paper_names_are_the_tables() -> None:
    reported = json.loads(REPORTED_FILE.read_text())["tables"][3]["rows"]
    assert paper_models().keys() == reported.keys()
    for name, others in paper_models().items():
        assert {teacher_name(f"/x/{other}") for other in (name, *others)} == {name}
    assert teacher_name("some/qwen2.5-math-7b-rl") == "qwen2.5-math-7b-rl"
