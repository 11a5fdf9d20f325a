"""The options of the demo's runs: who gives which, and how many tokens they make."""

import pytest

from vocagnolm.demo.methods import METHODS, check_options, flags_of, tokens_of


@pytest.mark.parametrize(
    "option",
    [
        "aggregation=share",
        "batch=1",
        "config=demo",
        "dataset=d",
        "max_steps",
        "max_steps=-1",
        "method=random",
        "model_name_or_path=s",
        "output_dir=d",
        "seed=3",
        "student=s",
        "teacher=t",
        "teacher_losses=s",
    ],
)
def test_option_is_refused_when_the_demo_gives_it_or_no_run_takes_it(option: str) -> None:
    with pytest.raises(ValueError, match=f"options.*{option.partition('=')[0]}"):
        check_options(["cpt", "share"], ["top_k=0.3", option])


def test_option_is_checked_with_every_method() -> None:
    check_options(["vocagnolm", "cpt"], ["aggregation=mean", "max-steps=3", "lr=0.1"])
    check_options(["vocagnolm"], ["teacher_revision=main"])
    with pytest.raises(ValueError, match="teacher_revision"):
        check_options(["vocagnolm", "cpt"], ["teacher_revision=main"])


def test_flags_have_the_options_of_the_user_and_of_the_method() -> None:
    assert flags_of("random", 3, ["lr=0.1"]) == ["--seed=3", "--lr=0.1", "--method=random"]
    for method in METHODS:
        flags = flags_of(method, 3, [])
        has_teacher = any(flag.startswith("--teacher=") for flag in flags)
        assert has_teacher == (method not in ("cpt", "random"))


def test_tokens_are_those_of_the_recipe_unless_options_say_otherwise() -> None:
    assert tokens_of(["--method=cpt"]) == 650 * 512
    assert tokens_of(["--method=cpt", "--max-steps=3", "--global_batch_tokens=1024"]) == 3 * 1024
