"""Frozen attention and norms equal detaching by hand, and what they do not meet is named."""

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import gradpolicy as gp
from gradpolicy.app.build import build_all
from gradpolicy.policies import Policy

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "gpt2": lambda kind: GPT2Model(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, attn_implementation=kind)
    ),
    "bert": lambda kind: BertModel(BertConfig(**SIZES, vocab_size=20, attn_implementation=kind)),
    "llama": lambda kind: LlamaModel(
        LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=20, attn_implementation=kind)
    ),
}
PRESETS = {
    "attention": gp.presets.FrozenAttention,
    "norms": gp.presets.FrozenNorms,
}
CHOICES = [("attention",), ("norms",), ("attention", "norms")]


def model_of(name, kind="eager"):
    torch.manual_seed(0)
    model = MODELS[name](kind).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights as they are made attend almost uniformly.
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    return model


def detached_by_hand(patch, chosen):
    """Replace torch's functions by ones whose attention weights or scales are detached."""
    attend, softmax, rsqrt = F.scaled_dot_product_attention, F.softmax, torch.rsqrt

    def layer_norm(input, shape, weight=None, bias=None, eps=1e-5):
        deviation = (input.var(-1, unbiased=False, keepdim=True) + eps).sqrt().detach()
        return (input - input.mean(-1, keepdim=True)) / deviation * weight + bias

    if "attention" in chosen:
        patch.setattr(F, "softmax", lambda *args, **kwargs: softmax(*args, **kwargs).detach())
        attend_by = lambda q, k, v, *args, **kwargs: attend(q.detach(), k.detach(), v, *args, **kwargs)  # noqa: E731
        patch.setattr(F, "scaled_dot_product_attention", attend_by)
    if "norms" in chosen:
        patch.setattr(F, "layer_norm", layer_norm)
        patch.setattr(torch, "rsqrt", lambda x: rsqrt(x).detach())


def gradients(model, policies=None, strict=True):
    """The gradients of the inputs and of all parameters; zeros where there is none."""
    embedded = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [embedded.requires_grad_(), *model.parameters()]
    with gp.install(model, policies or {}, strict=strict and policies is not None):
        out = model(inputs_embeds=embedded).last_hidden_state
        found = torch.autograd.grad((out * out.detach().roll(1)).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


@pytest.mark.filterwarnings("ignore:the model never ran")
@pytest.mark.parametrize("chosen", CHOICES, ids="+".join)
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_detaching_by_hand(name, kind, chosen, monkeypatch):
    model = model_of(name, kind)
    plain = gradients(model)
    found = gradients(model, {key: each for part in chosen for key, each in PRESETS[part]().items()})
    detached_by_hand(monkeypatch, chosen)
    wanted = gradients(model)
    # Llama's softmax is in float32.
    close = {"rtol": 1e-5, "atol": 1e-6} if name == "llama" else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(found, wanted, **close)
    assert not torch.allclose(found[0], plain[0], rtol=1e-3)


@pytest.mark.parametrize("left", [None, *PRESETS])
@pytest.mark.parametrize("name", MODELS)
def test_without_mlps_no_curvature_is_left_only_if_both_are_frozen(name, left):
    model = model_of(name, "sdpa")
    mlps = {"gpt2": "h.?.mlp", "bert": "encoder.layer.?.intermediate", "llama": "layers.?.mlp"}
    policies = {"mlps": gp.Stop(modules=mlps[name], at="output")}
    policies |= {key: preset() for key, preset in PRESETS.items() if key != left}
    embedded = torch.randn(1, 5, 16, dtype=torch.float64).requires_grad_()
    with gp.install(model, policies), sdpa_kernel(SDPBackend.MATH):
        out = model(inputs_embeds=embedded).last_hidden_state
        (g,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), embedded, create_graph=True)
        second = [None]
        if g.requires_grad:
            second = torch.autograd.grad((g * torch.randn_like(g)).sum(), embedded, allow_unused=True)
    curvature = 0.0 if second[0] is None else second[0].norm() / g.norm()
    assert (curvature > 1e-3) if left else (curvature == 0)


# Norms written by hand; each divides by a positive function of x.
SCALES = {
    "rsqrt": lambda x: 1 / torch.rsqrt(x.square().mean(-1, keepdim=True)),
    "sqrt": lambda x: x.square().mean(-1, keepdim=True).sqrt(),
    "pow -0.5": lambda x: 1 / x.square().mean(-1, keepdim=True).pow(-0.5),
    "** 0.5": lambda x: x.var(-1, keepdim=True) ** 0.5,
    "std": lambda x: x.std(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
}


class WrittenNorm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", [*SCALES, "normalize", "rms_norm"])
def test_every_spelling_of_a_norm_has_a_constant_scale(name):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(4, dtype=torch.float64)
    functions = {
        "normalize": (lambda x: F.normalize(x, dim=-1), SCALES["norm"]),
        "rms_norm": (lambda x: F.rms_norm(x, (4,), eps=0.0), SCALES["sqrt"]),
        **{key: (lambda x, s=scale: x / s(x), scale) for key, scale in SCALES.items()},
    }
    function, scale = functions[name]
    with gp.install(model := WrittenNorm(function), gp.presets.FrozenNorms(), strict=True):
        (found,) = torch.autograd.grad((model(x) * weight).sum(), x)
    torch.testing.assert_close(found, weight / scale(x).detach())


def test_other_powers_keep_their_gradient():
    x = torch.rand(4, dtype=torch.float64, requires_grad=True)
    model = WrittenNorm(lambda x: x.pow(3) + 2**x + 0.5**x + x**-0.5)
    with gp.install(model, gp.presets.FrozenNorms(), strict=True):
        (found,) = torch.autograd.grad(model(x).sum(), x)
    (wanted,) = torch.autograd.grad((x.pow(3) + 2**x + 0.5**x).sum(), x)
    torch.testing.assert_close(found, wanted)


class KernelAttention(nn.Module):
    def forward(self, x):
        weights = (x @ x.mT).exp()
        return weights / weights.sum(-1, keepdim=True) @ x


class TorchAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:policy .* cannot see into")
@pytest.mark.parametrize(
    ("preset", "parts", "message"),
    [
        ("attention", [Attention(), KernelAttention()], "none of the operations ran in module '1'"),
        ("attention", [Attention(), TorchAttention(4, 1)], "cannot see into multi_head_attention_forward"),
        ("attention", [nn.Linear(4, 4)], "were never met"),
        ("norms", [nn.LayerNorm(4), nn.GroupNorm(1, 3)], "cannot see into group_norm"),
        ("norms", [nn.LayerNorm(4), nn.BatchNorm1d(3)], "cannot see into batch_norm"),
        ("norms", [nn.LayerNorm(4), nn.LocalResponseNorm(2)], "ran in module '1'"),
    ],
)
def test_what_is_not_met_is_named_and_raises_under_strict(preset, parts, message):
    model, x = nn.Sequential(*parts), torch.randn(2, 3, 4, requires_grad=True)
    with pytest.raises(gp.PolicyError, match=message), gp.install(model, PRESETS[preset](), strict=True):
        model(x).sum().backward()
    if len(parts) > 1:
        with gp.install(model, PRESETS[preset]()) as installed:
            model(x).sum().backward()
        assert message.split("'")[0] in " ".join(str(installed.report()).split())
        with gp.install(model, PRESETS[preset](modules=["*", "!1"]), strict=True):
            model(x).sum().backward()


def test_presets_are_policies_wherever_policies_are_taken():
    both = [gp.presets.FrozenAttention(), gp.presets.FrozenNorms()]
    model = nn.Sequential(Attention(), nn.LayerNorm(4))
    x = torch.randn(1, 3, 4)
    with gp.install(model, both) as installed:
        assert list(installed.policies) == ["frozenattention", "frozennorms"]
        model(x.requires_grad_()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    with gp.training(model, optimizer, both) as optimizer:
        model(x).sum().backward()
        optimizer.step()
    named = {"attention": gp.presets.FrozenAttention(when={"start": 3}), "slow": gp.Scale(0.1, modules="1")}
    assert list(gp.GradientPolicies(named).policies) == ["attention", "slow"]
    assert gp.GradientPolicies(gp.presets.FrozenNorms()).policies.keys() == {"frozen_norms"}
    node = {"_target_": "gradpolicy.presets.FrozenNorms", "modules": "layers.*"}
    assert list(instantiate(node)) == ["frozen_norms"]
    built = build_all({"norms": node}, "policy", Policy)
    assert list(gp.GradientPolicies(built).policies) == ["norms"]
    with pytest.raises(gp.PolicyError, match="takes no argument 'module'; did you mean 'modules'"):
        gp.presets.FrozenNorms(module="a")
