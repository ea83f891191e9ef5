"""VQ-VAE and SimSiam by YAML, with their models untouched: a short run of each, with and without a policy."""

import pytest

EPOCHS = (
    "trainer.max_epochs=4",
    "trainer.accelerator=cpu",
    "logger=csv",
    "callbacks=model_checkpoint",
    "extras.plan=false",
)


@pytest.mark.slow
def test_a_vq_vae_uses_its_codebook_only_where_the_gradient_goes_through_it(train) -> None:
    declared = train("experiment=vq_vae", *EPOCHS, quick=False)
    without = train("experiment=vq_vae", *EPOCHS, "~policy.codes", quick=False)
    assert (declared.code, without.code) == (0, 0), declared.err + without.err
    ours, plain = declared.result.metrics, without.result.metrics
    assert ours["test/reconstruction"] < 0.6 * plain["test/reconstruction"]
    assert ours["test/perplexity"] > 3 > plain["test/perplexity"]


@pytest.mark.slow
def test_simsiam_collapses_only_without_the_stop_on_its_target(train) -> None:
    longer = (*EPOCHS, "trainer.max_epochs=10")
    declared = train("experiment=simsiam", *longer, quick=False)
    without = train("experiment=simsiam", *longer, "~policy.target", quick=False)
    assert (declared.code, without.code) == (0, 0), declared.err + without.err
    assert declared.result.metrics["test/spread"] > 3 * without.result.metrics["test/spread"]


@pytest.mark.parametrize("name", ["vq_vae", "simsiam"])
def test_two_steps_of_each_touch_what_the_policies_say(train, name: str) -> None:
    ended = train(f"experiment={name}", "callbacks=model_checkpoint")
    assert ended.code == 0, ended.err
    plan = ended.out
    expected = {
        "vq_vae": ["modules model.quantizer, from output codes to input", "argument 'target' of modules"],
        "simsiam": ["argument 'z' of modules", "input of modules model.probe"],
    }[name]
    squeezed = "".join(plan.split()).replace("│", "")
    for words in expected:
        assert "".join(words.split())[:20] in squeezed
