"""The report reads run directories, says what they lack, compares runs, and is drawn in a browser."""

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from run_directories import config_of, write_json, write_run
from scipy import stats

from gradpolicy.insight.report import write
from gradpolicy.insight.report.comparison import compare, config_differences, groups_of, holm, spread, welch
from gradpolicy.insight.report.figures import Figure as ReportFigure
from gradpolicy.insight.report.figures import (
    mask_curves,
    new_figure,
    parallel_coordinates,
    run_curves,
    settings_and_metric,
    timeline,
)
from gradpolicy.insight.report.gradient_map import gradient_map
from gradpolicy.insight.report.page import LARGEST, inlined
from gradpolicy.insight.report.reading import read_run

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


def train_one_layer(run: Path) -> None:
    """Changes a record so that the first layer trains as a whole, and the others do not."""
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "freeze":
            line["active"] = [line["entries"][0], *[0] * (len(line["entries"]) - 1)]
    (run / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# ---- one run


def test_a_report_says_what_was_asked_and_what_came_of_it(run: Path, tmp_path: Path) -> None:
    page = page_of([run], tmp_path / "report.html")
    for text in (
        "python train.py optimizer.lr=0.01 seed=0",
        '<td><code>optimizer.lr</code></td><td class="old">0.001</td><td class="new">0.01</td>',
        "2,456</b> of 4,000 trainable entries",
        "frozen entries: 1,284 intervals, 0 changed",
        "Freeze · Random",
        "At most 49 % of what plain Adam holds",
        "The gradient is cut at: input of modules model.probe (cut)",
        "<td>torch</td><td>2.11.0</td>",
        "Share, flips and ages",
        "Map of the gradient",
        "Flow policies",
        "Optimizer memory",
    ):
        assert text in page, text
    assert "checkpoint" not in page  # where a run is kept is no difference
    assert page.count("data:image/") == 1 + 2 * 3


def test_names_from_configs_and_logs_are_escaped(run: Path, tmp_path: Path) -> None:
    page = page_of([run], tmp_path / "report.html")
    assert "cut: &lt;b&gt;the probe&lt;/b&gt; trains alone" in page
    assert "the learning rate is &lt;large&gt; &amp; odd" in page
    config = config_of(run, 0, 0.01) | {"user": {"note": "</script><script>alert(1)</script>"}}
    write_json(run / "config.yaml", config)
    text = write([run], tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_what_is_no_text_stops_no_report(run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").write_text('seed: 3\ntask_name: "\\ud800"\npaths: 3\n')
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text("3")
    (run / "result.json").unlink()
    assert "overrides.yaml</code> cannot be read (it holds no list)" in page_of(
        [run], tmp_path / "report.html"
    )


def test_a_difference_found_by_the_audit_is_shown_and_denies_the_proof(run: Path, tmp_path: Path) -> None:
    audit = json.loads((run / "audit.json").read_text())
    difference = {
        "tensor": "model.head.weight",
        "what": "state exp_avg",
        "policy": "freeze",
        "count": 7,
        "step": 31,
    }
    write_json(run / "audit.json", audit | {"changed": 1, "differences": [difference]})
    page = page_of([run], tmp_path / "report.html")
    assert '<p class="verdict bad">frozen entries: 1,284 intervals, 1 changed' in page
    assert "model.head.weight" in page
    assert "state exp_avg" in page


def test_an_audit_that_checked_nothing_proves_nothing(run: Path, tmp_path: Path) -> None:
    write_json(run / "audit.json", {"intervals": 0, "entries": 0, "changed": 0, "sampled": False})
    page = page_of([run], tmp_path / "report.html")
    assert "(nothing was checked)" in page
    # Nothing is wrong either.
    assert '<span class="chip ">frozen entries: 0 intervals, 0 changed' in page
    assert '<p class="verdict ">frozen entries: 0 intervals, 0 changed' in page


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "name",
    ["config.yaml", "plan.json", "result.json", "record.jsonl", "audit.json", "train.log", "csv", "masks"],
)
def test_a_report_without_a_file_says_what_is_missing(run: Path, tmp_path: Path, name: str) -> None:
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of([run], tmp_path / "report.html")
    if name != "masks":
        assert re.search(rf"<code>{re.escape(name)}[^<]*</code> is absent, and with it ", page)


@pytest.mark.parametrize(
    ("kind", "heading"),
    [("freeze", "Timeline of masks"), ("flow", "Flow policies"), ("memory", "Optimizer memory")],
)
def test_a_record_without_some_rows_leaves_their_figures_out(
    run: Path, tmp_path: Path, kind: str, heading: str
) -> None:
    lines = (run / "record.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] != kind]
    (run / "record.jsonl").write_text("".join(kept))
    page = page_of([run], tmp_path / "report.html")
    assert heading not in page
    assert "Map of the gradient" in page


def test_ages_and_norms_that_a_change_does_not_record_are_no_zeros(run: Path) -> None:
    train_one_layer(run)
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    changes = [
        {key: value for key, value in line.items() if not key.startswith(("age_", "gradient_", "update_"))}
        | {"step": line["step"] + 1}
        for line in lines
        if line["kind"] == "freeze"
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, *changes])
    (run / "record.jsonl").write_text(text)
    drawn = mask_curves(read_run(run))
    assert drawn is not None
    median = drawn.figure.data[-1]
    assert list(median.x) == list(range(0, 60, 5))
    table = timeline(read_run(run))
    assert table is not None
    of_ages = next(trace for trace in table.figure.data if trace.meta["quantity"] == "median age")
    assert of_ages.z[0][:7].tolist() == [0, 0, 0, 0, 0, 2, 2]  # 0.4 times the step, held until the next


def record_active(run: Path, active: Mapping[int, int]) -> None:
    """Records how many of a weight's four entries train from each of these steps on."""
    common = {
        "kind": "freeze",
        "policy": "freeze",
        "epoch": 0,
        "parameter": ["model.a.weight"],
        "entries": [4],
    }
    lines = [{**common, "step": step, "active": [count]} for step, count in active.items()]
    (run / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_timeline_changes_where_masks_changed_and_lasts_as_long_as_the_run(run: Path) -> None:
    """Recorded are changes at 1 and 21, and what is logged every 50 steps: as in BlockCyclic(every=20)."""
    record_active(run, {1: 4, 21: 0, 50: 0, 61: 4})
    (run / "csv/version_0/metrics.csv").write_text("epoch,step,train/loss\n0,49,1.0\n0,80,0.5\n")
    drawn = timeline(read_run(run))
    assert drawn is not None
    (map_,) = [trace for trace in drawn.figure.data if trace.meta["quantity"] == "active share"]
    assert map_.x.tolist() == list(range(1, 81))
    assert map_.z[0].tolist() == [1] * 20 + [0] * 40 + [1] * 20


def test_a_long_timeline_has_few_columns_of_as_many_steps_each(run: Path) -> None:
    record_active(run, {step: 2 * (step % 4 - 1) for step in range(1, 5001, 2)})
    drawn = timeline(read_run(run))
    assert drawn is not None
    map_ = drawn.figure.data[0]
    assert set(map_.x[1:] - map_.x[:-1]) == {21}
    assert len(map_.x) == 239
    assert map_.z[0][:-1].tolist() == pytest.approx([0.5] * 238, abs=0.05)  # 0 and 4 of 4 by turns


def add_metric(run: Path, name: str, values: Sequence[float]) -> None:
    """Adds a column to what a run logged, whose values take turns."""
    table = run / "csv/version_0/metrics.csv"
    head, *rows = table.read_text().splitlines()
    turns = itertools.cycle(values)
    table.write_text("\n".join([f"{head},{name}", *(f"{row},{next(turns)}" for row in rows)]))


def test_a_metric_that_is_always_0_is_one_of_a_run_without_a_result(run: Path) -> None:
    (run / "result.json").unlink()
    add_metric(run, "val/errors", [0.0])
    assert read_run(run).final_metrics["val/errors"] == 0.0


@pytest.mark.parametrize(("values", "drawn"), [([0.25], False), ([0.25, 0.5], True)])
def test_a_metric_that_never_changes_has_no_chart(run: Path, values: list[float], drawn: bool) -> None:
    add_metric(run, "cost/seconds", values)
    assert ("cost/seconds" in [figure.title for figure in run_curves(read_run(run))]) is drawn


def test_an_empty_directory_gives_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = page_of([tmp_path / "empty"], tmp_path / "report.html")
    assert "not finished" in page
    assert page.count("is absent") >= 7


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        write([], tmp_path / "report.html")


def test_a_large_picture_is_shrunk(run: Path) -> None:
    path = run / "pictures" / "guided.png"
    assert path.stat().st_size > 1_000_000
    assert len(inlined(path, most=50_000)) < 4 * 50_000 / 3 + 30


def map_of(run: Path) -> dict[str, dict[str, str]]:
    """The boxes of the map by the qualified names of their modules."""
    drawn = gradient_map(read_run(run))
    assert drawn is not None
    (trace,) = drawn.figure.data
    columns = {"text": trace.text, "parent": trace.parents, "details": trace.customdata}
    return {
        name.removeprefix("root."): {key: values[index] for key, values in columns.items()}
        for index, name in enumerate(trace.ids)
    }


def test_the_map_adds_up_norms_and_shares(run: Path) -> None:
    boxes = map_of(run)
    # 2, 2/2 and 2/3 in the three layers.
    before = 2 * math.sqrt(1 + 1 / 4 + 1 / 9)
    for name in ("", "model", "model.trunk"):
        assert f"gradient norm {before:.3g} before, {0.7 * before:.3g} after" in boxes[name]["details"]
    assert "cut: Stop, norm 0.04" in boxes["model.probe"]["details"]
    effects = {name: boxes[name]["text"].split(" · ")[0] for name in ("model.probe", "model.trunk.0")}
    assert effects == {"model.probe": "cut", "model.trunk.0": "replaced"}
    assert boxes["model.trunk.0.conv"]["text"].startswith("frozen · 5")
    assert boxes["model.trunk.0.conv"]["parent"] == "root.model.trunk.0"


def test_the_map_says_which_share_trained_over_the_whole_run(run: Path) -> None:
    """A layer trains for the first 20 of 80 steps; looks at every 50th step alone would not see it."""
    common = {
        "kind": "freeze",
        "policy": "freeze",
        "epoch": 0,
        "parameter": ["model.probe.weight"],
        "entries": [8],
    }
    lines = [{**common, "step": step, "active": [count]} for step, count in {1: 8, 21: 0, 50: 0}.items()]
    (run / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run / "csv/version_0/metrics.csv").write_text("epoch,step,train/loss\n0,80,0.5\n")
    assert "25%" in map_of(run)["model.probe"]["text"]


def test_the_map_has_the_parents_that_the_plan_leaves_out(run: Path) -> None:
    module = {"name": "a.b.c", "type": "Linear", "policies": ["p"], "parameters": 3}
    write_json(run / "plan.json", {"rows": [], "modules": [module]})
    assert list(map_of(run)) == ["", "a", "a.b", "a.b.c"]


def test_masks_are_shown_as_share_flips_and_age_over_the_steps(run: Path) -> None:
    drawn = mask_curves(read_run(run))
    assert drawn is not None
    share, flips, *ages = drawn.figure.data
    rows = read_run(run).rows("freeze")
    first = rows[rows["step"] == 0]
    assert share.y[0] == pytest.approx(first["active"].sum() / first["entries"].sum())
    # The first mask flips nothing, so the flips begin with the second.
    second = rows[rows["step"] == 5]
    assert (flips.x[0], flips.y[0]) == (5, pytest.approx(second["flipped"].sum() / second["entries"].sum()))
    assert [trace.name for trace in ages] == ["age in updates"] * 3
    assert {trace.yaxis for trace in ages} == {"y3"}


def test_shares_by_layer_are_drawn_where_layers_train_as_a_whole_and_not_where_entries_do(run: Path) -> None:
    drawn = timeline(read_run(run))
    assert drawn is not None
    assert drawn.title == "Gradients and updates by layer"
    assert "active share" not in {trace.meta["quantity"] for trace in drawn.figure.data}
    train_one_layer(run)
    drawn = timeline(read_run(run))
    assert drawn is not None
    assert drawn.title == "Timeline of masks"
    assert "active share" in {trace.meta["quantity"] for trace in drawn.figure.data}


# ---- several runs


def test_runs_that_differ_in_the_seed_alone_are_one_group(runs: list[Path]) -> None:
    groups = groups_of([read_run(path) for path in runs])
    assert [(group.label, [run.seed for run in group.runs]) for group in groups] == [
        ("lr=0.01", [0, 1, 2]),
        ("lr=0.1", [0, 1, 2]),
    ]


def test_labels_have_three_digits_and_the_names_of_policies(runs: list[Path]) -> None:
    policy: dict[str, dict] = {
        "none": {},
        "one": {"half": {"_target_": "gradpolicy.Freeze", "mask": {"density": 0.123456}}},
        "two": {"half": {"_target_": "gradpolicy.Freeze", "mask": {"density": 0.654321}}, "cut": {"a": 1}},
    }
    for path, chosen in zip(runs, policy.values(), strict=False):
        config = {
            "optimizer": {"lr": 0.00375619614449984},
            "policy": chosen,
            "callbacks": {"study": {"trial": 1}},
        }
        write_json(path / "config.yaml", config)
    labels = [group.label for group in groups_of([read_run(path) for path in runs[:3]])]
    assert labels == ["none", "half", "half + cut"]
    write_json(runs[0] / "config.yaml", {"optimizer": {"lr": 0.02}, "policy": policy["one"]})
    assert [group.label for group in groups_of([read_run(path) for path in runs[:2]])] == [
        "lr=0.02",
        "lr=0.00376",
    ]
    other = {"half": {"_target_": "gradpolicy.Freeze", "mask": {"density": 0.5}}}
    write_json(runs[0] / "config.yaml", {"optimizer": {"lr": 0.00375619614449984}, "policy": other})
    labels = [group.label for group in groups_of([read_run(path) for path in runs[:2]])]
    assert labels == ["half.density=0.5", "half.density=0.123"]


def test_the_command_that_repeats_a_trial_has_no_keys_of_the_search(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    added = [
        "+callbacks.study={_target_: x, trial: 3}",
        "hydra.run.dir='/a b'",
        "optimized_metric='val/accuracy'",
    ]
    write_json(run / "result.json", result | {"overrides": ["optimizer.lr=0.00375619614449984", *added]})
    write_json(run / "defaults.yaml", {"optimized_metric": "val/accuracy"})
    assert read_run(run).command == "python train.py optimizer.lr=0.00375619614449984"


def test_runs_are_lines_through_what_they_set_and_the_metric(runs: list[Path], tmp_path: Path) -> None:
    differences = config_differences([read_run(path).config for path in runs])
    drawn = settings_and_metric([read_run(path) for path in runs], differences)
    assert drawn is not None
    lr, metric = drawn.figure.data[0].dimensions
    assert (lr.label, lr["values"]) == ("lr", (0.01, 0.01, 0.01, 0.1, 0.1, 0.1))
    assert len(metric["values"]) == 6
    assert drawn.title in page_of(runs, tmp_path / "report.html")
    assert settings_and_metric([read_run(path) for path in runs[:1]], differences) is None


def test_a_legend_of_many_long_names_makes_its_figure_higher() -> None:
    heights = []
    for count in (2, 12):
        figure = new_figure("step", "loss")
        for index in range(count):
            figure.add_scatter(x=[0, 1], y=[0, 1], name=f"{index} {'long ' * 20}")
        ReportFigure("loss", figure)
        assert max(len(trace.name) for trace in figure.data) <= 60
        heights.append(figure.layout.height)
    assert heights[1] >= heights[0] + 10 * 20


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_the_tables_of_many_runs_fit_a_window_of_1280_pixels(runs: list[Path], tmp_path: Path) -> None:
    for index, path in enumerate(runs):
        config = config_of(path, 0, 0.01) | {
            "user": {f"a_long_key_{key}": index + key / 7 for key in range(9)}
        }
        write_json(path / "config.yaml", config)
        result = json.loads((path / "result.json").read_text())
        metrics = {f"val/a_rather_long_metric_{key}": index + key / 7 for key in range(9)}
        write_json(path / "result.json", result | {"metrics": result["metrics"] | metrics})
    output = write(runs, tmp_path / "report.html")
    measure = (
        "document.querySelectorAll('.scroll').forEach(table => "
        "{ widest = Math.max(widest, table.scrollWidth - table.clientWidth) })"
    )
    look = f"<script>let widest = 0; {measure}; document.body.append(`beyond: ${{widest}}`)</script>"
    output.write_text(output.read_text().replace("</body>", f"{look}</body>"))
    assert "beyond: 0\n" in browse(output, "--window-size=1280,900", "--dump-dom").stdout


def test_only_keys_that_differ_are_shown() -> None:
    first, second = {"a": 1, "b": 2, "paths.x": 3}, {"a": 1, "b": 3, "paths.x": 4, "c": None}
    assert [(each.key, each.values) for each in config_differences([first, second])] == [
        ("b", ("2", "3")),
        ("c", ("–", "None")),
    ]


def test_a_run_without_policies_names_those_it_left_out(run: Path, tmp_path: Path) -> None:
    half = {"_target_": "gradpolicy.Freeze", "params": "trunk.*"}
    write_json(run / "defaults.yaml", {"policy": {"rounding": half, "half_trunk": half}})
    write_json(run / "config.yaml", {"policy": {}})
    row = '<td class="old">rounding + half_trunk</td><td class="new">none</td>'
    assert row in page_of([run], tmp_path / "report.html")


def test_long_names_have_room_on_the_first_axis_of_what_was_set() -> None:
    names = ["none", "rounding + half_trunk + layerwise"]
    figure = parallel_coordinates({"policy": names}, "val/accuracy", [0.5, 0.6])
    # Plotly writes a letter of a tick about 5.3 pixels wide.
    assert figure.layout.margin.l > 5.3 * len(names[1])


def test_a_node_that_one_config_lacks_is_one_difference() -> None:
    policy = {"policy.cut._target_": "gradpolicy.Stop", "policy.cut.modules": "probe"}
    shared = {"policy.half.mask.density": 0.5}
    (difference,) = config_differences([shared, shared | policy])
    assert (difference.key, difference.values) == ("policy.cut", ("–", "Stop modules=probe"))


def test_a_key_that_refers_to_another_one_is_left_out() -> None:
    configs = [{"model.optimizer.lr": lr, "optimizer.lr": lr, "data.seed": 3, "seed": lr} for lr in (1, 2)]
    assert [each.key for each in config_differences(configs)] == ["optimizer.lr", "seed"]
    follows = [{"data.seed": seed, "seed": seed} for seed in (1, 2)]
    assert config_differences(follows, skip=["seed"]) == []


def test_means_spreads_and_the_test_are_those_of_scipy() -> None:
    first, second = [0.9, 0.91, 0.93], [0.8, 0.86, 0.81, 0.85]
    assert spread(first) == (pytest.approx(2.74 / 3), pytest.approx(stats.tstd(first)))
    mean, deviation = zip(*map(spread, (first, second)), strict=True)
    # Welch 1947: the statistic and its degrees of freedom, from means and standard deviations alone.
    expected = stats.ttest_ind_from_stats(mean[0], deviation[0], 3, mean[1], deviation[1], 4, equal_var=False)
    assert welch(first, second) == pytest.approx(expected.pvalue)
    assert math.isnan(welch([0.9], second))
    assert welch([1.0, 1.0], [1.0, 1.0]) == 1
    assert welch([1.0, 1.0], [2.0, 2.0]) == 0


def test_holm_never_falls_and_stops_at_one() -> None:
    assert holm([0.04, 0.01, math.nan, 0.03]) == pytest.approx([0.06, 0.03, math.nan, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1, 1]


def test_differences_that_exceed_the_spread_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    def group(lr: float, values: Sequence[float]) -> list[Path]:
        return [
            write_run(tmp_path / f"{lr}_{seed}", seed=seed, lr=lr, accuracy=value)
            for seed, value in enumerate(values)
        ]

    paths = [*group(1.0, [0.90, 0.91, 0.92]), *group(2.0, [0.91, 0.90, 0.92]), *group(3.0, [0.5, 0.51, 0.52])]
    groups = groups_of([read_run(path) for path in paths])
    found = {(each.first, each.second): each for each in compare(groups, ["test/accuracy"])}
    assert not found["lr=1.0", "lr=2.0"].exceeds
    assert found["lr=1.0", "lr=3.0"].exceeds
    assert found["lr=1.0", "lr=3.0"].difference == pytest.approx(-0.4)


@pytest.mark.slow
def test_a_report_of_many_runs_compares_them(runs: list[Path], tmp_path: Path) -> None:
    page = page_of(runs, tmp_path / "report.html")
    for text in (
        "6 runs compared",
        "0.91 ± 0.01",
        "Differences that exceed the spread",
        "Welch's two-sided t-test, p below 0.05",
        "over 3 comparisons",
        "<code>optimizer.lr</code>",
    ):
        assert text in page, text
    assert "policy.freeze.mask.density" not in page


def test_a_run_that_broke_off_is_shown_but_in_no_mean(runs: list[Path], tmp_path: Path) -> None:
    stopped, killed = runs[0], runs[5]
    result = json.loads((stopped / "result.json").read_text())
    write_json(stopped / "result.json", result | {"status": "stopped", "metrics": {}})
    (killed / "result.json").unlink()
    page = page_of(runs, tmp_path / "report.html")
    steps = {path: read_run(path).last_step for path in (stopped, killed)}
    assert f"{stopped.name} (stopped at step {steps[stopped]}), {killed.name} (not finished at step" in page
    assert min(steps.values()) > 0
    # Accuracies of the seeds 1 and 2 of one learning rate, 0 and 1 of the other.
    assert "0.915 ± 0.0071" in page
    assert "0.805 ± 0.0071" in page
    assert page.count('<td class="figure-cell">2</td>') == 2


def test_nothing_is_claimed_of_single_runs(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(lr), lr=lr, accuracy=lr) for lr in (0.1, 0.9)]
    page = page_of(paths, tmp_path / "report.html")
    assert "Differences that exceed" not in page
    assert "the spread of one run is not known" in page


@pytest.mark.slow
def test_a_report_stays_small_and_names_the_runs_it_leaves_out(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradpolicy.insight.report.page.LARGEST", 5_000_000)
    page = page_of(runs[:3], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= 5_000_000
    assert re.search(r"stays below 6 MB: .*lr0.01_2\.", page)
    assert 1 <= page.count('<section class="run"') <= 2


# ---- in a browser


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
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
    assert output.stat().st_size <= LARGEST
    done = browse(output, "--dump-dom")
    # Parallel coordinates are drawn by WebGL, which says that it has no graphics card.
    said = [
        line
        for line in done.stderr.splitlines()
        if "CONSOLE" in line and "GL" not in line.partition("CONSOLE")[2]
    ]
    assert not said
    body = done.stdout.partition("</head>")[2]
    places = re.findall(
        r'<div class="plot[^"]*" id="(figure-\d+)"[^>]*>(.*?)<script type="application/json"', body, re.DOTALL
    )
    shown = body.partition('data-run="1"')[0]
    visible = [(name, content) for name, content in places if f'id="{name}"' in shown]
    assert len(visible) >= 7
    for name, content in visible:
        assert 'class="main-svg"' in content, name
    assert "What was asked" in body
    assert not OUTSIDE.search(re.sub(r"<script>.*?</script>", "", output.read_text(), flags=re.DOTALL))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("width", [500, 900])
def test_what_was_asked_fits_a_phone_and_a_small_window(run: Path, tmp_path: Path, width: int) -> None:
    target = "gradpolicy.tasks.tiny_shakespeare.TinyShakespeareDataModule"
    config = config_of(run, 0, 0.01) | {"data": {"_target_": target, "data_dir": f"/{'long' * 20}"}}
    write_json(run / "config.yaml", config)
    defaults = config_of(run, 0, 0.001) | {"data": {"_target_": "gradpolicy.tasks.digits.DigitsDataModule"}}
    write_json(run / "defaults.yaml", defaults)
    output = write([run], tmp_path / "report.html")
    measure = "(table => document.body.append(`beyond: ${table.scrollWidth - table.clientWidth}`))"
    look = f"<script>{measure}(document.querySelector('#asked-0 .scroll'))</script>"
    output.write_text(output.read_text().replace("</body>", f"{look}</body>"))
    # A window of Chromium is at least 500 pixels wide.
    assert "beyond: 0\n" in browse(output, f"--window-size={width},900", "--dump-dom").stdout


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_report_of_an_empty_directory_opens(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = browse(write([tmp_path / "empty"], tmp_path / "report.html"), "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert "They were not recorded." in done.stdout
