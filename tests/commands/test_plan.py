"""`gradpolicy plan`: it shows the plan, and writes a schedule to edit and to train with."""

from pathlib import Path

import pandas

from gradpolicy.commands.cli import main
from tests.launch.conftest import CONF, QUICK


def test_the_schedule_that_it_writes_trains_before_and_after_it_is_edited(train, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "policy" / "slowly.yaml"
    words = [*QUICK, "policy=straight_through", f"paths.log_dir={tmp_path / 'planned'}"]
    assert main(["plan", "--write-schedule", str(file), *words], CONF) == 0

    def shares() -> list[float]:
        ended = train(
            f"--config-dir={file.parents[1]}",
            "policy=[straight_through,slowly]",
            "trainer.max_epochs=5",
            "trainer.log_every_n_steps=1",
        ).completed
        (log,) = ended.run.glob("csv/**/metrics.csv")
        return pandas.read_csv(log)["policy/slowly/active_share"].dropna().tolist()

    grown = shares()
    assert grown[::2] == grown[1::2] == sorted(set(grown))
    assert len(set(grown)) == 5
    assert grown[-1] == 1.0
    file.write_text(file.read_text().replace("epochs: 1", "steps: 1"))
    assert shares() == [*sorted(set(grown)), *[1.0] * 5]


def test_a_schedule_that_is_there_is_kept(tmp_path: Path, refusal) -> None:
    file = tmp_path / "edited.yaml"
    file.write_text("mine: 1\n")
    assert "--write-schedule" in refusal("plan", f"--write-schedule={file}")
    assert file.read_text() == "mine: 1\n"
