"""The commands of the tests: mutants and stress."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import mutants
import pytest
import stress

SOURCE = """
Kind = Literal["min", "max"]
def f(a: int = 3) -> int:
    if a > 2 and a:
        raise ValueError(f"{a + 1}")
    return min(a, 1) + 2
"""
REPORT = """
<testsuites><testsuite time="90">
  <testcase classname="a" name="loop"><properties>
    <property name="stress" value="[&quot;kills&quot;, &quot;the same&quot;]"/>
    <property name="times" value="30"/>
  </properties></testcase>
  <testcase classname="a" name="one"><properties>
    <property name="stress" value="[&quot;kills&quot;, &quot;the same&quot;]"/>
  </properties></testcase>
  <testcase classname="a" name="bad"><failure/><properties>
    <property name="stress" value="[&quot;flips&quot;, &quot;refused&quot;]"/>
  </properties></testcase>
  <testcase classname="a" name="away"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_mutants_differ_in_one_node() -> None:
    found = mutants.mutants_of(SOURCE)
    assert {(mutant.before, mutant.after) for mutant in found} == {
        ("def f(a: int=3) -> int:", "def f(a: int=4) -> int:"),
        ("def f(a: int=3) -> int:", "def f(a: int=2) -> int:"),
        ("if a > 2 and a:", "if not (a > 2 and a):"),
        ("if a > 2 and a:", "if a > 2 or a:"),
        ("if a > 2 and a:", "if a >= 2 and a:"),
        ("if a > 2 and a:", "if a > 3 and a:"),
        ("if a > 2 and a:", "if a > 1 and a:"),
        ("raise ValueError(f'{a + 1}')", "pass"),
        ("return min(a, 1) + 2", "return"),
        ("return min(a, 1) + 2", "return min(a, 1) - 2"),
        ("return min(a, 1) + 2", "return max(a, 1) + 2"),
        ("return min(a, 1) + 2", "return min(a, 2) + 2"),
        ("return min(a, 1) + 2", "return min(a, 0) + 2"),
        ("return min(a, 1) + 2", "return min(a, 1) + 3"),
        ("return min(a, 1) + 2", "return min(a, 1) + 1"),
    }
    chosen = mutants.choose(found, 4, random.Random(0))
    assert sorted({mutant.line for mutant in chosen}) == [3, 4, 5, 6]


def test_judgements_are_of_mutants_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = ("a > 2", "a >= 2", "the same"), ("a > 1", "a >= 1", "of a line that is gone")
    monkeypatch.setitem(mutants.JUDGED, "module", judged)
    assert list(mutants.judgements("module", mutants.mutants_of(SOURCE))) == [judged[0]]


def test_modules_of_mutants_have_tests() -> None:
    for module, tests in mutants.TESTS.items():
        assert (mutants.ROOT / "vocagnolm" / f"{module}.py").is_file()
        assert all((mutants.ROOT / "tests" / f"{name}.py").is_file() for name in tests.split())


def test_stress_adds_up_what_tests_report() -> None:
    suite = ET.fromstring(REPORT)[0]
    assert stress.rows(suite) == ([("kills", "the same", 31, 0)], ["a.bad"])
    page = stress.table(suite, 90, {"kills": 12})
    assert "| kills | 31 | the same | 0 |\n| all | 31 | | 0 |\n\n**Failed:** `a.bad`\n" in page
