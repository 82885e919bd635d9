from __future__ import annotations

from pathlib import Path

import pytest

from afl.errors import ConfigError
from afl.optional_dependencies import require
from afl.tasks import Task
from afl.tasks.cifar10 import Cifar10
from afl.tasks.digits import Digits
from afl.tasks.fashion_mnist import FashionMnist, FashionMnistOptions
from afl.tasks.femnist import Femnist
from afl.tasks.synthetic import Synthetic


@pytest.mark.parametrize("task", [Cifar10, Digits, FashionMnist, Femnist])
def test_an_unknown_option_is_refused_with_the_nearest_right_name(task: type[Task]) -> None:
    with pytest.raises(ConfigError) as caught:
        task(partiton="iid")  # type: ignore[call-arg]
    assert str(caught.value) == "task.options.partiton: unknown option; did you mean partition?"


def test_an_unknown_option_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"zzz: unknown option; known: centres, dim, examples, noise_q, noise_w, scale"
    ):
        Synthetic(zzz=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"partition": "by-writer"},
            r"partition: 'by-writer' is not accepted: .*'label-skew', 'dirichlet' or 'iid'",
        ),
        ({"alpha": 0}, r"alpha: 0 is not accepted: .*greater than 0"),
        ({"alpha": float("nan")}, r"alpha: nan is not accepted: .*finite"),
        ({"hidden": [256, -1]}, r"task\.options\.hidden\.1: -1 is not accepted: .*greater than 0 \(widths"),
        ({"pool": "x" * 100}, r"pool: 'x+\.\.\. is not accepted"),
        ({"alpha": "much", "download": 7}, r"alpha: 'much' .*number.*\n.*download: 7 is not accepted"),
    ],
)
def test_a_wrong_value_says_what_would_be_accepted(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FashionMnist(**options)


def test_every_option_is_described_and_the_values_are_typed() -> None:
    for task in (Cifar10, Digits, FashionMnist, Femnist, Synthetic):
        schema = type(task().options)
        assert all(field.description for field in schema.model_fields.values())
    assert FashionMnist(hidden=[32], alpha=1).options.hidden == (32,)


def test_the_data_directory_is_the_option_else_the_variable_else_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert FashionMnistOptions().folder() == Path("data")
    monkeypatch.setenv("AFL_DATA", "/somewhere")
    assert FashionMnistOptions().folder() == Path("/somewhere")
    assert FashionMnistOptions(data_dir=Path("~/else")).folder() == Path.home() / "else"


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"no_such_package is needed to dance: pip install 'afl\[tasks\]'"):
        require("no_such_package.part", "dance")
