"""``afl export``: one of a run's models, with a card, in a folder that can be given away."""

from __future__ import annotations

import argparse
from pathlib import Path

from afl.config.quantities import shown_bytes
from afl.errors import ConfigError, ExitCode
from afl.paths import expanded
from afl.runs.files import MODEL_NAMES
from afl.runs.metrics import hidden_figures, ranked
from afl.terminal.view import facts, make_console

HELP = "hand over a run's model, with a card that describes it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    run = "a run's directory; the run may have ended, well or badly, or still be running"
    parser.add_argument("run_directory", type=expanded, metavar="RUN", help=run)
    model = (
        "final: after the last round; random: of a round drawn before the run; best: with the best"
        " worst worker (default: final)"
    )
    parser.add_argument("--model", choices=MODEL_NAMES, default="final", help=model)
    out = "the folder (default: exported)"
    parser.add_argument("--out", type=expanded, default=Path("exported"), metavar="DIR", help=out)
    parser.add_argument("--force", action="store_true", help="replace what an earlier export wrote there")
    description = "what the data is (default: run.description of the run)"
    parser.add_argument("--description", metavar="TEXT", help=description)
    base = "add the parameters that each site has of its own (frozen = 'local' in the task), as they are here"
    parser.add_argument("--with-base", action="store_true", help=base)
    onnx = "also the module as ONNX, which runs without its code (the extra afl[onnx])"
    parser.add_argument("--onnx", action="store_true", help=onnx)
    parser.add_argument("--torchscript", action="store_true", help=argparse.SUPPRESS)
    predict = "also the module as a program of PyTorch's, and predict.py, which runs it without afl"
    parser.add_argument("--predict", action="store_true", help=predict)
    task = "the task's class, for --onnx, --predict or --with-base of a task that is not installed"
    parser.add_argument("--task", metavar="MODULE:CLASS", help=task)
    shape = (
        "the shape of a batch, as in 2x1x28x28, 2x40:int64 or words=2x40:int64,mask=2x40:int64, for --onnx"
        " and --predict, if worker 0's data is not on this machine"
    )
    parser.add_argument("--input", metavar="SHAPE", help=shape)


def run(options: argparse.Namespace) -> ExitCode:
    """Export the model, and print what was written."""
    if options.torchscript:
        raise ConfigError(
            "--torchscript: PyTorch has deprecated TorchScript, and afl no longer writes it; use --onnx, or "
            "afl.load_model with the module's code, which torch.export takes too"
        )
    # PyTorch takes seconds to import.
    from afl.runs.export.export import export  # noqa: PLC0415

    card = export(
        options.run_directory,
        options.model,
        options.out,
        force=options.force,
        onnx=options.onnx,
        task=options.task,
        shape=options.input,
        description=options.description,
        with_base=options.with_base,
        predict=options.predict,
    )
    model, sent, evaluation = card["model"], card["communication"], card["evaluation"]
    parameters = f"{model['trained_parameters']:,} trained parameters"
    rows = {
        "model": f"{model['name']}, of round {model['round']}; {parameters}",
        "run": f"{card['run']['state']}: {card['run']['state_words']}",
        "digest": model["digest"],
    }
    if evaluation is not None:
        by = ranked(evaluation)
        figure = f"{by.metric} {by.shown(by.worst, 4)}"
        where = (
            "" if evaluation["is_of_this_model"] else f", at round {evaluation['round']}, not of this model"
        )
        known = hidden_figures(evaluation)
        rows["all workers" if known else "worst worker"] = (
            known or f"{evaluation['worst_worker']}, {figure}"
        ) + where
    if sent is not None:
        rows["on the wire"] = shown_bytes(sent["uplink_bytes"] + sent["downlink_bytes"])
    for program in card["programs"]:
        difference = program["largest_difference"]
        rows[program["format"]] = f"{program['file']}; differs from the module by at most {difference:.2g}"
    make_console().print(facts(rows, title=f"Written: {options.out}"))
    return ExitCode.OK
