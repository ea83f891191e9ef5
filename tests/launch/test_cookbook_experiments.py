"""The experiments of the cookbook by YAML: a short run of each, with its policy and without."""

import pytest

SHORT = (
    "trainer.accelerator=cpu",
    "logger=csv",
    "callbacks=model_checkpoint",
    "extras.plan=false",
)


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
    train, experiment: str, epochs: int, metric: str, gain: float
) -> None:
    words = (f"experiment={experiment}", *SHORT, f"trainer.max_epochs={epochs}")
    declared, without = train(*words, quick=False), train(*words, "policy=none", quick=False)
    assert (declared.code, without.code) == (0, 0), declared.err + without.err
    assert declared.result.metrics[metric] > without.result.metrics[metric] + gain


@pytest.mark.slow
def test_byol_learns_features_from_its_own_copy(train) -> None:
    ended = train("experiment=byol", *SHORT, "trainer.max_epochs=8", quick=False)
    assert ended.code == 0, ended.err
    assert ended.result.metrics["test/probe_accuracy"] > 0.6
    assert ended.result.metrics["test/spread"] > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("spiking", "ops gt in modules model.neurons"),
        ("binary", "ops sign"),
        ("byol", "output of modules model.target"),
        ("domain_adversarial", "input of modules model.domain"),
    ],
)
def test_two_steps_touch_what_the_policy_says(train, experiment: str, words: str) -> None:
    ended = train(f"experiment={experiment}", "callbacks=model_checkpoint")
    assert ended.code == 0, ended.err
    assert "".join(words.split())[:20] in "".join(ended.out.split()).replace("│", "")
