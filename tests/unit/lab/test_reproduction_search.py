"""Experiments as they are written down, and the choice of step sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afl.config import config_from_text
from afl.errors import ConfigError
from afl_reproduction.condensed import Point, plain_config
from afl_reproduction.experiment import Grid, Steps, load_experiment, shipped_experiments
from afl_reproduction.search import score_of, trial_jobs
from afl_reproduction.search_log import SearchLog, Trial, search_table

GRID = Grid(eta_w=[0.1, 0.2], eta_q=[0.01, 0.1])


def trial(method: str, steps: Steps, score: float | None, part: str = "main") -> Trial:
    return Trial(part, method, steps, score, "ok" if score else "diverged", 1.0, [(10, 0.5)], {})


def test_the_best_trial_of_the_grid_is_chosen(tmp_path: Path) -> None:
    log = SearchLog(tmp_path / "search.jsonl")
    for found in (
        trial("sgda", Steps(0.1, 0.01), 0.5),
        trial("sgda", Steps(0.2, 0.1), 0.7),
        trial("sgda", Steps(0.2, 0.01), 0.7),
        trial("sgda", Steps(0.1, 0.1), None),
        # Neither another part, nor another method, nor what the grid does not hold counts.
        trial("sgda", Steps(0.1, 0.01), 0.9, part="other"),
        trial("drfa", Steps(0.1, 0.01), 0.9),
        trial("sgda", Steps(0.4, 0.1), 0.9),
        trial("fedavg", Steps(0.3), 0.4),
        trial("fedavg", Steps(0.1), 0.4),
        trial("afl-br", Steps(0.1, 0.1), None),
    ):
        log.add(found)
    again = SearchLog(tmp_path / "search.jsonl")
    assert len(again.trials) == 10
    assert again.choice("main", "sgda", GRID) == Steps(0.2, 0.01)
    assert again.choice("main", "drfa", GRID) == Steps(0.1, 0.01)
    assert again.choice("main", "fedavg", Grid(eta_w=[0.3, 0.1])) == Steps(0.1)
    assert again.choice("main", "afl-br", GRID) is None
    assert again.choice("main", "afl-com", GRID) is None


def test_the_table_of_a_search(tmp_path: Path) -> None:
    grids = "a: {eta_w: [0.1, 0.2, 0.4]}, b: {eta_w: [0.1], eta_q: [0.01, 0.1, 1.0]}"
    experiment = load_experiment(str(write(tmp_path, HEAD + searching(grids))))
    log = SearchLog(tmp_path / "search.jsonl")
    assert search_table(experiment, "p", log) == ""
    for found in (
        trial("a", Steps(0.1), 0.50, part="p"),
        trial("a", Steps(0.2), 0.51, part="p"),
        trial("a", Steps(0.4), None, part="p"),
        trial("a", Steps(0.8), 0.9, part="p"),
        trial("b", Steps(0.1, 0.01), 0.3, part="p"),
        trial("b", Steps(0.1, 1.0), 0.6, part="p"),
    ):
        log.add(found)
    assert search_table(experiment, "p", log).splitlines()[2:] == [
        "| A | 3 | 1 | 0.2 | - | 0.510 | w0.1 | - |",
        "| B | 2 | 0 | 0.1 | 1 | 0.600 | - | eta_q |",
    ]


def test_any_key_is_searched_with_the_step_sizes(tmp_path: Path) -> None:
    grids = "a: {eta_w: [0.1], eta_q: [0.1, 0.3], set: {task.options.kind: [x], "
    grids += "algorithm.dual.share: [0.2, 0.4]}}, "
    grids += "b: {eta_w: [0.1], set: {algorithm.block: [2, 3], algorithm.local_steps: [1, 4]}}"
    experiment = load_experiment(str(write(tmp_path, HEAD + searching(grids))))
    search = experiment.parts["p"].search
    assert search is not None
    trials = search.grids["a"].trials
    assert [str(steps) for steps in trials] == [
        f"w0.1-q{eta_q}-kind=x-share={share}" for eta_q in (0.1, 0.3) for share in (0.2, 0.4)
    ]
    given = [*trials[3].overrides, "algorithm.dual.name=cvar"]
    found = config_from_text("workers: 3\ntask: {name: n}\nalgorithm: {name: afl-br, rounds: 9}", "c", given)
    assert found.task.options == {"kind": "x"}
    assert (found.algorithm.eta_q, found.algorithm.dual_choice.options) == (0.3, {"share": 0.4})
    log = SearchLog(tmp_path / "search.jsonl")
    for steps, score in zip(trials, (0.3, 0.7, 0.7, 0.69), strict=True):
        log.add(trial("a", steps, score, part="p"))
    log.add(trial("b", search.grids["b"].trials[1], 0.2, part="p"))
    again = SearchLog(tmp_path / "search.jsonl")
    assert [each.steps for each in again.trials[:4]] == trials
    assert again.choice("p", "a", search.grids["a"]) == trials[1]
    head, _, *rows = search_table(experiment, "p", again).splitlines()
    assert head.startswith("| method | trials | diverged | eta_w | eta_q | other settings | score | within")
    near = "w0.1-q0.3-kind=x-share=0.2, w0.1-q0.3-kind=x-share=0.4"
    assert rows == [
        f"| A | 4 | 0 | 0.1 | 0.1 | kind=x, share=0.4 | 0.700 | {near} | eta_q, share |",
        "| B | 1 | 0 | 0.1 | - | block=2, local_steps=4 | 0.200 | - | block, local_steps |",
    ]


def test_a_trial_of_another_key_is_another_trial_and_a_method_may_set_keys(tmp_path: Path) -> None:
    algorithm = "{name: afl-br, rounds: 9, eta_w: 0.1, eta_q: 0.1}"
    (tmp_path / "a.yaml").write_text(f"workers: 2\ntask: {{name: synthetic}}\nalgorithm: {algorithm}\n")
    grids = "a: {eta_w: [0.1], set: {algorithm.block: [2, 3]}}, "
    grids += "b: {eta_w: [0.1], set: {algorithm.dual.share: [0.6, 1]}}"
    cvar = 'b: {label: B, config: a.yaml, set: ["algorithm.dual={name: cvar, share: 0.5}"]}'
    head = HEAD.replace("b: {label: B, config: b.yaml}", cvar)
    experiment = load_experiment(str(write(tmp_path, head + searching(grids))))
    log, jobs = SearchLog(tmp_path / "search.jsonl"), trial_jobs(experiment, "p", [], tmp_path)
    assert [job.config.algorithm.block for _, _, job in jobs] == [2, 3, 3, 3]
    assert [job.config.algorithm.dual_section.get("share") for _, _, job in jobs] == [None, None, 0.6, 1]
    assert len({job.directory for _, _, job in jobs}) == 4
    method, steps, job = jobs[0]
    log.add(Trial("p", method, steps, 0.5, "ok", 1.0, [], plain_config(job.config)))
    made = [log.holds("p", method, steps, job.config) for method, steps, job in jobs]
    assert made == [True, False, False, False]


def test_a_damaged_log_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    SearchLog(path).add(trial("sgda", Steps(0.1, 0.01), 0.5))
    with path.open("a") as file:
        file.write('{"part": "main"}\n')
    with pytest.raises(ConfigError, match=r"search\.jsonl:2 is no trial"):
        SearchLog(path)


def test_the_score_is_the_second_halfs_mean() -> None:
    points = [
        Point(n, n, accuracy, 0, 0, 0, 0, 0) for n, accuracy in ((25, 0.9), (50, 0.8), (75, 0.2), (100, 0.4))
    ]
    assert score_of(points, 100) == pytest.approx(0.3)
    losses = [Point(n, n, 0, loss, 0, 0, 0, 0) for n, loss in ((50, 9.0), (75, 2.0), (100, 1.0))]
    assert score_of(losses, 100, "max_loss") == pytest.approx(-1.5)


@pytest.mark.parametrize("name", shipped_experiments())
def test_a_shipped_experiment_is_whole_and_fair(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    for method in experiment.methods:
        config = experiment.config(method, [])
        assert config.run.seed is None
        assert config.task.options["data_seed"] == 0
        if config.algorithm.name in {"drfa", "fedavg"}:
            assert config.algorithm.local_steps == 3
        if method == "kl":
            assert config.algorithm.block_length == config.algorithm.rounds, "no restart"
        elif config.algorithm.name in {"afl-br", "afl-com"}:
            # ceil(sqrt T), also where a search has fewer rounds.
            assert config.algorithm.block_length == -int(-(config.algorithm.rounds**0.5) // 1)
    for part, own in experiment.parts.items():
        seeds, finals = own.seeds, experiment.variants(part)
        assert len(set(seeds)) == len(seeds) > 0
        for variant in finals.values():
            experiment.config(variant.method, [*own.set, *variant.set])
        if own.search is None:
            continue
        counts: dict[str, int] = {}
        for method, _, job in trial_jobs(experiment, part, [], tmp_path):
            counts[method] = counts.get(method, 0) + 1
            assert job.config.task.options["evaluate_on"] == "validation"
            assert job.config.run.seed not in seeds
            rounds = own.search.rounds or experiment.config(method, own.set).algorithm.rounds
            assert job.config.algorithm.rounds == rounds
        assert counts.keys() == {variant.method for variant in finals.values()}
        assert len(set(counts.values())) == 1, f"{part}: unequal budgets {counts}"
        for grid in own.search.grids.values():
            assert len(set(grid.trials)) == len(grid.trials)


@pytest.mark.parametrize(
    ("given", "overrides", "block"),
    [
        ({}, [], 20),
        ({}, ["algorithm.rounds=900"], 30),
        ({"rounds": 100}, [], 10),
        ({"block": 7}, [], 7),
        ({"block": "auto"}, [], 20),
    ],
)
def test_a_trial_restarts_the_dual_weights_as_often_as_the_final_run(
    given: dict[str, object], overrides: list[str], block: int, tmp_path: Path
) -> None:
    grids = "a: {eta_w: [0.1], eta_q: [0.1]}, b: {eta_w: [0.1], eta_q: [0.1]}"
    experiment = load_experiment(str(write(tmp_path, HEAD + searching(grids))))
    for method, name, own in (("a", "afl-br", given), ("b", "sgda", {})):
        algorithm = {"name": name, "rounds": 400, "eta_w": 0.1, "eta_q": 0.1, **own}
        config = {"workers": 2, "task": {"name": "synthetic"}, "algorithm": algorithm}
        (tmp_path / f"{method}.yaml").write_text(json.dumps(config))
    trials = {
        method: job.config.algorithm for method, _, job in trial_jobs(experiment, "p", overrides, tmp_path)
    }
    assert {algorithm.rounds for algorithm in trials.values()} == {5}
    assert trials["a"].block == block
    # Projected ascent never restarts, and takes no B.
    assert trials["b"].block is None


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_the_papers_methods(name: str) -> None:
    experiment = load_experiment(name)
    configs = {method: experiment.config(method, []) for method in experiment.methods}
    assert list(configs) == ["afl-br", "afl-com-top-k", "afl-com-rand-k", "sgda", "drfa", "fedavg"]
    assert {config.workers for config in configs.values()} == {10}
    assert len({json.dumps(plain_config(config)["task"]) for config in configs.values()}) == 1
    for method, share in (("top-k", 0.3), ("rand-k", 0.1)):
        algorithm = configs[f"afl-com-{method}"].algorithm
        for compressor in (algorithm.uplink_compressor, algorithm.downlink_compressor):
            assert (compressor.name, compressor.options) == (method, {"ratio": share})
    assert experiment.parts["main"].seeds[:3] == [1, 2, 3]


def test_integers_are_apart_from_the_papers_methods_and_have_rand_k_s_steps() -> None:
    experiment = load_experiment("fashion-mnist")
    part = experiment.parts["integers"]
    variants = experiment.variants("integers")
    assert {variant.method for variant in variants.values()} == {"afl-com-rand-k"}
    assert (part.search, part.steps, part.seeds) == (None, "main", experiment.parts["main"].seeds)
    config = experiment.config("afl-com-rand-k", variants["bits-8"].set).algorithm
    assert config.uplink_compressor.options == {"ratio": 0.1, "bits": 8}
    assert config.downlink_compressor == config.uplink_compressor


def write(folder: Path, document: str) -> Path:
    (folder / "experiment.yaml").write_text(document)
    return folder


HEAD = "title: T\nmethods: {a: {label: A, config: a.yaml}, b: {label: B, config: b.yaml}}\nparts:\n"

SEARCH = "  p: {title: P, seeds: [1], search: {seed: SEED, rounds: 5, every: 1, grids: {GRIDS}}}"


def searching(grids: str, seed: int = 2) -> str:
    return SEARCH.replace("SEED", str(seed)).replace("GRIDS", grids)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("  p: {title: P, seeds: [1], methods: [c]}", "parts.p: no method c"),
        ("  p: {title: P, seeds: [1], step: q}", "parts.p.step: Extra inputs"),
        ("  p: {title: P, seeds: [1], steps: q}", "parts.p.steps: q is no part with a search"),
        (searching("a: {eta_w: [1.0]}, b: {eta_w: [1.0]}", seed=1), "1 is a final run's too"),
        (searching("a: {eta_w: [1.0]}"), "one each is needed for a, b"),
        (searching("a: {eta_w: [1.0, 2.0]}, b: {eta_w: [1.0]}"), "as many trials as the others"),
        (searching("a: {eta_w: [0.0]}, b: {eta_w: [1.0]}"), "greater than 0"),
    ],
)
def test_a_wrong_experiment_is_explained(parts: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(str(write(tmp_path, HEAD + parts)))
    assert message in str(caught.value)


def test_an_experiment_that_is_not_there(tmp_path: Path) -> None:
    shipped = "cifar10, dual-rules, fashion-mnist, many-workers, scaling"
    with pytest.raises(ConfigError, match=f"neither one of {shipped} nor a folder"):
        load_experiment(str(tmp_path / "none"))
