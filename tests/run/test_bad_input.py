"""Bad input: one line on stderr that says what to do, exit status 2 or 3, and nothing lost."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from vocagnolm.run import main as train

ROOT = Path(__file__).resolve().parents[2]


class World(NamedTuple):
    """A student, a teacher, a corpus and what a finished run left behind."""

    student: Path
    teacher: Path
    pages: Path
    run: Path

    def argv(self, output_dir: Path, **changes: str | None) -> list[str]:
        options: dict[str, str | None] = {
            "student": str(self.student),
            "teacher": str(self.teacher),
            "dataset": str(self.pages),
            "max_length": "64",
            "global_batch_tokens": "128",
            "max_steps": "1",
            "use_cpu": "True",
            "report_to": "none",
            "output_dir": str(output_dir),
            **changes,
        }
        return [f"--{name}={value}" for name, value in options.items() if value is not None]


@pytest.fixture(scope="module")
def world(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    root = tmp_path_factory.mktemp("world")
    world = World(root / "student", root / "teacher", root / "pages.jsonl", root / "run")
    for seed, (path, family) in enumerate(
        ((world.student, "metaspace"), (world.teacher, "nfc_digits"))
    ):
        shutil.copytree(tokenizer_dirs[family], path)
        tiny_llama(700, seed=seed).save_pretrained(path)
    world.pages.write_text("".join(json.dumps({"text": t}) + "\n" for t in training_texts[:40]))
    assert train.main(world.argv(world.run)) == 0
    return world


def snapshot(directory: Path) -> dict[str, str]:
    """Every file below a directory, by what is in it."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def fail(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`fail(status, **options)`: run into the error, first in a new output directory, then in that
    of a finished run; the one line on stderr."""

    def run(status: int = 2, **changes: str | None) -> str:
        lines, before = [], snapshot(world.run)
        for output_dir in (tmp_path / "new", world.run):
            capfd.readouterr()
            # In the finished run's directory the other settings may be what stops it.
            assert train.main(world.argv(output_dir, **changes)) in {status, 2}
            stderr = capfd.readouterr().err
            assert stderr.count("\n") == 1, stderr
            assert stderr.startswith("train.py: error: ")
            lines.append(stderr.removeprefix("train.py: error: ").strip())
        assert snapshot(world.run) == before
        new = snapshot(tmp_path / "new") if (tmp_path / "new").exists() else {}
        assert new == {}  # nothing that would stand in the way of the next attempt
        return lines[0]

    return run


def copy(path: Path, target: Path) -> Path:
    return Path(shutil.copytree(path, target))


def with_tokenizer(model: Path, tokenizer: Path, target: Path) -> Path:
    copy(model, target)
    for file in tokenizer.iterdir():
        shutil.copy(file, target)
    return target


def poison(model: Path, name: str) -> Path:
    weights = load_file(model / "model.safetensors")
    weights[name][3, 0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


# The run that the others must not harm


def test_train_leaves_a_model_that_loads(world: World) -> None:
    names = {path.name for path in world.run.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md", "run.json", "checkpoint-1"} <= names
    model = AutoModelForCausalLM.from_pretrained(world.run)
    assert model.config.use_cache is True
    assert len(AutoTokenizer.from_pretrained(world.run)) <= model.config.vocab_size
    card = (world.run / "README.md").read_text()
    assert f", guided by {world.teacher.name}." in card
    assert str(world.teacher.parent) not in card
    assert '"top_k": 0.4' in card


def test_train_changes_nothing_of_a_finished_run(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(world.run)
    capfd.readouterr()
    assert train.main(world.argv(world.run)) == 0
    assert capfd.readouterr().out == f"{world.run} holds the finished run: nothing to do\n"
    assert snapshot(world.run) == before


def test_dry_run_writes_nothing_when_it_succeeds(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*world.argv(tmp_path / "new"), "--dry_run"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "100.00% of the text tokens mapped" in captured.out
    assert "128 tokens = 1 processes x 2 sequences x 1 accumulation steps x 64" in captured.out
    assert not (tmp_path / "new").exists()


# Options


# What is given, with the files that it names (`content` is that of file), and the line.
TALK = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
REFUSED: dict[str, tuple[str | None, dict[str, str | None], str]] = {
    "a share over one": (None, {"top_k": "1.4"}, r"--top_k must be in \(0, 1\], got 1.4$"),
    "no teacher": (None, {"teacher": None}, "--teacher is required: name the causal LM"),
    "no recipe": (None, {"config": "{file}"}, r"--config {file} cannot be read: \[Errno 2\]"),
    "no YAML": (
        "a: [",
        {"config": "{file}"},
        "--config {file}, line 1, cannot be read: expected",
    ),
    "a recipe of a word": ("x", {"config": "{file}"}, "--config {file} must be a"),
    "a batch in no steps": (
        None,
        {"per_device_train_batch_size": "3"},
        "1 processes x 3 sequences x 1 accumulation steps x 64 tokens = 192",
    ),
    "a block beyond the context": (
        None,
        {"max_length": "256", "global_batch_tokens": "512"},
        "--max_length 256 exceeds the student's context of 128$",
    ),
    "a batch beyond the corpus": (
        None,
        {"global_batch_tokens": "64000"},
        r".* makes \d+ blocks of 64 tokens, one optimizer step needs 1,000: lower",
    ),
    "no corpus": (
        None,
        {"dataset": "no/such/pages.jsonl"},
        "--dataset no/such/pages.jsonl: no such file or directory$",
    ),
    "no such column": (
        None,
        {"text_column": "body"},
        "--text_column 'body' is not a column of {pages}, and neither are messages, nor prompt and "
        "completion; its columns are text$",
    ),
    "no JSON": (
        '{"text": "fine"}\n{oops\n',
        {"dataset": "{file}"},
        "--dataset {file} cannot be read: JSON parse error",
    ),
    "an empty corpus": (
        "",
        {"dataset": "{file}"},
        "--dataset {file} cannot be read: it holds no documents",
    ),
    "empty documents": (
        '{"text": ""}\n{"text": " \\n"}\n',
        {"dataset": "{file}"},
        r"--dataset {file} has no usable document: 2 read, 2 skipped \(2 empty\)",
    ),
    "documents of numbers": (
        '{"text": 1}\n{"text": null}\n',
        {"dataset": "{file}"},
        r"--dataset {file} has no usable document: 2 read, 2 skipped \(1 not",
    ),
    "no document to train on": (
        '{"text": "only one"}\n',
        {"dataset": "{file}", "eval_fraction": "0.5"},
        "--eval_fraction 0.5 leaves no document of {file} to train on: lower it, or evaluate on "
        "other documents with --eval_dataset$",
    ),
    "labels of documents": (
        None,
        {"train_on": "all"},
        "--train_on has no effect where --dataset holds documents: leave it out$",
    ),
    "a template of documents": (
        None,
        {"teacher_chat_template": "plain"},
        "--teacher_chat_template has no effect where --dataset holds documents: leave it out$",
    ),
    "no chat template": (
        TALK,
        {"dataset": "{file}"},
        r"student tokenizer .* has no chat template, .* --student_chat_template \(plain, chatml",
    ),
    "no such template": (
        TALK,
        {"dataset": "{file}", "student_chat_template": "{empty}/x"},
        "--student_chat_template {empty}/x: expected plain or chatml, or a file",
    ),
    "chunks of conversations": (
        TALK,
        {"dataset": "{file}", "student_chat_template": "plain", "method": "chunk"},
        "--method chunk cuts a block into equal chunks, but of conversations",
    ),
    "a store of conversations": (
        TALK,
        {"dataset": "{file}", "student_chat_template": "plain", "save_store": "{empty}/s"},
        "--save_store: of conversations, training computes",
    ),
    "documents and conversations": (
        '{"text": "a page"}\n' + TALK,
        {"dataset": "{file}"},
        "--dataset {file}: row 1 is a conversation, and those before are not",
    ),
    "no such format": (
        None,
        {"format": "chat"},
        "--format must be one of text, messages, prompt_completion, got chat$",
    ),
    "no student": (
        None,
        {"student": "{empty}"},
        "--student {empty} cannot be loaded: Unrecognized model",
    ),
    "no model as teacher": (
        None,
        {"teacher": "{empty}"},
        "--teacher {empty} cannot be loaded: Unrecognized model",
    ),
}


@pytest.mark.parametrize(("content", "options", "line"), REFUSED.values(), ids=REFUSED)
def test_train_stops_with_one_line(
    fail: Callable[..., str],
    world: World,
    tmp_path: Path,
    content: str | None,
    options: dict[str, str | None],
    line: str,
) -> None:
    places = {"file": tmp_path / "file.json", "empty": tmp_path / "empty", "pages": world.pages}
    places["empty"].mkdir()
    if content is not None:
        places["file"].write_text(content)
    given = {name: value and value.format_map(places) for name, value in options.items()}
    for name, place in places.items():
        line = line.replace(f"{{{name}}}", re.escape(str(place)))
    said = fail(**given)
    assert re.match(line, said), said


def test_error_stays_when_a_launcher_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tell = train.stop

    def late(*told: Any) -> int:
        signal.raise_signal(signal.SIGTERM)
        return tell(*told)

    monkeypatch.setattr(train, "stop", late)
    assert train.main(["--top_k", "2"]) == 2
    assert "SIGTERM" not in capfd.readouterr().err


def test_train_stops_when_the_output_is_a_file(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert train.main(world.argv(file / "run")) == 2
    line = f"train.py: error: --output_dir {file / 'run'}: {file} is a file, not a directory\n"
    assert capfd.readouterr().err == line
    assert file.read_text() == "precious"


def test_train_stops_when_the_directory_holds_another_run(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(world.run)
    capfd.readouterr()
    assert train.main(world.argv(world.run, top_k="0.5", learning_rate="1e-3")) == 2
    assert capfd.readouterr().err == (
        f"train.py: error: {world.run} holds a run with other settings (--learning_rate was 8e-05, "
        "now 0.001; --top_k was 0.4, now 0.5): give another --output_dir\n"
    )
    assert snapshot(world.run) == before


def test_train_stops_when_the_given_checkpoint_is_bad(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"resume_from_checkpoint": str(world.student)}
    assert train.main(world.argv(tmp_path / "new", **options)) == 2
    assert capfd.readouterr().err == (
        f"train.py: error: --resume_from_checkpoint {world.student}: trainer_state.json is missing "
        "or damaged\n"
    )
    assert not (tmp_path / "new").exists()


# The corpus


def test_train_stops_when_the_evaluation_path_is_wrong(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train.main(world.argv(tmp_path / "new", eval_dataset="no/such/pages.jsonl")) == 2
    line = "--eval_dataset no/such/pages.jsonl: no such file or directory"
    assert capfd.readouterr().err == f"train.py: error: {line}\n"


# Models


def test_train_stops_when_the_tokenizer_is_slow(
    fail: Callable[..., str], world: World, tmp_path: Path
) -> None:
    slow = copy(world.teacher, tmp_path / "slow")
    for file in slow.glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(slow)
    line = fail(teacher=str(slow))
    assert line.startswith(f"teacher tokenizer {slow} (ByT5Tokenizer) gives no character offsets")
    assert line.endswith(
        "use a fast tokenizer, that is a directory or hub name with a tokenizer.json"
    )


@pytest.mark.parametrize("family", ["nfc_digits", "trimmed"])  # a larger and a smaller vocabulary
def test_train_stops_when_the_teacher_is_the_student(
    fail: Callable[..., str],
    world: World,
    tokenizer_dirs: dict[str, Path],
    tmp_path: Path,
    family: str,
) -> None:
    twin = with_tokenizer(world.student, tokenizer_dirs[family], tmp_path / "twin")
    line = fail(teacher=str(twin))
    assert line.startswith(f"the student {world.student} and the teacher {twin} are the same model")
    assert line.endswith("(--student_tokenizer, --teacher_tokenizer)")
    assert fail(
        teacher=str(world.student), teacher_tokenizer=str(tokenizer_dirs[family])
    ).startswith(f"the student {world.student} and the teacher {world.student} are the same model")


def test_train_stops_when_the_vocabulary_exceeds_the_embeddings(
    fail: Callable[..., str],
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
) -> None:
    copy(tokenizer_dirs["nfc_digits"], tmp_path / "small")
    tiny_llama(300).save_pretrained(tmp_path / "small")
    line = fail(teacher=str(tmp_path / "small"))
    assert re.search(r"has ids up to \d+, but the teacher has embeddings for 300: it belongs", line)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "cannot be loaded: "),
        (Path.unlink, r"lacks files of weights \(\*.safetensors\): give the complete"),
        (
            lambda path: save_file({"a": torch.zeros(1)}, path, metadata={"format": "pt"}),
            r"\d+ weights of LlamaForCausalLM are not in the checkpoint",
        ),
    ],
)
def test_train_stops_when_the_weights_are_damaged(
    fail: Callable[..., str],
    world: World,
    tmp_path: Path,
    change: Callable[[Path], Any],
    reason: str,
) -> None:
    teacher = copy(world.teacher, tmp_path / "damaged")
    change(teacher / "model.safetensors")
    assert re.match(rf"--teacher {teacher}:? {reason}", fail(teacher=str(teacher)))


def test_train_stops_at_a_teacher_with_nan(
    fail: Callable[..., str], world: World, tmp_path: Path
) -> None:
    teacher = copy(world.teacher, tmp_path / "nan")
    poison(teacher, "model.layers.0.mlp.up_proj.weight")
    line = fail(3, teacher=str(teacher))
    assert line.startswith(f"LlamaForCausalLM ({teacher}) gives NaN or infinite losses on a short")


def test_train_keeps_the_last_checkpoint(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher, run = copy(world.teacher, tmp_path / "teacher"), tmp_path / "run"
    argv = world.argv(run, teacher=str(teacher))
    assert train.main(argv) == 0
    (run / "README.md").unlink()  # stopped between its last step and its end
    before = snapshot(run)
    poison(teacher, "model.layers.0.mlp.up_proj.weight")
    capfd.readouterr()
    assert train.main(argv) == 3
    assert capfd.readouterr().err.startswith("train.py: error: LlamaForCausalLM")
    assert snapshot(run) == before


def test_train_stops_with_3_and_nothing_to_resume(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    teacher = copy(world.teacher, tmp_path / "nan")
    weights = load_file(teacher / "model.safetensors")
    digit = AutoTokenizer.from_pretrained(teacher).encode("4", add_special_tokens=False)
    weights["model.embed_tokens.weight"][digit] = float("nan")  # the probe has none
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    assert train.main(world.argv(tmp_path / "new", teacher=str(teacher))) == 3
    stderr = capfd.readouterr().err
    assert stderr.count("\n") == 1, stderr
    assert re.search(
        r"step 1: the teacher's losses are NaN or infinite in block \d+; no update was made, and "
        r"none before; ",
        stderr,
    )
    assert not list((tmp_path / "new").glob("checkpoint-*"))


# The script itself


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "changes", "line"),
    [
        (2, {"dataset": "BAD"}, r"--dataset \S+ cannot be read: JSON parse error: .*"),
        (3, {"teacher": "NAN"}, r"LlamaForCausalLM \(\S+\) gives NaN or infinite losses .*"),
    ],
)
def test_script_prints_one_line_and_exits(
    world: World, tmp_path: Path, status: int, changes: dict[str, str], line: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{oops\n')
    poison(copy(world.teacher, tmp_path / "nan"), "model.layers.0.mlp.up_proj.weight")
    places = {"BAD": str(tmp_path / "bad.jsonl"), "NAN": str(tmp_path / "nan")}
    options = {name: places[value] for name, value in changes.items()}
    found = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *world.argv(tmp_path / "new", **options)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == status
    assert re.fullmatch(rf"train\.py: error: {line}\n", found.stderr), found.stderr
    assert "Traceback" not in found.stdout


# Going on with a run


def test_run_refuses_to_resume_when_the_corpus_changed(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pages = Path(shutil.copy(world.pages, tmp_path / "pages.jsonl"))
    options = {"dataset": str(pages), "save_steps": "1"}
    assert train.main(world.argv(tmp_path / "run", **options)) == 0
    (tmp_path / "run" / "README.md").unlink()  # as if it had died before the end
    before = snapshot(tmp_path / "run")
    pages.write_text("\n".join(reversed(pages.read_text().splitlines())))
    capfd.readouterr()
    assert train.main(world.argv(tmp_path / "run", **options)) == 2
    assert "--corpus_digest was " in capfd.readouterr().err
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_run_refuses_to_resume_when_a_template_changed(
    side: str, world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template, talks = tmp_path / "own.jinja", tmp_path / "talks.jsonl"
    form = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template.write_text(form)
    talks.write_text('{"prompt": "1 + 1?", "completion": "It is 2."}\n' * 60)
    options = {"dataset": None, "save_steps": "1", "max_steps": "2", "eval_fraction": None}
    options |= {"student_chat_template": "plain", "teacher_chat_template": "plain"}
    options[f"{side}_chat_template"] = str(template)
    # Beside documents, which have no template.
    argv = [*world.argv(tmp_path / "run", **options), "--dataset", str(world.pages), str(talks)]
    assert train.main(argv) == 0
    (tmp_path / "run" / "README.md").unlink()
    # As many tokens as before.
    template.write_text(form.replace(": {{", "; {{"))
    capfd.readouterr()
    assert train.main(argv) == 2
    complained = capfd.readouterr().err
    assert "--chat_templates_sha256 was " in complained
    assert complained.count("\n") == 1


@pytest.mark.parametrize("option", [{"selection_scope": "batch"}, {"unmapped": "mean"}])
def test_run_refuses_another_batch_per_device(
    option: dict[str, str], world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def argv(batch: int) -> list[str]:
        options = {"save_steps": "1", "per_device_train_batch_size": str(batch), **option}
        return world.argv(tmp_path / "run", **options)

    assert train.main(argv(2)) == 0
    capfd.readouterr()
    assert train.main(argv(1)) == 2
    assert "--per_device_train_batch_size was 2, now 1" in capfd.readouterr().err


def test_finished_run_is_left_alone(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*world.argv(tmp_path / "run"), "--save_strategy=no"]
    assert train.main(argv) == 0
    before = snapshot(tmp_path / "run")
    assert train.main(argv) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert snapshot(tmp_path / "run") == before


def test_skipped_documents_are_counted_and_listed(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"text": "Ben has 3 apples."}\n{"text": ""}\n{"text": null}\n')
    assert train.main(world.argv(tmp_path / "run", eval_dataset=str(held_out))) == 0
    assert "held out   2 documents (1 empty, 1 not text but NoneType)" in capfd.readouterr().out
    listed = (tmp_path / "run" / "eval_skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["document"] for line in listed] == [1, 2]
