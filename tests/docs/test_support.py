"""The table of what works where states what the tests show, and is written from the reports of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.markdown import DOCS, ROOT
from tests.support_matrix import (
    COLLECTED,
    END,
    RAN,
    START,
    Collector,
    Support,
    facts,
    parsed,
    rendered,
    split_page,
)

KNOWN = {
    Support("rows", "plain", "one", "eager", ""),
    Support("rows", "plain", "one", "compiled", ""),
    Support("rows", "plain", "ddp", "compiled", "no hook"),
    Support("entries", "lightning", "deepspeed", "eager", "flat copies"),
    Support("entries", "lightning", "fsdp2", "eager", ""),
    Support("entries", "lightning", "fsdp2", "eager", "flat copies"),
}


def test_the_table_is_what_the_marks_of_the_tests_state(request: pytest.FixtureRequest) -> None:
    _, table, _ = split_page(DOCS / "support.md")
    shown = parsed(table)
    assert rendered(shown) == table
    collected = request.config.stash[COLLECTED]
    stated = {fact for of_file in collected.values() for fact in of_file}
    assert stated - shown == set(), "docs/support.md lacks these: run make support"
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.supports(" in path.read_text()}
    if marked <= collected.keys():
        assert shown - stated == set(), "docs/support.md has what no test shows: run make support"


def test_a_table_is_read_as_it_was_written() -> None:
    table = rendered(KNOWN)
    assert parsed(table) == KNOWN
    alone = {Support("rows", "plain", "one", "compiled", "")}
    assert parsed(rendered(alone)) == alone
    assert table.splitlines()[2:] == [
        "| freeze rows | plain* | plain* no (1) | – | – |",
        "| freeze entries | – | – | Lightning except (2) | Lightning no (2) |",
        "",
        "1. no hook",
        "2. flat copies",
    ]


@pytest.mark.parametrize("where", ["fsdp2", "ddp"])
def test_a_mark_may_name_a_parameter_of_its_test(where: str, request: pytest.FixtureRequest) -> None:
    class Item:
        callspec = request.node.callspec

        def iter_markers(self, name: str) -> Any:
            return [pytest.mark.supports("rows", loop="plain", processes="{where}").mark]

    assert facts(Item()) == {Support("rows", "plain", where, "eager", "")}  # type: ignore[arg-type]


def report(when: str, outcome: str, *stated: Support) -> Any:
    properties = [(RAN, [list(fact) for fact in stated])]
    return SimpleNamespace(
        when=when, user_properties=properties, passed=outcome == "passed", failed=outcome == "failed"
    )


def test_a_run_adds_what_passed_and_removes_what_failed(tmp_path: Path) -> None:
    page = tmp_path / "support.md"
    page.write_text(f"# Above\n{START}{rendered(KNOWN)}{END}\nBelow\n")
    works, fails, skipped, stays, *_ = sorted(KNOWN)
    new = Support("audit", "plain", "one", "eager", "")
    collector = Collector(page)
    for each in (
        report("call", "passed", new, works, fails),
        report("call", "failed", fails),
        report("setup", "passed", skipped),
    ):
        collector.pytest_runtest_logreport(each)
    collector.pytest_sessionfinish()
    before, table, after = split_page(page)
    assert (before, after) == (f"# Above\n{START}", f"{END}\nBelow\n")
    assert parsed(table) == KNOWN - {fails} | {new}
    assert stays in parsed(table)
