"""The paper's numbers against its text."""

from __future__ import annotations

import json

from real_data import real_data

from vocagnolm.report.paper import REPORTED_FILE, read_reported, teacher_name


def test_reported_rows_equal_the_papers_text() -> None:
    root = real_data("paper")
    tables = json.loads(REPORTED_FILE.read_text())["tables"]
    # Tables 1 and 4 as the digest of the paper has them.
    expected: dict[str, list[float | None]] = {}
    digest = (root / "README.md").read_text(encoding="utf-8")
    for title, names in (("### Table 1", 2), ("### Table 4", 1)):
        for line in digest.split(title)[1].split("\n\n")[1].splitlines()[2:]:
            row = [cell.strip() for cell in line.strip("|").split("|")]
            numbers = [None if cell == "-" else float(cell) for cell in row[names:]]
            expected[" ".join(row[:names])] = numbers
    renamed = {"nothing: TinyLlama -": "TinyLlama", "Rho-1 reference Rho-1": "Rho-1"}
    renamed["nothing: TinyLlama-CPT CPT"] = "TinyLlama-CPT"
    ours = {**tables[0]["rows"], **tables[3]["rows"]}
    assert ours == {renamed.get(key, key): row for key, row in expected.items()}
    # Tables 2 and 3 as its text has them.
    (path,) = root.glob("arxiv-*.txt")
    for number in (2, 3):
        table = path.read_text(encoding="utf-8").split(f"\nTable {number}: ")[1].split("\n\n")[1]
        lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
        printed = [line[2:] for line in lines if len(line) > 5 and line[-1][0].isdigit()]
        rows = tables[number - 1]["rows"].values()
        assert list(rows) == [list(map(float, row)) for row in printed]


def test_teachers_have_the_papers_names() -> None:
    paper = json.loads(REPORTED_FILE.read_text())
    assert paper["models"].keys() == paper["tables"][3]["rows"].keys()
    for name, others in paper["models"].items():
        assert {teacher_name(f"/x/{other}") for other in (name, *others)} == {name}
    assert teacher_name("some/qwen2.5-math-7b-rl") == "qwen2.5-math-7b-rl"
    # Rho-1 is in the first table.
    assert read_reported(["Table 1", "Rho-1"]) == read_reported(["Table 1"])
