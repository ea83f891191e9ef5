"""The experiments of the cookbook by YAML: a short run of each, with its policy and without."""

import pytest

SHORT = ("trainer.accelerator=cpu", "logger=csv", "callbacks=model_checkpoint", "extras.plan=false")


@pytest.fixture
def metrics_of(train):
    """Trains under an experiment, and gives its metrics."""

    def run(experiment: str, epochs: int, *overrides: str) -> dict[str, float]:
        ended = train(
            f"experiment={experiment}", *SHORT, f"trainer.max_epochs={epochs}", *overrides, quick=False
        ).completed
        return ended.result.metrics

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "epochs", "metric", "gain"),
    [
        ("spiking", 8, "test/accuracy", 0.1),
        ("binary", 3, "test/accuracy", 0.3),
        ("domain_adversarial", 20, "test/target_accuracy", 0.2),
    ],
)
def test_the_policy_is_what_makes_it_learn(
    metrics_of, experiment: str, epochs: int, metric: str, gain: float
) -> None:
    declared, without = metrics_of(experiment, epochs), metrics_of(experiment, epochs, "policy=none")
    assert declared[metric] > without[metric] + gain


@pytest.mark.slow
def test_byol_learns_features_from_its_own_copy(metrics_of) -> None:
    metrics = metrics_of("byol", 8)
    assert metrics["test/probe_accuracy"] > 0.6
    assert metrics["test/spread"] > 0.3


@pytest.mark.slow
def test_a_vq_vae_uses_its_codebook_only_where_the_gradient_goes_through_it(metrics_of) -> None:
    ours, plain = metrics_of("vq_vae", 4), metrics_of("vq_vae", 4, "~policy.codes")
    assert ours["test/reconstruction"] < 0.6 * plain["test/reconstruction"]
    assert ours["test/perplexity"] > 3 > plain["test/perplexity"]


@pytest.mark.slow
def test_simsiam_collapses_only_without_the_stop_on_its_target(metrics_of) -> None:
    declared, without = metrics_of("simsiam", 10), metrics_of("simsiam", 10, "~policy.target")
    assert declared["test/spread"] > 3 * without["test/spread"]
