"""The report reads run directories, says what they lack, compares runs, and is drawn in a browser."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from run_directories import LAYERS, write_json, write_run

from gradpolicy.insight.report import write
from gradpolicy.insight.report.figures import constants, flow, group_curves, mask_curves, timeline
from gradpolicy.insight.report.recorded_run import Run, config_differences, groups_of, read_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(\s*["']?https?:""")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two learning rates with three seeds each."""
    return [
        write_run(tmp_path / f"lr{lr}_{seed}", seed=seed, lr=lr, accuracy=accuracy + 0.01 * seed)
        for lr, accuracy in ((0.01, 0.9), (0.1, 0.8))
        for seed in range(3)
    ]


def page_of(runs: Sequence[Path], output: Path) -> str:
    """The report without plotly's script, and without what figures are made of."""
    text = write(runs, output).read_text()
    return re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)


def edit_json(path: Path, **changes: object) -> None:
    """Changes some keys of a JSON file."""
    write_json(path, json.loads(path.read_text()) | changes)


# ---- one run


def test_a_report_says_what_was_asked_and_what_came_of_it(run: Path, tmp_path: Path) -> None:
    page = page_of([run], tmp_path / "report.html")
    for text in (
        "python train.py optimizer.lr=0.01 seed=0",
        '<td><code>optimizer.lr</code></td><td class="new">0.01</td>',
        "2,456</b> of 4,000 trainable entries",
        "frozen entries: 1,284 intervals, 0 changed",
        "Freeze · Random",
        "The gradient is cut at: input of modules model.probe (cut)",
        "<td>torch</td><td>2.11.0</td>",
        "<td><code>model.trunk.0–2</code></td><td>conv</td>",
        "Share and flips",
        "Flow policies",
    ):
        assert text in page, text
    assert "checkpoint" not in page  # where a run is kept is no difference


def test_names_from_configs_and_logs_are_escaped(run: Path, tmp_path: Path) -> None:
    page = page_of([run], tmp_path / "report.html")
    assert "cut: &lt;b&gt;the probe&lt;/b&gt; trains alone" in page
    assert "the learning rate is &lt;large&gt; &amp; odd" in page
    edit_json(run / "result.json", overrides=["user.note=</script><script>alert(1)</script>"])
    text = write([run], tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    "replace", [Path.symlink_to, lambda path, theirs: os.mkfifo(path)], ids=["link", "pipe"]
)
def test_a_report_follows_no_link_out_of_the_directory_and_waits_for_no_pipe(
    run: Path, tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    names = ["csv/version_0/metrics.csv", "config.yaml", "result.json", "record.jsonl"]
    for name in names:
        replace(run / name, (run / name).rename(tmp_path / Path(name).name))
    page = page_of([run], tmp_path / "report.html")
    for name in ("csv/*/metrics.csv", *names[1:]):
        assert f"<code>{name}</code>" in page, name


FAULT = "x (policy.half): 7 of 9 frozen entries changed"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"changed": 1, "differences": [FAULT]}, "bad"),
        ({"intervals": 0}, ""),
    ],
    ids=["a difference", "nothing checked"],
)
def test_an_audit_says_what_it_proves(run: Path, tmp_path: Path, changes: dict, verdict: str) -> None:
    edit_json(run / "audit.json", **changes)
    page = page_of([run], tmp_path / "report.html")
    assert f'<p class="verdict {verdict}">frozen entries: ' in page
    assert ("(nothing was checked)" in page) is not verdict
    assert (f'<li class="fault">{FAULT}</li>' in page) is (verdict == "bad")


def test_masks_are_shown_over_the_steps(run: Path) -> None:
    rows = read_run(run).rows("freeze").groupby("step")[["active", "flipped", "entries"]].sum()
    share, flips = mask_curves(read_run(run)).figure.data
    assert share.x.tolist() == rows.index.tolist()
    assert share.y == pytest.approx(rows["active"] / rows["entries"])
    assert flips.y == pytest.approx(rows["flipped"] / rows["entries"])
    (layers,) = timeline(read_run(run)).figure.data
    assert list(layers.y) == list(LAYERS)
    assert layers.x.tolist() == rows.index.tolist()


def test_random_draws_of_one_density_are_in_no_chart(run: Path) -> None:
    generator = np.random.default_rng(0)
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "freeze":
            draws = generator.binomial(line["entries"], 0.5)
            line["active"], line["flipped"] = draws.tolist(), [each // 2 for each in line["entries"]]
            line["flipped"] = line["flipped"] if line["step"] else [0] * len(line["flipped"])
    (run / "record.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert mask_curves(read_run(run)) is None
    assert timeline(read_run(run)) is None


def test_entries_without_a_gradient_do_not_count_as_training(run: Path, tmp_path: Path) -> None:
    assert '<td class="figure-cell">772 of 3,088</td>' in page_of([run], tmp_path / "report.html")


def test_constants_are_in_a_table_and_not_in_charts(run: Path) -> None:
    read = read_run(run)
    values = {(each["policy"], each["quantity"]): each["value"] for each in constants(read)}
    assert values["cut", "operations"] == 3
    assert values["through", "gradient norm after"] == 0.03
    assert not [quantity for policy, quantity in values if policy == "freeze"]
    assert flow(read) is None


def test_an_empty_directory_gives_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = page_of([tmp_path / "empty"], tmp_path / "report.html")
    assert "not finished" in page
    for name in ("config.yaml", "plan.json", "result.json", "record.jsonl", "audit.json", "train.log", "csv"):
        assert re.search(rf"<code>{re.escape(name)}[^<]*</code> is absent, and with it ", page)


# ---- several runs


def test_runs_that_differ_in_the_seed_alone_are_one_group(runs: list[Path]) -> None:
    groups = groups_of([read_run(path) for path in runs])
    assert [(group.label, [run.config["seed"] for run in group.runs]) for group in groups] == [
        ("lr=0.01", [0, 1, 2]),
        ("lr=0.1", [0, 1, 2]),
    ]


def test_labels_have_three_digits_and_the_names_of_policies() -> None:
    half = {"policy": "half", "policy.half.mask.density": 0.5}
    configs = [{"policy": "none"}, half, {**half, "a.lr": 0.003756, "b.lr": 0.003756}]
    groups = groups_of([Run(Path(), str(index), config=config) for index, config in enumerate(configs)])
    assert [group.label for group in groups] == ["none, lr=–", "half, lr=–", "half, lr=0.00376"]


def test_curves_of_groups_are_means_over_their_runs(runs: list[Path]) -> None:
    loss = group_curves(groups_of([read_run(path) for path in runs]))[0].figure.data
    thick = [trace for trace in loss if trace.showlegend]
    assert [trace.name for trace in thick][:2] == ["lr=0.01, train/loss", "lr=0.01, val/loss"]
    # The losses of the seeds 0, 1 and 2 differ by 5 %.
    assert thick[0].y == pytest.approx(1.05 * np.exp(-thick[0].x / 30), rel=1e-6)
    assert len(loss) == 2 * 2 * (1 + 3)


@pytest.mark.parametrize(
    ("first", "second", "differences"),
    [
        (
            {"a": 1, "b": 2, "paths.x": 3},
            {"a": 1, "b": 3, "paths.x": 4, "c": 5},
            {"b": ("2", "3"), "c": ("–", "5")},
        ),
        (
            {"policy": "none", "seed": 1},
            {"policy": "cut", "seed": 1, "policy.cut.modules": "probe"},
            {"policy": ("none", "cut")},
        ),
    ],
    ids=["keys that differ", "a policy that one lacks"],
)
def test_only_keys_that_differ_are_shown(first: dict, second: dict, differences: dict) -> None:
    found = config_differences([first, second])
    assert {key: tuple(values) for key, values in found.items()} == differences


def test_a_run_that_broke_off_is_shown_but_in_no_mean(runs: list[Path], tmp_path: Path) -> None:
    stopped = runs[0]
    edit_json(stopped / "result.json", status="stopped", metrics={})
    page = page_of(runs, tmp_path / "report.html")
    assert "6 runs compared" in page
    assert "<code>optimizer.lr</code>" in page
    assert "policy.freeze.mask.density" not in page
    assert (step := read_run(stopped).last_step) > 0
    assert f"{stopped.name} (stopped at step {step})" in page
    # The accuracies of the seeds 1 and 2.
    assert "0.915 ± 0.0071" in page
    assert page.count('<td class="figure-cell">2</td>') == 1


# ---- in a browser


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        f"--user-data-dir={page.parent / 'browser'}",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("several", [False, True], ids=["one run", "many runs"])
def test_a_browser_draws_every_figure_without_an_error(
    several: bool, runs: list[Path], tmp_path: Path
) -> None:
    output = write(runs if several else runs[:1], tmp_path / "report.html")
    done = browse(output, "--dump-dom")
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    body = done.stdout.partition("</head>")[2]
    places = re.findall(
        r'<div class="plot[^"]*" id="(figure-\d+)"[^>]*>(.*?)<script type="application/json"', body, re.DOTALL
    )
    shown = body.partition('data-run="1"')[0]
    visible = [(name, content) for name, content in places if f'id="{name}"' in shown]
    # Two that compare runs, and four of the run that is open.
    assert len(visible) == (6 if several else 4)
    for name, content in visible:
        assert 'class="main-svg"' in content, name
    assert "What was asked" in body
    assert not OUTSIDE.search(re.sub(r"<script>.*?</script>", "", output.read_text(), flags=re.DOTALL))
