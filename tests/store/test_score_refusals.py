"""Everything that `vocagnolm score` refuses, and stores that training refuses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from score_world import (
    arguments,
    contents,
    refusal,
    write_corpus,
)
from transformers import PreTrainedTokenizerBase

from vocagnolm import cli
from vocagnolm.run import main as train
from vocagnolm.store import score, scoring, store

# What it refuses


def test_score_says_what_differs_in_another_store(
    scored: Path,
    teacher: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished, unfinished = tmp_path / "finished", tmp_path / "unfinished"
    own = write_corpus(tmp_path / "pages.jsonl", texts)
    assert cli.main(arguments(teacher, own, finished)) == 0
    shutil.copytree(finished, unfinished)
    manifest = json.loads((finished / "manifest.json").read_bytes())
    (unfinished / "manifest.json").rename(unfinished / "plan.json")
    (unfinished / store.shard_name(4)).unlink()
    another = shutil.copytree(teacher, tmp_path / "another")
    config = json.loads((another / "config.json").read_text())
    (another / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    for path in (finished, unfinished):
        before = contents(path)
        for argv, named in (
            (arguments(teacher, own, path, "--context", "40"), "context was 48, now 40"),
            (arguments(teacher, own, path, "--min_context", "9"), "min_context was 8, now 9"),
            (arguments(teacher, own, path, "--dtype", "float16"), "dtype was float32, now float16"),
            (arguments(teacher, own, path, "--loss_dtype", "float32"), "loss_dtype was float16"),
            (arguments(teacher, own, path, "--shard_documents", "5"), "shard_documents was 4"),
            (arguments(another, own, path), "teacher_revision was sha256:"),
        ):
            complained = refusal(argv, capsys)
            assert named in complained
            assert "give another directory" in complained
        assert contents(path) == before
    assert cli.main(arguments(teacher, corpus, finished)) == 0  # the same texts elsewhere
    write_corpus(own, [*texts[:-1], "another last document"])  # as many, under the same name
    assert manifest["dataset_documents"] == len(texts)
    complained = refusal(arguments(teacher, own, finished), capsys)
    assert "1 of 9 shards are made of other documents" in complained
    complained = refusal(arguments(teacher, own, unfinished), capsys)
    assert "shard-00008.arrow is made of other documents" in complained


def test_score_refuses_shards_of_unknown_origin(
    scored: Path, teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(scored, tmp_path / "S")
    (tmp_path / "S" / "manifest.json").unlink()
    complained = refusal(arguments(teacher, corpus, tmp_path / "S"), capsys)
    assert "neither plan.json nor manifest.json" in complained


def test_context_leaves_room_for_vllms_token(teacher: Path) -> None:
    words = ["--teacher", str(teacher), "--dataset", "D", "--output_dir", "S", "--engine", "vllm"]
    options = score.parse_score(words)
    config = scoring.source_of(options).config()
    reader = scoring.load_reader(options, config)
    assert reader.limit == config.max_position_embeddings - 1


BAD_ARGUMENTS = {
    "--context 9999": "--context 9999 exceeds the teacher's context of 128: lower it",
    "--min_context 47": "leaves no room in a context of 48: lower it to at most 46",
    "--context 2 --min_context 1": "leaves no room in a context of 2",
    "--context 0": "--context must be at least 1",
    "--shard_documents 0": "--shard_documents must be from 1 to 4294967296, got 0",
    "--shard_documents 9000000000000000000": "--shard_documents must be from 1 to 4294967296",
    "--batch_tokens x": "--batch_tokens: invalid int value: 'x'",
    "--quantization {": "--quantization: { is not JSON",
    "--quantization [1]": "--quantization: [1] is not a JSON object",
    "--quantization {}": "--quantization: {} is not a JSON object of settings",
    '--quantization {"quant_method":"nothing"}': "--teacher",
    '--quantization {"load_in_4bit":true,"quant_method":"bitsandbytes"}': "--teacher",
    "--dtype int8": "--dtype: invalid choice: 'int8'",
    "--engine vllm --batch_tokens 5": "--batch_tokens has no effect with --engine vllm",
    "--engine vllm": "pip install vllm",
    "--unknown 1": "unrecognized arguments: --unknown",
    "--teacher_tok x": "unrecognized arguments",
    "--teacher nowhere": "--teacher nowhere",
    "--dataset ./nowhere.jsonl": "--dataset ./nowhere.jsonl: no such file",
    "--text_column body": "--text_column 'body' is not a column",
    "--attn_implementation nothing": "--teacher",
}


@pytest.mark.parametrize("options", BAD_ARGUMENTS)
def test_score_refuses_wrong_arguments_in_one_line(
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    argv = arguments(teacher, corpus, tmp_path / "S")
    if options.startswith("--engine vllm"):
        del argv[argv.index("--batch_tokens") :]
    assert BAD_ARGUMENTS[options] in refusal([*argv, *options.split()], capsys)
    assert not list(tmp_path.glob("S/*")), "it may be given again with other options"


@pytest.mark.parametrize("missing", ["--teacher", "--dataset", "--output_dir"])
def test_score_names_a_required_option_that_is_missing(
    teacher: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    argv = arguments(teacher, corpus, tmp_path)
    at = argv.index(missing)
    assert f"{missing} is required" in refusal(argv[:at] + argv[at + 2 :], capsys)


@pytest.mark.parametrize("useless", ["--repair", "--text_column x", "--context 5"])
def test_score_refuses_options_without_effect_when_it_verifies(
    scored: Path, capsys: pytest.CaptureFixture[str], useless: str
) -> None:
    name = useless.split()[0]
    argv = ["score", "--verify", str(scored), *useless.split()]
    assert f"{name} has no effect with --verify" in refusal(argv, capsys)


@pytest.mark.parametrize("inside", [False, True])
def test_score_refuses_an_output_directory_in_a_file(
    teacher: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    inside: bool,
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "S" if inside else tmp_path / "file"
    assert f"--output_dir {path}: {tmp_path / 'file'} is a file" in refusal(
        arguments(teacher, corpus, path), capsys
    )


def test_score_refuses_a_directory_that_is_not_writable(
    teacher: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not even root may write there.
    place = Path("/proc/none")
    assert "/proc cannot be written to" in refusal(arguments(teacher, corpus, place), capsys)


@pytest.mark.parametrize(
    ("texts", "why"),
    [([], "holds no documents"), (["", " ", None], "3 read, all of them empty or not text")],
)
def test_score_refuses_when_no_document_is_usable(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: list[Any], why: str
) -> None:
    corpus = write_corpus(tmp_path / "pages.jsonl", texts)
    assert why in refusal(arguments(teacher, corpus, tmp_path / "S"), capsys)


def test_score_refuses_a_parquet_corpus_without_rows(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "pages.parquet")
    argv = arguments(teacher, tmp_path / "pages.parquet", tmp_path / "S")
    assert refusal(argv, capsys)


# Training is refused


@pytest.mark.parametrize("case", ["flipped", "truncated", "deleted", "manifest", "text", "corpus"])
def test_training_stops_when_the_store_does_not_fit(
    scored: Path,
    corpus: Path,
    texts: list[str],
    tmp_path: Path,
    tiny_llama: Callable[..., Any],
    student_tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    tiny_llama(len(student_tokenizer)).save_pretrained(tmp_path / "student")
    student_tokenizer.save_pretrained(tmp_path / "student")
    path = tmp_path / "S"
    shutil.copytree(scored, path)
    shard = path / store.shard_name(2)
    data = shard.read_bytes()
    named = shard.name
    if case == "flipped":
        shard.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    elif case == "truncated":
        shard.write_bytes(data[:-8])
    elif case == "deleted":
        shard.unlink()
    elif case == "manifest":
        manifest = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(manifest.replace('"context": 48', '"context": 49'))
        named = "manifest.json is damaged"
    elif case == "text":
        corpus = write_corpus(tmp_path / "pages.jsonl", [*texts[:-1], texts[-1] + "."])
        named = "lacks 1 of 36 documents"
    else:
        corpus = write_corpus(tmp_path / "pages.jsonl", [text + "!" for text in texts])
        named = "lacks 36 of 36 documents"
    argv = ["--student", str(tmp_path / "student"), "--teacher_losses", str(path)]
    argv += ["--dataset", str(corpus), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    argv += ["--max_length", "64", "--global_batch_tokens", "64", "--use_cpu", "true"]
    capsys.readouterr()
    assert train.main(argv) == 2
    complained = capsys.readouterr().err
    assert complained.count("\n") == 1
    assert named in complained
