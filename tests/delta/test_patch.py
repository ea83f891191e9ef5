"""Patches hold what a step may have changed, bit for bit, also for a reader by the rules of other engines."""

import copy
import json
import zlib
from pathlib import Path

import pytest
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.delta.file import _checksum
from gradpolicy.errors import PolicyError

State = dict[str, Tensor]
ROWS = torch.arange(12)[:, None] % 3 == 0


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A tied embedding and head, a layer between them, and a parameter that never trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 12)).to(dtype)
    model[3].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def backward(model: nn.Module) -> None:
    model(torch.randint(12, (4,))).float().square().mean().backward()


def state(model: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(one: State, other: State) -> bool:
    pairs = [(one[name].reshape(-1), other[name].reshape(-1)) for name in one.keys() | other.keys()]
    return all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in pairs)


def entries(state: str = "keep", every: int | None = 2) -> list[gp.Freeze]:
    return [gp.Freeze(gp.masks.Random(0.3, every=every), frozen_state=state)]


POLICIES: dict[str, list[gp.Freeze]] = {
    **{state: entries(state) for state in ("keep", "zero", "drop")},
    "master weights": [gp.Freeze(gp.masks.Random(0.3, every=2), frozen_state="drop", master_weights=True)],
    "rows": [gp.Freeze(gp.masks.Rows("9:"), params="0.weight"), gp.Freeze(params="1.*")],
    "none": [],
    "prune": [gp.Freeze(gp.masks.PruneAndGrow(0.3, grow="random", every=3, stop=9), frozen_state="zero")],
    "best": [
        gp.Freeze(
            gp.masks.Phases(
                [
                    {"params": "1.*", "until": {"metric": "loss", "patience": 2}, "best": True},
                    {"params": "0.*", "until": {"steps": 2}},
                    {"params": "2.*"},
                ]
            )
        )
    ],
}


@pytest.mark.supports("patches", loop="plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", POLICIES)
def test_nine_patches_applied_one_by_one_give_every_bit(kind: str, dtype: torch.dtype, tmp_path: Path):
    model = network(dtype)
    other, loaded = copy.deepcopy(model), copy.deepcopy(model).state_dict()
    kept = [other[2].bias, *([other[1].weight, other[1].bias] if kind == "rows" else [])]
    before = [each.clone() for each in kept]
    halves = [list(model[0].parameters()), [p for each in model[1:3] for p in each.parameters()]]
    halves[1].append(model[3].bias)
    optimizers = [torch.optim.AdamW(halves[0], lr=0.1), torch.optim.SGD(halves[1], lr=0.1, momentum=0.9)]
    sparse = kind in ("keep", "zero", "drop", "master weights")
    run = gp.training(model, optimizers, POLICIES[kind], seed=0)
    with run as masked:
        for step in range(9):
            backward(model)
            for each in masked:
                each.step()
                each.zero_grad()
            patch = gp.delta.patch(masked, model)
            assert all(indices.dtype == torch.int32 for indices, _ in patch.values())
            assert "3.weight" not in patch
            assert "2.bias" not in patch
            if sparse:
                assert 0 < sum(len(values) for _, values in patch.values()) < 0.5 * 188
            gp.delta.apply_patch(other, patch)
            gp.delta.save_patch(tmp_path / f"{step}.patch", patch)
            gp.delta.apply_patch(loaded, tmp_path / f"{step}.patch")
            assert same_bits(state(other), state(model)), step
            assert same_bits(loaded, state(model)), step
            if kind == "best":
                POLICIES[kind][0].mask.report({"loss": [1.0, 2.0, 3.0, 0.5, 4.0, 5.0, 6.0, 7.0, 8.0][step]})
    assert all(map(torch.equal, kept, before))
    if kind == "prune":
        assert (model[1].weight == 0).any()


def test_it_holds_the_active_entries_of_a_mask_alone() -> None:
    model = nn.Linear(8, 12, bias=False)
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.set_mask(model.weight, ROWS)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(PolicyError, match="AdamW has taken no step under its present masks"):
        gp.delta.patch(optimizer, model)
    optimizer.step()
    patch = gp.delta.patch(optimizer, model)
    indices, values = patch["weight"]
    assert indices.tolist() == ROWS.expand(12, 8).flatten().nonzero().flatten().tolist()
    assert torch.equal(values, model.weight.detach().flatten()[indices])
    assert patch.shapes == {"weight": (12, 8)}


def test_masks_of_another_step_and_other_optimizers_are_refused() -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with gp.training(model, inner, entries(every=1)) as optimizer:
        for _ in range(2):
            backward(model)
            with pytest.raises(PolicyError, match="after step\\(\\), before the next forward pass"):
                gp.delta.patch(optimizer, model)
            optimizer.step()
            assert gp.delta.patch(inner, model).keys() == gp.delta.patch(optimizer, model).keys()
        with pytest.raises(PolicyError, match="the model has no parameter of SGD"):
            gp.delta.patch(optimizer, copy.deepcopy(model))
    masked = gp.MaskedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model)
    masked.step()
    assert "1.weight" in gp.delta.patch(masked, model)
    masked.set_mask(model[1].weight, False)
    with pytest.raises(PolicyError, match="no step under its present masks"):
        gp.delta.patch(masked, model)
    with pytest.raises(PolicyError, match=r"expected what gradpolicy.training returns, got Adam"):
        gp.delta.patch(torch.optim.Adam(model.parameters()), model)


def test_a_tensor_of_more_entries_than_int32_counts_is_refused() -> None:
    model = network()
    model.register_parameter("large", nn.Parameter(torch.zeros(1).expand(2**31 + 1)))
    optimizer = gp.MaskedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model)
    optimizer.step()
    with pytest.raises(PolicyError, match="large is a Parameter with 2,147,483,649 entries"):
        gp.delta.patch(optimizer, model)


# ---- what does not fit is refused, and nothing is written


def made_up(
    indices: list[int], values: Tensor, name: str = "w", shape: tuple[int, ...] = (3, 2)
) -> gp.delta.Patch:
    return gp.delta.Patch({name: (torch.tensor(indices, dtype=torch.int32), values)}, {name: shape})


ONES = torch.ones(2)
INVALID = {
    "name": (made_up([0, 1], ONES, name="v"), "unknown tensor 'v'; valid names: 'a', 'w'"),
    "shape": (made_up([0, 1], ONES, shape=(2, 3)), r"w is \(torch.float32, \(3, 2\)\) in the model"),
    "dtype": (made_up([0, 1], ONES.half()), "torch.float16"),
    "range": (made_up([0, 6], ONES), "expected distinct ascending indices"),
    "negative": (made_up([-1, 0], ONES), "expected distinct ascending indices"),
    "duplicate": (made_up([1, 1], ONES), "expected distinct ascending indices"),
    "count": (made_up([0, 1, 2], ONES), "a value for each"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_a_patch_that_does_not_fit_is_refused(kind: str, tmp_path: Path) -> None:
    patch, message = INVALID[kind]
    model = {"w": torch.zeros(3, 2), "a": torch.zeros(2)}
    first = made_up([0], torch.ones(1), name="a", shape=(2,))
    both = gp.delta.Patch({**first, **patch}, {**first.shapes, **patch.shapes})
    with pytest.raises(PolicyError, match=message):
        gp.delta.apply_patch(model, both)
    assert not any(each.any() for each in model.values())
    if "expected distinct" in message:
        with pytest.raises(PolicyError, match="expected distinct"):
            gp.delta.save_patch(tmp_path / "patch", patch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gaps:w": torch.ByteTensor([6])}, "index 6 is out of range"),
        ({"gaps:w": torch.ByteTensor([0, 0])}, "a value for each"),
        ({"gaps:v": torch.ByteTensor([0])}, "its tensors are not those of its shapes"),
        ({"shapes": '{"w":[-1]}'}, "has the shape"),
        ({"shapes": '{"w":[4294967296]}'}, "has the shape"),
        ({"shapes": "[]"}, "is no table"),
        ({"checksum": "0"}, "differs from its checksum"),
        ({"format": "gradpolicy.delta 2"}, "it is 'gradpolicy.delta 2', and 'gradpolicy.patch 1' is read"),
    ],
)
def test_a_file_that_is_made_up_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "patch"
    gp.delta.save_patch(path, made_up([5], torch.ones(1)))
    with pytest.raises(PolicyError, match="is there already"):
        gp.delta.save_patch(path, made_up([5], torch.ones(1)))
    raw = path.read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    tensors = {**load_file(path), **{key: each for key, each in change.items() if isinstance(each, Tensor)}}
    del metadata["checksum"]
    metadata |= {key: each for key, each in change.items() if isinstance(each, str)}
    save_file(tensors, path, {"checksum": _checksum(tensors, metadata), **metadata})
    with pytest.raises(PolicyError, match=message):
        gp.delta.load_patch(path)


# ---- inference engines


def stepped(dtype: torch.dtype = torch.bfloat16) -> tuple[State, nn.Module, gp.delta.Patch]:
    """Weights before a step, the model after it, and the patch."""
    model = network(dtype)
    before = state(model)
    with gp.training(model, torch.optim.AdamW(model.parameters(), lr=0.1), entries()) as optimizer:
        backward(model)
        optimizer.step()
        return before, model, gp.delta.patch(optimizer, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_gets_the_new_weights_by_its_own_rules(dtype: torch.dtype) -> None:
    before, model, patch = stepped(dtype)
    for name, indices, values, full_shape in gp.delta.to_vllm(patch):
        assert (indices.dtype, indices.dim(), values.dim()) == (torch.int32, 1, 1)
        assert len(indices.unique()) == len(values)
        # vLLM: a tensor of NaN with the new values, of which NaN leaves an entry.
        new = torch.full((torch.Size(full_shape).numel(),), torch.nan, dtype=values.dtype)
        new.index_copy_(0, indices.long(), values)
        new = new.view(full_shape)
        before[name] = torch.where(new.isnan(), before[name], new)
    before["3.weight"] = before["0.weight"]
    assert same_bits(before, state(model))
    for wrong in (torch.tensor([torch.nan, 1.0]), torch.tensor([1, 2])):
        with pytest.raises(PolicyError, match="w has NaN or"):
            gp.delta.to_vllm(made_up([0, 1], wrong))


def pull(checkpoint: State, folder: Path, applied: int) -> None:
    """What SGLang does with a version directory, from the description of its format."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    about = index["metadata"]
    assert folder.name == f"weight_v{about['version']}"
    assert (int(about["base_version"]), int(about["version"])) == (applied, applied + 1)
    assert (about["delta_encoding"], about["compression_format"]) == ("overwrite", "zstd")
    assert about["checksum_format"] == "adler32"
    for file in set(index["weight_map"].values()):
        raw = (folder / file).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        checksums = header.pop("__metadata__")
        assert header.keys() == {name for name, own in index["weight_map"].items() if own == file}
        for name, about in header.items():
            begin, end = (8 + size + offset for offset in about["data_offsets"])
            content = zstandard.ZstdDecompressor().decompress(raw[begin:end])
            count = int.from_bytes(content[:4], "little")
            region = bytearray(checkpoint[name].view(torch.uint8).numpy().tobytes())
            for number in range(count):
                place = int.from_bytes(content[4 + 4 * number : 8 + 4 * number], "little")
                region[place] = content[4 + 4 * count + number]
            assert len(content) == 4 + 5 * count
            assert f"{zlib.adler32(region):08x}" == checksums[name]
            new = torch.frombuffer(region, dtype=checkpoint[name].dtype)
            checkpoint[name] = new.view(checkpoint[name].shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sglang_gets_the_new_weights_by_its_own_rules(dtype: torch.dtype, tmp_path: Path) -> None:
    before, model, patch = stepped(dtype)
    with torch.no_grad():
        model[1].bias[0] = torch.nan
    patch["1.bias"] = torch.arange(8, dtype=torch.int32), model[1].bias.detach()
    patch.shapes["1.bias"] = (8,)
    pull(before, gp.delta.to_sglang(patch, model, tmp_path, version=7), applied=6)
    pull(before, gp.delta.to_sglang(gp.delta.Patch({}, {}), model, tmp_path, version=8), applied=7)
    before["3.weight"] = before["0.weight"]
    assert same_bits(before, state(model))
    for version, message in ((7, "weight_v000007 is there already"), (0, "version: expected an integer")):
        with pytest.raises(PolicyError, match=message):
            gp.delta.to_sglang(patch, model, tmp_path, version=version)
    with pytest.raises(PolicyError, match="w is not in the model"):
        gp.delta.to_sglang(made_up([0], torch.ones(1)), model, tmp_path, version=9)
