"""What ``python -m afl_reproduction`` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afl.errors import ConfigError, ExitCode
from afl_lab.simulation.command import shown_progress
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import News, Outcome, run_here
from afl_reproduction.condensed import CondensedRun, is_same, read_run, run_file
from afl_reproduction.condensing import condense
from afl_reproduction.experiment import Experiment, Steps, load_experiment
from afl_reproduction.folders import check_folder
from afl_reproduction.search import trial_jobs, trial_of
from afl_reproduction.search_log import LOG_FILE, SearchLog


def execute(options: argparse.Namespace) -> ExitCode:
    """Search, run and draw what is missing."""
    experiment = load_experiment(options.experiment)
    results = options.results / experiment.name
    unknown = sorted(set(options.parts) - experiment.parts.keys())
    if unknown:
        raise ConfigError(
            f"no part {', '.join(unknown)}; {experiment.name} has {', '.join(experiment.parts)}"
        )
    parts = options.parts or list(experiment.parts)
    out = options.out / experiment.name
    check_folder("--results", results)
    check_folder("--out", out)
    log = SearchLog(results / LOG_FILE)
    failed: list[Outcome] = []
    for part in parts:
        if experiment.parts[part].search is not None and not options.skip_search:
            trials = trial_jobs(experiment, part, options.set, out)
            failed += _search(experiment, part, trials, log, options.jobs)
            if failed:
                break
        if not options.search_only:
            steps = {} if options.skip_search else chosen_steps(experiment, part, log)
            jobs = _final_jobs(experiment, part, steps, overrides=options.set, seeds=options.seeds, out=out)
            failed += _run(experiment, part, jobs, results, options.jobs)
    if not options.search_only and not failed:
        from afl_reproduction.drawing import draw  # noqa: PLC0415  # matplotlib is an extra

        draw(experiment, results)
    for outcome in failed:
        print(f"python -m afl_reproduction: {outcome.job.name}: {outcome.error}", file=sys.stderr)
    return failed[0].code if failed else ExitCode.OK


def _simulate(
    jobs: Sequence[Job], processes: int, record: Callable[[Job, Mapping[str, Any]], None]
) -> list[Outcome]:
    """Run them, and record each that has ended whole before it is shown as done; what failed."""
    if not jobs:
        return []
    with shown_progress(jobs) as show:

        def watch(job: Job, news: News) -> None:
            if isinstance(news, Outcome) and news.summary is not None:
                record(job, news.summary)
            show(job, news)

        outcomes = run_here(jobs, min(processes, len(jobs)), watch)
    return [outcome for outcome in outcomes if outcome.summary is None]


def _search(
    experiment: Experiment,
    part: str,
    trials: Sequence[tuple[str, Steps, Job]],
    log: SearchLog,
    processes: int,
) -> list[Outcome]:
    search = experiment.parts[part].search
    assert search is not None
    tried = {job.name: (method, steps) for method, steps, job in trials}
    todo = [job for method, steps, job in trials if not log.holds(part, method, steps, job.config)]
    print(f"{part}: {len(todo)} of {len(trials)} trials to make", flush=True)

    def record(job: Job, summary: Mapping[str, Any]) -> None:
        log.add(trial_of(part, *tried[job.name], job, summary, score=search.score))

    return _simulate(todo, processes, record)


def chosen_steps(experiment: Experiment, part: str, log: SearchLog) -> dict[str, Steps]:
    """The step sizes of each method; empty for a part that takes those of the configurations."""
    own = experiment.parts[part]
    source = part if own.search is not None else own.steps
    if source is None:
        return {}
    search = experiment.parts[source].search
    assert search is not None
    chosen = {}
    for method in sorted({variant.method for variant in experiment.variants(part).values()}):
        steps = log.choice(source, method, search.grids[method])
        if steps is None:
            raise ConfigError(
                f"no trial of {method} in {source} has ended well; run that part's search first"
            )
        chosen[method] = steps
    return chosen


def _final_jobs(
    experiment: Experiment,
    part: str,
    steps: Mapping[str, Steps],
    *,
    overrides: Sequence[str],
    seeds: Sequence[int],
    out: Path,
) -> list[tuple[str, Job]]:
    """The runs of a part, each with its name among the part's; seed by seed, so that all methods grow."""
    own = experiment.parts[part]
    jobs = []
    for seed in seeds or own.seeds:
        for name, variant in experiment.variants(part).items():
            found = steps.get(variant.method)
            config = experiment.config(
                variant.method, [*own.set, *(found.overrides if found else []), *variant.set, *overrides]
            ).with_seed(seed)
            directory = out / "runs" / part / name / f"seed-{seed}"
            jobs.append((name, Job(f"{part}/{name}, seed {seed}", config, directory, saves_models=False)))
    return jobs


def _run(
    experiment: Experiment, part: str, jobs: Sequence[tuple[str, Job]], results: Path, processes: int
) -> list[Outcome]:
    variants = experiment.variants(part)
    names = {job.name: name for name, job in jobs}

    def path_of(job: Job) -> Path:
        assert job.config.run.seed is not None
        return run_file(results, part, names[job.name], job.config.run.seed)

    def record(job: Job, _: Mapping[str, Any]) -> None:
        name = names[job.name]
        condense(
            job.directory,
            job.config,
            experiment=experiment.name,
            part=part,
            run=name,
            label=variants[name].label,
            seed=job.config.run.seed,
        ).write(path_of(job))

    def is_done(job: Job) -> bool:
        path = path_of(job)
        if not path.exists():
            twin = _stored_elsewhere(results, job)
            if twin is None:
                return False
            name = names[job.name]
            about = {**twin.about, "part": part, "run": name, "label": variants[name].label}
            CondensedRun(about, twin.points).write(path)
        if not is_same(read_run(path).about["config"], job.config):
            raise ConfigError(
                f"{path} holds a run of another configuration; name another folder with --results, "
                "or delete it"
            )
        return True

    todo = [job for _, job in jobs if not is_done(job)]
    print(f"{part}: {len(todo)} of {len(jobs)} runs to make", flush=True)
    return _simulate(todo, processes, record)


def _stored_elsewhere(results: Path, job: Job) -> CondensedRun | None:
    """A run of the same configuration and seed in any part, which would only be repeated."""
    for path in sorted((results / "runs").glob(f"*/*-seed-{job.config.run.seed}.jsonl")):
        found = read_run(path)
        if is_same(found.about["config"], job.config):
            return found
    return None
