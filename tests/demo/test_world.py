"""The embedded world: its text, its tokenizers, its teacher, and a demo of two steps."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import operator
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources

import pytest
import quick_demo

from benchmarks import make_demo_teacher
from vocagnolm.demo import main as demo_main
from vocagnolm.demo import run as demo_run
from vocagnolm.demo import world as demo_world
from vocagnolm.demo.main import main
from vocagnolm.demo.methods import METHODS, TEACHER, flags_of, tokens_of
from vocagnolm.demo.run import STUDENT_TOKENIZER, judge
from vocagnolm.evaluation.extraction import extract
from vocagnolm.shell import dist
from vocagnolm.shell.io import ASSETS
from vocagnolm.spans import encode
from vocagnolm.tokenizer import PROBE, load_tokenizer

pytestmark = pytest.mark.processes

SOLUTION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")
RESULTS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def pages(count: int = 2000, seed: int = 0, wrong_share: float = 0.3) -> list[str]:
    return list(demo_world.corpus(count, seed, wrong_share))


def is_right(text: str) -> bool:
    steps = SOLUTION.findall(text)
    assert steps, text
    return all(RESULTS[symbol](int(a), int(b)) == int(c) for a, symbol, b, c in steps)


def test_texts_stay_what_they_are() -> None:
    """The numbers of the demo, of the docs and of the experiments rest on every character."""
    texts = [*pages(300, wrong_share=0.4), *demo_world.general_corpus(300, 0)]
    texts += [str(conversation) for conversation in demo_world.conversations(300, 0)]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert digest[:16] == "42808c9c52e06f60"
    assert pages(50) != pages(50, seed=1)


def test_problem_is_solved_rightly_when_of_any_kind() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        prompt, solution = demo_world.render(item := demo_world.problem(rng))
        assert is_right(solution)
        assert extract("marked", solution) == str(item.answer)
        wrong = demo_world.render(demo_world.corrupt(rng, item))[1]
        assert extract("marked", wrong) != str(item.answer)
        assert re.fullmatch("Q: .*\nA:", prompt)


def test_world_makes_the_items_of_the_evaluation() -> None:
    packaged = resources.files("vocagnolm.evaluation.tasks") / "demo.jsonl"
    rows = [json.loads(line) for line in packaged.read_text().splitlines()]
    for row, problem in zip(rows, demo_world.held_out_problems(), strict=True):
        assert row == {"question": demo_world.render(problem)[0], "answer": str(problem.answer)}


@pytest.mark.parametrize("wrong_share", [0.0, 0.3])
def test_corpus_has_its_share_of_wrong_solutions(wrong_share: float) -> None:
    solutions = [page[page.index("\nA:") :] for page in pages(wrong_share=wrong_share)]
    share = sum(not is_right(solution) for solution in solutions) / len(solutions)
    assert share == pytest.approx(wrong_share, abs=0.03)


def test_held_out_questions_are_in_no_text() -> None:
    excluded = demo_world.held_out_questions()
    assert len(demo_world.held_out_problems()) == len(excluded) == demo_world.HELD_OUT_PROBLEMS
    texts = [*pages(4000), *demo_world.general_corpus(2000, 0)]
    texts += make_demo_teacher.lessons(2000, make_demo_teacher.SEED, 0.4, excluded)
    assert excluded.isdisjoint(re.findall(r"^Q: (.*)$", "\n".join(texts), re.MULTILINE))


@pytest.mark.parametrize(
    ("directory", "role", "made"),
    [
        (STUDENT_TOKENIZER, "student", make_demo_teacher.student_tokenizer),
        (TEACHER, "teacher", make_demo_teacher.teacher_tokenizer),
    ],
)
def test_shipped_tokenizer_round_trips_and_is_reproducible(directory, role, made) -> None:
    tokenizer = load_tokenizer(str(ASSETS / directory), role)
    for text in [PROBE, *pages(200)]:
        assert tokenizer.decode(encode(tokenizer, text).ids) == text
    assert tokenizer.get_vocab() == made().get_vocab()


def test_shipped_teacher_solves_held_out_problems() -> None:
    teacher = ASSETS / TEACHER
    verdict = judge(teacher, limit=100)
    assert verdict["accuracy"] >= 0.97
    # For the solutions alone; with the token before each it is 6 % lower.
    assert verdict["answer_loss"] == pytest.approx(0.001152, rel=0.01)
    # For all tokens but the padding.
    assert verdict["clean_loss"] == pytest.approx(0.3036, rel=0.01)


def test_student_depends_on_the_seed_alone(tmp_path, monkeypatch) -> None:
    flags = []
    monkeypatch.setattr(demo_run, "train", lambda *arguments: flags.append(arguments[3:]))
    students = []
    for seed in (0, 0, 1):
        demo_run.make_base(tmp_path, seed)
        weights = (tmp_path / "untrained" / "model.safetensors").read_bytes()
        students.append((weights, (tmp_path / "general.jsonl").read_bytes(), flags.pop()))
    assert students[0] == students[1]
    assert all(first != other for first, other in zip(students[0], students[2], strict=True))


def test_wrong_answers_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    problems = [demo_world.corrupt(rng, item) for item in demo_world.held_out_problems()[:20]]
    monkeypatch.setattr(demo_world, "held_out_problems", lambda: problems)
    assert judge(ASSETS / TEACHER)["accuracy"] == 0


@pytest.fixture
def environment() -> Iterator[None]:
    """Undo what the demo sets for its processes after the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
def test_demo_sums_up_its_seeds_and_starts_over(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(demo_main, "_work", quick_demo.work)
    monkeypatch.setattr(dist, "cores", lambda: 2)
    for name in ("notes", "seed0", "seed1"):
        (tmp_path / name / "old").mkdir(parents=True)
    (tmp_path / "results.json").touch()
    options = ["--seeds", "2", "1", "--methods", "cpt", "random"]
    assert main(["--output_dir", str(tmp_path), *options]) == 0
    values = {metric: [2, 1] for metric in quick_demo.METRICS}
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == {"cpt": values, "random": values}
    assert capsys.readouterr().out.count("| 1.500 +- 0.707 ") == 2 * 3
    # Only the seeds that run again are removed.
    assert {path.parent.name for path in tmp_path.glob("*/old")} == {"notes", "seed0"}


def test_flags_are_those_of_the_method_and_of_the_user() -> None:
    assert flags_of("random", 3, 5) == ["--seed=3", "--max_steps=5", "--method=random"]
    for method in METHODS:
        has_teacher = "--teacher=" in " ".join(flags_of(method, 3))
        assert has_teacher == (method in ("vocagnolm", "share", "accept"))
    assert tokens_of(flags_of("cpt", 0)) == 650 * 512
    assert tokens_of(flags_of("cpt", 0, 3)) == 3 * 512


def test_links_lead_to_what_the_docs_train_on(tmp_path) -> None:
    for seed in (0, 1):
        home = tmp_path / f"seed{seed}"
        home.mkdir()
        demo_run.leave_for_the_docs(home, seed)
    # The last demo counts.
    assert (tmp_path / "student").resolve() == home / "base"
    assert (tmp_path / "pages.jsonl").resolve() == home / "pages.jsonl"
    assert (tmp_path / "teacher" / "config.json").is_file()
    assert (tmp_path / "talks.jsonl").read_text().startswith('{"prompt": ')


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_demo_writes_its_results(tmp_path, capsys) -> None:
    options = ["--seeds", "0", "--methods", "share", "accept", "--max_steps", "2"]
    assert main(["--output_dir", str(tmp_path), *options]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.keys() == {"share", "accept"}
    for method, option in (("share", "aggregation"), ("accept", "selection")):
        settings = json.loads((tmp_path / "seed0" / method / "run.json").read_text())
        assert settings[option] == method
        assert set(results[method]) == set(quick_demo.METRICS)
    assert "| VocAgnoLM, share " in capsys.readouterr().out


@pytest.mark.usefixtures("environment")
def test_demo_stops_all_seeds_when_one_fails(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(demo_main, "_work", quick_demo.fail)
    monkeypatch.setattr(dist, "cores", lambda: 2)
    # It must not end the processes of others.
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    other.start()
    before = set(multiprocessing.active_children())
    assert main(["--output_dir", str(tmp_path), "--seeds", "0", "1"]) == 1
    assert "seed 1 is broken" in capsys.readouterr().err
    assert set(multiprocessing.active_children()) == before
    other.kill()


@pytest.mark.parametrize("option", ["--max_steps 0", "--wrong_share 2", "--methods plain"])
def test_demo_refuses_an_option_before_any_run(option, tmp_path, capsys) -> None:
    directory = tmp_path / "demo"
    assert main(["--output_dir", str(directory), *option.split()]) == 2
    assert option.split()[0] in capsys.readouterr().err
    assert not directory.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_demo_leaves_no_process_when_it_is_ended(number, tmp_path) -> None:
    words = [sys.executable, "-m", "quick_demo", "--output_dir", str(tmp_path), "--seeds", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # A background job of a script ignores Ctrl-C, and so would all that it starts.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    demo = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)
    signal.signal(signal.SIGINT, ignored)
    written = tmp_path / "worker"
    while not (written.exists() and written.read_text()):
        assert demo.poll() is None
        time.sleep(0.05)
    demo.send_signal(number)
    _, error = demo.communicate(timeout=60)
    assert b"Traceback" not in error
    for _ in range(100):
        try:
            os.kill(int(written.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlives the demo")
