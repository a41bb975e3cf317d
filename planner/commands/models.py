"""`planner models`: lists the shipped models, and writes the model document of a Hugging Face file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import file_option, json_option
from planner.errors import ExitCode, InputError


def run(
    name: str | None = None,
    *,
    console: Console,
    source: Path | None = None,
    output: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> int:
    """Print the list of models or one model by its name or file, or write `source` as a model document.

    Returns the exit code.

    Raises:
        PlannerError: an unknown name, a document with mistakes, or an output file that exists while `force` is false.
    """
    if source is not None:
        if name or as_json:
            left_out = name or "--json"
            raise InputError(f"--from writes one document; leave out {left_out}, or --from", hint=_HELP)
        return _write(source, output or Path("-"), console=console, force=force)
    if output is not None or force:
        raise InputError("-o and --force are of --from, which names the Hugging Face file to read", hint=_HELP)

    from planner import shipped
    from planner.show.library import entries, model_table

    if name:
        from planner.specs.by_name import model_notes

        for note in model_notes(name):
            console.note(note)
    found = shipped.one_model(name) if name else shipped.models()
    console.render(entries(found, model_table, as_json=as_json))
    return ExitCode.OK


_HELP: Final = "see `planner models --help`"


def _write(source: Path, output: Path, *, console: Console, force: bool) -> int:
    """Write the model document of a Hugging Face file, and report the keys of the file that were not read."""
    from planner.cost.parameters import num_active_params, num_params
    from planner.describe import described
    from planner.show.library import entry_text
    from planner.specs.by_name import config_path, load_model, model_names, model_notes
    from planner.specs.huggingface import model_name
    from planner.specs.huggingface.config import NotInTable

    if str(output) != "-":
        check_writable(output, force=force)
    name = f"./{source}" if str(source) in model_names() else str(source)  # the local folder, not the shipped model
    try:
        model, notes = load_model(name), model_notes(name)
    except NotInTable:
        path = config_path(name)
        assert path is not None  # a file was read
        console.note(f"no table reads {path}: the module of the transformers library is built and described")
        model, notes = described(path)
        model = model.model_copy(update={"name": model_name(path)})
    for note in notes:
        console.note(note)
    sizes = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
    header = f"# Made by `planner models --from` of {source.name}.\n"
    console.write(output, [header, entry_text(model.written() | sizes)], force=force)
    console.note(f"{model.name} has {sizes['num_params']:,} parameters, {sizes['num_active_params']:,} of them active")
    return ExitCode.OK


@click.command("models")
@click.argument("name", required=False)
@file_option(
    "--from", "source", help="Convert this Hugging Face config.json, or the one in this folder, to a model document."
)
@file_option("--output", "-o", help="Where --from writes the document; - for standard output.  [default: -]")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
def command(**options: Any) -> int:
    """List the shipped models, print one, or convert a config.json.

    NAME is a shipped name or a file, which is printed as it was read, with its size.
    """
    return run(console=Console(), **options)
