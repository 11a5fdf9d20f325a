"""The benchmarks: every claim at its tiniest size, the runner, and the arithmetic of estimates."""

from __future__ import annotations

import doctest
import json
import os
import re
import signal
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import __main__ as runner
from benchmarks import claims, generated, harness, page
from benchmarks.claims import aligners, step_growth
from benchmarks.estimates import cost_model as cost
from benchmarks.estimates import scaling
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.run.flops import model_work

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = claims.load()
# Their values are counted, and do not depend on the size or the clock.
COUNTED = {"eight_processes", "harness_parity", "long_lines"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_claim_is_measured_at_its_tiniest_size(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = runner.main([name, "--tiny"])
    *_, line = capsys.readouterr().out.splitlines()
    if line.startswith(f"{name} skipped: "):
        assert status == 0
        return
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    claim = CLAIMS[name].CLAIM
    assert cells[:3] == [name, claim.says, claim.limit]
    assert float(re.match(r"[\d.]+", cells[3])[0]) >= 0
    assert (cells[4] == "yes") is (status == 0)
    assert status == 0 or name not in COUNTED, line


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        (harness.Measured(0.05), 0, "yes"),
        (harness.Measured(0.051), 1, "NO"),
        (harness.Measured(float("nan")), 1, "NO"),
        (harness.Measured(0.01, broken="(3 differ)"), 1, "NO (3 differ)"),
    ],
)
def test_runner_fails_when_a_claim_does_not_hold(
    found: harness.Measured,
    status: int,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(CLAIMS["alignment"], "measure", lambda size: found)
    assert runner.main(["alignment"]) == status
    assert capsys.readouterr().out.rstrip(" |\n").endswith(f"| {verdict}")


def test_runner_goes_on_when_a_claim_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CLAIMS["aligners"], "measure", lambda size: 1 // 0)
    monkeypatch.setattr(CLAIMS["alignment"], "measure", lambda size: harness.Measured(0.01))
    assert runner.main(["aligners", "alignment"]) == 1
    row, failed = capsys.readouterr().out.splitlines()[-2:]
    assert row.startswith("| alignment")
    assert failed.startswith("aligners failed: ZeroDivisionError: ")


def test_claim_holds_only_within_both_limits() -> None:
    claim = harness.Claim("", at_least=0.45)
    assert [claim.holds(value) for value in (0.45, 0.44, float("nan"))] == [True, False, False]
    assert claim.limit == "at least 0.45"


def test_gpu_claim_is_skipped_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner.main(["student_mfu"]) == 0
    assert capsys.readouterr().out == "student_mfu skipped: it needs a GPU, and there is none\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["speed"], "no claim speed among "),
        (["alignment", "--set", "pages=3"], "--set of alignment: no pages among documents, "),
        (["alignment", "--set", "documents=few"], "--set of alignment: invalid literal"),
    ],
)
def test_runner_rejects_what_it_does_not_know(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.main(argv)
    assert message in capsys.readouterr().err


def test_runner_lists_every_claim_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CLAIMS)
    assert all(line.endswith(CLAIMS[line.split()[0]].CLAIM.says) for line in lines)


@pytest.mark.parametrize(("module", "examples"), [(cost, 8), (harness, 1)])
def test_doctests_run_when_read(module: ModuleType, examples: int) -> None:
    results = doctest.testmod(module)
    assert results.attempted >= examples
    assert not results.failed


def test_costs_equal_a_hand_count_of_the_paper() -> None:
    setup = cost.Setup()
    # TinyLlama: 22 x (2 x 2048 x 2048 + 2 x 2048 x 256 + 3 x 2048 x 5632) + 2048 x 32000
    assert cost.matmul_parameters(cost.STUDENT) == 1_034_420_224
    # 3 x (2 x 1.034e9 + 2 x 22 x 2048 x 2048)
    assert cost.training_flops(setup) == 3 * (2_068_840_448 + 184_549_376)
    assert cost.training_hours(setup) == pytest.approx(71.2, abs=0.05)  # 1.014e20 / 3.956e14 s
    # Qwen2.5-Math: 0.943 x 14.55 GFLOP x 15e9 / (989e12 x 0.6) / 3600
    assert cost.teacher_hours(setup, cost.LARGEST) == pytest.approx(96.4, abs=0.05)
    assert cost.wall_hours(setup, 32, None)[0] == pytest.approx(2.2, abs=0.05)
    assert cost.wall_hours(setup, 32, cost.LARGEST)[0] == pytest.approx(5.3, abs=0.1)
    # With every option at 1 GB/s and 1 byte of everything a ring is its factor.
    slow = replace(setup, nvlink_gb_s=1.0, nic_gb_s=0.125, link_efficiency=1.0)
    count = cost.parameters(cost.STUDENT)
    assert count == 1_034_420_224 + 2048 * 32000
    for what, bytes_per_parameter in {
        "DDP": 2 * 4 * 31 / 32,
        "FSDP2": (4 * 2 + 4) * 31 / 32,  # 4 micro-batches
        "HSDP": (4 * 2 + 4) * 7 / 8 + 2 * 4 * 3 / 4,
    }.items():
        seconds = cost.step_messages_s(slow, what, 32)
        assert seconds == pytest.approx(bytes_per_parameter * count / 1e9)
    assert cost.step_messages_s(slow, "DDP", 1) == 0


def test_memory_equals_a_hand_count_for_every_layout() -> None:
    setup, student = cost.Setup(), 1_034_420_224 + 2048 * 32000
    layer, outside = 2 * 233_046_016, 2 * 2 * 3584 * 152064  # 2 bytes of 7.6 B
    teacher = 28 * layer + outside
    kept = 22 * 16384
    mixed = 22 * 16384 * 107.7e3 + 2 * (student - 2 * 2048 * 32000)  # and weights in 16 bits
    expected = {
        ("DDP", 1, "none"): 16 * student + mixed,
        ("DDP", 32, "on each GPU"): 20 * student + mixed + teacher,
        ("FSDP2", 32, "none", True): ((16 / 32 + 2 + 4) * student + (22 * 4096 + 87.2e3) * 16384),
        ("DDP", 8, "none", True): 20 * student + (22 * 8192 + 107.7e3) * 16384,
        ("FSDP2", 32, "none"): (16 / 32 + 2 + 4) * student + 87.2e3 * kept,
        ("HSDP", 64, "none"): (16 / 8 + 2 + 4) * student + 87.2e3 * kept,
        # 4 blocks of a GPU make one micro-batch, so no gradient waits for another.
        ("FSDP2", 256, "none"): (16 / 256 + 2) * student + 87.2e3 * kept / 2,
        ("DDP", 8, "in each machine"): (20 * student + mixed + teacher / 8 + 2 * layer + outside),
    }
    for layout, size in expected.items():
        expected_gib = size / 2**30 + 0.5 + 1.5
        assert cost.device_gib(setup, *layout) == pytest.approx(expected_gib, rel=5e-3), layout


def test_sizes_are_those_of_the_real_configs(shared_dir: Path) -> None:
    directories = dict(
        zip(
            cost.TEACHERS,
            ("llemma-7b", "mistral-7b-proxmath", "deepseek-math-7b", "qwen2.5"),
            strict=True,
        )
    )
    for name, model in {**cost.TEACHERS, "tinyllama": cost.STUDENT}.items():
        path = shared_dir / "tokenizers" / directories.get(name, name) / "config.json"
        config = json.loads(path.read_text())
        assert (
            model.hidden,
            model.intermediate,
            model.layers,
            model.heads,
            model.key_value_heads,
            model.heads * model.head_dim,
            model.vocabulary,
        ) == (
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["hidden_size"],
            config["vocab_size"],
        )


def test_estimated_flops_equal_a_run_with_full_contexts() -> None:
    """The page's formula and the one that runs log agree on the same model."""
    sizes = (64, 160, 3, 4, 2, 16, 120)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=120,
    )
    with torch.device("meta"):
        work = model_work(AutoModelForCausalLM.from_config(config))
    model = cost.Architecture(*sizes)
    assert work.body + work.head == cost.matmul_parameters(model)
    tokens, context = 100, 50
    logged = work.forward_flops(tokens, tokens * context / 2, tokens)
    assert logged == tokens * cost.forward_flops(model, context)


def test_page_holds_the_scripts_tables(capsys: pytest.CaptureFixture[str]) -> None:
    scaling.main([])
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    printed = [line for line in capsys.readouterr().out.splitlines() if line[:2] in ("| ", "- ")]
    assert len(printed) > 80
    assert [line for line in printed if line not in page.splitlines()] == []


def test_options_change_the_estimate_when_they_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scaling.main(["--training_mfu", "0.2", "--nics", "1", "--price", "10"])
    assert "share of the peak in the student's step: 0.2" in capsys.readouterr().out
    halved = replace(cost.Setup(), training_mfu=0.2)
    assert cost.training_hours(halved) == pytest.approx(2 * cost.training_hours(cost.Setup()))


def test_random_blocks_are_packed_and_aligned_when_made() -> None:
    blocks = generated.make_blocks(6, 256, (100, 200))
    online, stored = (
        generated.make_batches(blocks, 256, 3, is_stored) for is_stored in (False, True)
    )
    assert [batch["input_ids"].shape for batch in online] == [(3, 256)] * 2
    filled = sum(len(ids) for block in blocks for ids in block["student_ids"]) / (6 * 256)
    assert filled > 0.9
    for ours, theirs in zip(online, stored, strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
        assert torch.equal(ours["teacher_ranges"], theirs["teacher_ranges"])
        assert not sum(ours["unmapped_tokens"])
        ranges = ours["teacher_ranges"][ours["labels"] != IGNORED_LABEL]
        assert (ranges[:, 0] < ranges[:, 1]).all()
        assert int(ranges.max()) <= sum(ours["teacher_widths"])
        assert "teacher_input_ids" in ours
        assert "teacher_losses" in theirs


def test_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    path, missed = tmp_path / "page.md", "for a reason"
    path.write_text(f"before\n{page.BEGIN}\nstale\n{page.END}\nafter\n")
    found = page.Page()
    claim = harness.Claim("it is fast", at_most=1, unit="x", missed=missed)
    for name, value in {"one": 2.0, "two": 0.5}.items():
        found.add(name, claim, harness.Measured(value, ("a detail",)))
    found.write(path)
    text = path.read_text()
    assert (text[:7], text[-7:]) == ("before\n", "\nafter\n")
    assert "| one  | it is fast | at most 1 x | 2 x      | NO    |" in text
    assert text.count(missed) == 1
    assert text.count("a detail") == 1
    assert "`one`, `two`" in text
    assert "stale" not in text
    with pytest.raises(ValueError, match="expected <!-- measured"):
        page.around(tmp_path / "none.md")


def test_ways_apart_hold_no_memory_of_others() -> None:
    def grow(mebibytes: int) -> harness.Way:
        return harness.Way(lambda turn: b"1" * (mebibytes * 2**20))

    ways = harness.take_turns_apart({str(n): partial(grow, n) for n in (1, 64)}, 3, memory=2)
    added = {name: statistics.median(way.added_bytes) / 2**20 for name, way in ways.items()}
    assert added["64"] == pytest.approx(64, abs=4)
    assert added["1"] < 8
    taken = [(len(way.seconds), len(way.added_bytes)) for way in ways.values()]
    assert taken == [(3, 2), (3, 2)]


def test_memory_is_what_is_in_use_when_blocks_lie_between() -> None:
    def run(_: object) -> bytes:
        blocks = [b"1" * 2**21 for _ in range(20)]
        del blocks[::2]  # 20 MiB, in holes of 2 MiB
        return b"1" * (20 * 2**20)

    way = harness.take_turns_apart({"": lambda: harness.Way(run)}, 0, memory=2)[""]
    assert [bytes_ / 2**20 for bytes_ in way.added_bytes] == pytest.approx([40, 40], abs=3)


def test_ways_apart_tell_what_fails_in_them() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)wrong: .*ZeroDivisionError"):
        harness.take_turns_apart({"wrong": lambda: harness.Way(lambda turn: 1 // 0)}, 1)


def test_ways_apart_tell_which_was_killed() -> None:
    def end(turn: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ways = {"good": lambda: harness.Way(lambda turn: None), "bad": lambda: harness.Way(end)}
    with pytest.raises(RuntimeError, match="bad: its process was ended"):
        harness.take_turns_apart(ways, 1)


def test_exponents_are_of_tokens_when_turns_are_unequal() -> None:
    tokens = [[10, 30], [100, 50], [400, 800]]
    ways = [
        harness.Way(print, seconds=[2.0 * n for n in counts], added_bytes=[counts[0] * total])
        for counts, total in zip(tokens, (20, 75, 600), strict=True)  # the means
    ]
    assert step_growth.exponents(tokens, ways) == pytest.approx((1, 2))


def test_slow_aligners_equal_a_hand_count() -> None:
    distances = aligners.levenshtein(["kitten", "a"], ["sitting", "at", "a"])
    assert distances.tolist() == [[3, 5, 6], [7, 1, 0]]
    left_out = aligners.dynamic_programming(list("abcxd"), list("abyd"))
    assert [list(x) for x in left_out] == [[0], [1], [], [2], [3]]
    warped = aligners.edit_distance(["ab", "c", "de"], ["a", "b", "c", "de"])
    assert warped == [[0, 1], [2], [3]]
