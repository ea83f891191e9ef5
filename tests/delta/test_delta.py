"""Files of what changed: exact both ways, small, and refused where they do not fit."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError

State = dict[str, Tensor]


def state(model: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(one: State, other: State) -> bool:
    assert one.keys() == other.keys()
    pairs = [(tensor.reshape(-1), other[name].reshape(-1)) for name, tensor in one.items()]
    return all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in pairs)


def change_entries(model: nn.Module, share: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.copy_(torch.where(chosen, parameter * 1.1 + 0.3, parameter))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "change.safetensors"


@pytest.fixture
def saved_base(network: nn.Module, path: Path) -> dict:
    """What the network was. It has changed since, and the file at `path` tells by what."""
    base = state(network)
    change_entries(network, 0.1)
    gp.delta.save(path, network, base)
    return base


# ---- there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_applying_and_reverting_restore_every_bit(dtype: torch.dtype, path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 150), nn.Linear(150, 5)).to(dtype)
    base = state(model)
    change_entries(model, 0.01)
    after = state(model)
    gp.delta.save(path, model, base)
    gp.delta.revert(model, path)
    assert same_bits(state(model), base)
    gp.delta.apply(model, path)
    assert same_bits(state(model), after)


def test_zeros_signs_infinities_and_nan_keep_their_bits(path: Path) -> None:
    base = {"w": torch.tensor([0.0, 1.0, torch.inf, 1.0, *[2.0] * 20])}
    odd_nan = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    after = {"w": torch.cat([torch.tensor([-0.0, torch.inf, -torch.inf]), odd_nan, base["w"][4:]])}
    assert gp.delta.save(path, after, base).stored == 4
    model = {"w": base["w"].clone()}
    gp.delta.apply(model, path)
    assert same_bits(model, after)
    gp.delta.revert(model, path)
    assert same_bits(model, base)


@pytest.mark.supports("delta", loop="plain")
def test_entries_rows_and_whole_tensors_are_stored_as_such(path: Path) -> None:
    base = {name: torch.zeros(50, 20) for name in ("entries", "rows", "whole", "untouched")}
    base["large"] = torch.zeros(1_000_000)
    after = copy.deepcopy(base)
    after["entries"].view(-1)[::100] = 1.0
    after["rows"][[3, 7]] = 1.0
    after["whole"] += 1.0
    after["large"][[5, 999_999]] = 1.0
    info = gp.delta.save(path, after, base)
    assert {tensor.name: (tensor.form, tensor.stored) for tensor in info.tensors} == {
        "entries": ("entries", 10),
        "large": ("entries", 2),
        "rows": ("rows", 40),
        "whole": ("whole", 1000),
    }
    gp.delta.apply(base, path)
    assert same_bits(base, after)
    assert "2" in str(info)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_percent_of_the_entries_takes_at_most_three_percent_of_the_file(dtype, tmp_path, path):
    model = nn.Sequential(nn.Linear(400, 500), nn.Linear(500, 100)).to(dtype)
    base = state(model)
    save_file(base, tmp_path / "model.safetensors")
    change_entries(model, 0.01)
    gp.delta.save(path, model, base)
    assert path.stat().st_size <= 0.03 * (tmp_path / "model.safetensors").stat().st_size


def test_tied_weights_are_stored_once(path: Path) -> None:
    model = dict.fromkeys(["embedding.weight", "head.weight"], torch.randn(50, 20))
    model.update(dict.fromkeys(["kept.weight", "also.weight"], torch.randn(5, 2)))
    base = {name: tensor.clone() for name, tensor in model.items()}
    model["head.weight"][3] += 1.0
    after = copy.deepcopy(model)
    saved = gp.delta.save(path, model, base)
    merged = gp.delta.merge([path, path], [0.5, 0.5], path.with_suffix(".merged"))
    for info in (saved, gp.delta.info(path), merged):
        assert (info.stored, info.entries, info.base_bytes) == (20, 1010, 4 * 1010)
        assert [(each.name, each.form) for each in info.tensors] == [
            ("embedding.weight", "rows"),
            ("head.weight", "tied"),
        ]
    assert path.stat().st_size < 2 * 20 * 4 + 1000
    gp.delta.revert(model, path)
    assert same_bits(model, base)
    gp.delta.apply(base, path)
    assert same_bits(base, after)


def test_the_names_that_compiling_adds_do_not_count(network: nn.Module, saved_base: dict, path: Path) -> None:
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in network.state_dict().items()}
    gp.delta.revert(compiled, path)
    assert same_bits(state(network), saved_base)


# ---- what does not fit is refused, and nothing is written


def test_another_base_is_refused_by_name(saved_base: dict, path: Path) -> None:
    saved_base["1.running_mean"][4] = -0.0
    before = copy.deepcopy(saved_base)
    with pytest.raises(PolicyError, match=r"another base \(\w{16}\) than the model: 1.running_mean differs"):
        gp.delta.apply(saved_base, path)
    assert same_bits(saved_base, before)


@pytest.mark.usefixtures("saved_base")
def test_a_file_is_applied_once_and_taken_back_once(network: nn.Module, path: Path) -> None:
    with pytest.raises(PolicyError, match="is it applied already"):
        gp.delta.apply(network, path)
    gp.delta.revert(network, path)
    with pytest.raises(PolicyError, match="not applied to the model"):
        gp.delta.revert(network, path)
    gp.delta.apply(network, path)
    change_entries(network, 0.1, seed=1)
    after = state(network)
    with pytest.raises(PolicyError, match=r"another base .* 0\.bias, 0\.weight"):
        gp.delta.revert(network, path)
    assert same_bits(state(network), after)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.ones(2, device="meta"), "meta, torch.float32"),
        (torch.eye(2).to_sparse(), "sparse_coo, torch.float32"),
        (torch.ones(2, dtype=torch.complex32), "strided, torch.complex32"),
    ],
)
def test_tensors_that_no_file_holds_are_refused_by_their_kind(path, tensor, kind):
    with pytest.raises(PolicyError, match=rf"'own' cannot be stored: it is {kind}"):
        gp.delta.save(path, {"own": tensor}, {})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "0.weight",
            torch.zeros(29, 40),
            r"'0.weight' is float32 \[30, 40\] in the model and float32 \[29, 40\] in the base",
        ),
        ("0.weight", torch.zeros(30, 40).half(), "float16"),
        (
            "0.weights",
            torch.zeros(30, 40),
            "the model has no tensor 0.weights, which the base has; did you mean '0.weight'",
        ),
    ],
)
def test_a_base_of_another_kind_is_refused_by_name(network, path, name, tensor, message):
    with pytest.raises(PolicyError, match="shares the model's memory"):
        gp.delta.save(path, network, network.state_dict())
    base = state(network)
    del base["0.weight"]
    base[name] = tensor
    with pytest.raises(PolicyError, match=message):
        gp.delta.save(path, network, base)
    gp.delta.save(path, network, state(network))
    with pytest.raises(PolicyError, match="weight"):
        gp.delta.apply(base, path)


# ---- a new head


@pytest.fixture
def with_new_head(network: nn.Module, path: Path) -> tuple[State, State]:
    """A base without the last layer, and the network after training, whose file is at `path`."""
    base = {name: tensor for name, tensor in state(network).items() if not name.startswith("2.")}
    change_entries(network, 0.1)
    gp.delta.save(path, network, base, replaces=["2.*"])
    return base, state(network)


def test_a_new_head_is_applied_whatever_the_base_has(with_new_head: tuple[State, State], path: Path) -> None:
    base, after = with_new_head
    for seed in range(2):
        torch.manual_seed(seed)
        head = {"2.weight": torch.randn(5, 30), "2.bias": torch.randn(5)}
        model = {**copy.deepcopy(base), **head}
        gp.delta.apply(model, path)
        assert same_bits(model, after)
        gp.delta.revert(model, path)
        assert same_bits(model, {**after, **base})
    forms = {tensor.name: (tensor.form, tensor.stored) for tensor in gp.delta.info(path).tensors}
    assert forms["2.weight"] == ("replaced", 150)
    assert gp.delta.info(path).entries == sum(tensor.numel() for tensor in after.values())


def test_the_rest_of_the_base_is_still_compared(with_new_head: tuple[State, State], path: Path) -> None:
    base, after = with_new_head
    model = {**base, "2.weight": torch.zeros(5, 30), "2.bias": torch.zeros(5)}
    before = copy.deepcopy(model)
    for wrong, message in (
        ({**model, "0.bias": base["0.bias"] + 1.0}, "another base"),
        ({**model, "2.bias": torch.zeros(4)}, r"another base .*: 2\.bias \(not float32 \[5\]\) differs"),
        (base, "the model has no tensor 2.bias, 2.weight"),
    ):
        with pytest.raises(PolicyError, match=message):
            gp.delta.apply(wrong, path)
    assert same_bits(model, before)
    with pytest.raises(PolicyError, match=r"replaces: tensor pattern 'head\.\*' matches nothing"):
        gp.delta.save(path, after, base, replaces="head.*")


def test_a_file_with_a_new_head_is_not_merged(with_new_head: tuple[State, State], path: Path) -> None:
    with pytest.raises(PolicyError, match=r"change\.safetensors replaces '2\.bias', which is no change"):
        gp.delta.merge([path], [0.5], path)
    gp.delta.apply({**with_new_head[0], "2.weight": torch.zeros(5, 30), "2.bias": torch.zeros(5)}, path)


# ---- merging


@pytest.fixture
def two(tmp_path: Path) -> tuple[State, list[State], list[Path]]:
    """A base, two changes of it that overlap, and their files."""
    base = {"w": torch.linspace(-1, 1, 60).view(12, 5), "b": torch.zeros(4)}
    changed, paths = [], []
    for number in range(2):
        after = {"w": base["w"].clone(), "b": base["b"] + number}
        after["w"].view(-1)[number : 40 : 3 + number] += 0.1 * (number + 1)
        changed.append(after)
        paths.append(tmp_path / f"{number}.safetensors")
        gp.delta.save(paths[-1], after, base)
    return base, changed, paths


def test_merging_adds_up_the_weighted_changes(two: tuple[State, list[State], list[Path]], path: Path) -> None:
    base, changed, paths = two
    gp.delta.merge(paths, [0.5, -2.0], path)
    merged = copy.deepcopy(base)
    gp.delta.apply(merged, path)
    for name, tensor in merged.items():
        start, first, second = (each[name].double() for each in (base, *changed))
        assert torch.equal(tensor, (start + 0.5 * (first - start) - 2.0 * (second - start)).float())
    gp.delta.revert(merged, path)
    assert same_bits(merged, base)


def test_what_one_file_alone_changes_with_weight_one_keeps_its_bits(tmp_path: Path, path: Path) -> None:
    base = {"w": torch.tensor([1e30, 0.0, 1.0]), "count": torch.tensor(10)}
    for name, entry, value, count in (("a", 0, 1e-30, 13), ("b", 1, -0.0, 14)):
        after = base["w"].clone()
        after[entry] = value
        gp.delta.save(tmp_path / name, {"w": after, "count": torch.tensor(count)}, base)
    gp.delta.merge([tmp_path / "a", tmp_path / "b"], [1.0, 1.0], path)
    gp.delta.apply(base, path)
    assert same_bits(base, {"w": torch.tensor([1e-30, -0.0, 1.0]), "count": torch.tensor(17)})
    # Whole numbers are rounded.
    gp.delta.revert(base, path)
    gp.delta.merge([tmp_path / "a", tmp_path / "b"], [0.5, 0.5], path)
    gp.delta.apply(base, path)
    assert base["count"].item() == 14


def test_merging_refuses_other_bases_and_weights(two, tmp_path, path):
    _, changed, paths = two
    gp.delta.save(tmp_path / "other", changed[0], changed[1])
    with pytest.raises(PolicyError, match=r"other has another base than .*0\.safetensors: see b, w"):
        gp.delta.merge([paths[0], tmp_path / "other"], [1.0, 1.0], path)
    for weights in ([1.0], [1.0, torch.nan], [1.0, "2"]):
        with pytest.raises(PolicyError, match="weight"):
            gp.delta.merge(paths, weights, path)
    with pytest.raises(PolicyError, match="'b' would hold values that are not finite"):
        gp.delta.merge(paths, [1.0, 1e300], path)
    assert not path.exists()
