"""The audit's configs: what a run writes and prints."""

import json
import re

from tests.app.own_callbacks import chosen


def test_a_run_says_that_nothing_frozen_changed(train) -> None:
    ended = train()
    report = json.loads((ended.run / "audit.json").read_text())
    assert report["intervals"] > 0
    assert report["changed"] == 0
    assert re.search(rf"frozen entries: {report['intervals']} intervals?, 0 changed", ended.out)


def test_a_run_without_an_audit_writes_none(train) -> None:
    ended = train("audit=off", "test=false", "extras.plan=false")
    assert not (ended.run / "audit.json").exists()
    assert "frozen entries" not in ended.out


def test_a_promise_that_did_not_hold_is_no_wrong_input(train) -> None:
    ended = train(*chosen("Moves"))
    assert ended.code == 3
    assert ended.message.startswith("audit: model.trunk.0.conv.weight")
    assert ended.result.status == "failed"
