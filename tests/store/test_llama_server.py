"""A store through llama.cpp's server, as llama-cpp-python runs it, against one scored here."""

from __future__ import annotations

import importlib.util
import json
import random
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from vocagnolm import cli
from vocagnolm.demo import world
from vocagnolm.demo.models import TEACHER
from vocagnolm.io import ASSETS
from vocagnolm.store.difference import difference
from vocagnolm.store.store import Store

DOCUMENTS = 100
needs_llama = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llama_cpp", "gguf", "uvicorn"))),
    reason="needs pip install 'llama-cpp-python[server]' gguf, which is built for minutes",
)


@pytest.fixture
def llama_server(tmp_path: Path) -> Iterator[str]:
    """The demo's teacher in float16 behind llama.cpp; it is stopped at the end."""
    from gguf_teacher import main

    main(ASSETS / TEACHER, tmp_path / "teacher.gguf")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--model", str(tmp_path / "teacher.gguf"), "--port", port, "--host", "127.0.0.1"]
    sizes = ["--logits_all", "true", "--n_ctx", "512", "--n_threads", "1", "--verbose", "false"]
    log = (tmp_path / "server.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "llama_cpp.server", *options, *sizes], stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=1):
                break
        assert process.poll() is None, (tmp_path / "server.log").read_text()
        yield url
    finally:
        process.terminate()
        assert process.wait(timeout=30) is not None
        log.close()


@needs_llama
@pytest.mark.slow
@pytest.mark.processes
def test_store_through_llama_server_is_the_local_one(
    llama_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)
    texts = [world.page(rng, 0.5) for _ in range(DOCUMENTS)]
    # Longer than the context; and a character of several tokens inside.
    texts += ["\n".join(texts[:20]), "one 😀 and 数学, für alle"]
    corpus = tmp_path / "pages.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    common = ["score", "--teacher", str(ASSETS / TEACHER), "--dataset", str(corpus)]
    common += ["--context", "500", "--min_context", "100", "--loss_dtype", "float32"]
    served = ["--server", llama_server, "--served_model", "teacher", "--concurrency", "2"]
    assert cli.main([*common, "--output_dir", str(tmp_path / "served"), *served]) == 0
    assert cli.main([*common, "--output_dir", str(tmp_path / "local"), "--dtype", "float32"]) == 0
    one, other = Store(tmp_path / "served"), Store(tmp_path / "local")
    assert one.manifest["dialect"] == "openai, text"
    assert one.manifest["unscored"] == 0
    for text in texts:
        (mine,), (expected,) = one.segments(text) or [], other.segments(text) or []
        assert np.array_equal(mine.spans, expected.spans)
    found = difference(one, other)
    assert found.not_alike == 0
    assert found.correlation >= 0.999, found
    capsys.readouterr()
    assert cli.main(["score", "--compare", str(one.directory), str(other.directory)]) == 0
    assert "102 of 102 documents cut alike" in capsys.readouterr().out
