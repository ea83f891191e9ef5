"""The table of what trains, layer by layer, as each driver prints it."""

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.what_trains import what_trains
from gradpolicy.where import named_parameters
from tests.fixtures import TwoLayers


class Blocks(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(blocks)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(10)).square().sum()


def rows(layers) -> list[tuple]:
    return [(row.name, row.trains, round(row.share, 3), row.rate, row.mode) for row in layers]


CASES = {
    "nothing declared": (
        [gp.Rates({"head.*": 0.5})],
        [
            ("embed", "all", 1.0, "×1", "train"),
            ("layers.0–3", "all", 1.0, "×1", "train"),
            ("head", "all", 1.0, "×0.5", "train"),
        ],
        "No policy freezes anything.",
    ),
    "BitFit": (
        [gp.Train(params=["*.bias", "head.*"])],
        [
            ("embed", "nothing", 0.0, "", "train"),
            ("layers.0–3", "*.bias", 0.25, "×1", "train"),
            ("head", "all", 1.0, "×1", "train"),
        ],
        "No policy matches 13 of 27 parameters",
    ),
    "a frozen part": (
        [gp.Freeze(params=["layers.[01].*"], buffers="eval"), gp.Rates({"*": gp.LayerDecay(0.5)})],
        [
            ("embed", "all", 1.0, "×0.03125", "train"),
            ("layers.0–1", "nothing", 0.0, "", "eval"),
            ("layers.2", "all", 1.0, "×0.25", "train"),
            ("layers.3", "all", 1.0, "×0.5", "train"),
            ("head", "all", 1.0, "×1", "train"),
        ],
        "No policy matches 15 of 27 parameters",
    ),
    "rows": (
        [
            gp.Train(gp.masks.Rows("8:"), params="embed.weight"),
            gp.Train(gp.masks.Random(0.5), params="head.*"),
        ],
        [
            ("embed", "weight", 0.2, "×1", "train"),
            ("layers.0–3", "nothing", 0.0, "", "train"),
            ("head", "weight, bias", 0.5, "×1", "train"),
        ],
        "they are frozen, since Train policies name what trains.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_plan_and_loop_show_the_same_table(case, capsys):
    policies, expected, sentence = CASES[case]
    model = Blocks()
    planned = gp.plan(model, policies, loss)
    assert rows(planned.layers) == expected
    assert sentence in planned.layers.unmatched
    assert sum(row.entries for row in planned.layers) == sum(p.numel() for p in model.parameters())
    with gp.training(model, torch.optim.AdamW(model.parameters()), policies, layers=True) as optimizer:
        for _ in range(2):
            loss(model).backward()
            optimizer.step()
    printed = capsys.readouterr().out
    assert printed.count("What trains") == 1
    assert " ".join(str(planned.layers).split()) == " ".join(printed.split())


def test_a_loop_prints_it_only_when_asked_or_on_a_terminal(capsys, monkeypatch):
    for terminal, asked, shown in ((False, None, False), (True, None, True), (True, False, False)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal)
        model = Blocks()
        with gp.training(
            model, torch.optim.SGD(model.parameters()), [gp.Freeze(params="embed.*")], layers=asked
        ):
            loss(model).backward()
        assert ("What trains" in capsys.readouterr().out) is shown


def test_parameters_without_a_gradient_or_an_optimizer_do_not_train(capsys):
    model = Blocks()
    model.embed.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.layers.parameters(), model.head.weight])
    with gp.training(model, optimizer, [gp.Train(params="head.*")], layers=True):
        loss(model).backward()
    printed = capsys.readouterr().out
    assert f"8 of {sum(p.numel() for p in model.parameters())} entries" in printed


def test_installed_policies_print_it(capsys):
    model = Blocks()
    model.layers.requires_grad_(False)
    with gp.install(model, [gp.Clip(norm=1.0, modules="head")]) as installed:
        loss(model).backward()
        print(installed)
    printed = capsys.readouterr().out
    assert "clip" in printed
    assert "layers.0–3" in printed
    assert "50 of" in printed


def test_plain_values_of_a_plan_have_the_layers():
    model = Blocks()
    written = gp.plan(model, [gp.Freeze(params="embed.*")], loss).to_dict()["layers"]
    assert [row["name"] for row in written["rows"]] == ["embed", "layers.0–3", "head"]
    assert written["rows"][0]["share"] == 0.0
    assert set(named_parameters(model)) > {"embed.weight"}


def test_lightning_prints_it_once(make_trainer, loader, capsys):
    callback = gp.GradientPolicies({"head": gp.Train(params="head.*")})
    make_trainer(callbacks=[callback], max_epochs=2).fit(TwoLayers(), loader)
    printed = capsys.readouterr().out
    assert printed.count("What trains") == 1
    assert "18 of 130 entries (13.8%) train. No policy matches 4 of 6 parameters" in " ".join(printed.split())


def test_lightning_prints_nothing_with_layers_off(make_trainer, loader, capsys):
    callback = gp.GradientPolicies({"head": gp.Train(params="head.*")}, layers=False)
    make_trainer(callbacks=[callback]).fit(TwoLayers(), loader)
    assert "What trains" not in capsys.readouterr().out


def test_lightning_refuses_to_train_nothing(make_trainer, loader):
    for policies in (
        {"all": gp.Freeze()},
        {"head": gp.Train(params="head.*"), "no": gp.Freeze(params="head.*")},
    ):
        with pytest.raises(gp.PolicyError, match="0 of 130 entries train"):
            make_trainer(callbacks=[gp.GradientPolicies(policies)]).fit(TwoLayers(), loader)


def test_a_shared_tensor_is_one():
    model = Blocks()
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    layers = gp.plan(model, [gp.Train(gp.masks.Rows("8:"), params="head.weight")], loss).layers
    assert rows(layers) == [
        ("embed", "weight", 0.2, "×1", "train"),
        ("layers.0–3", "nothing", 0.0, "", "train"),
    ]
    assert layers.entries == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        (("bias",), "*.bias"),
        (
            ("lora_A.default.weight", "lora_B.default.weight"),
            "*.lora_A.default.weight, *.lora_B.default.weight",
        ),
        (("a.bias", "b.bias"), "a.bias, b.bias"),
        (("a.weight", "b.weight", "c.bias"), "a.weight, b.weight, c.bias"),
    ],
)
def test_names_that_end_alike_are_a_glob(endings, expected):
    own = ("weight", "bias", "lora_A.default.weight", "lora_B.default.weight")
    names = [f"layers.{layer}.{place}.{name}" for layer in range(2) for place in "abcde" for name in own]
    shares = {name: 1.0 for name in names if name.endswith(endings)}
    (row,) = what_trains({name: torch.ones(2) for name in names}, shares)
    assert row.trains == expected
