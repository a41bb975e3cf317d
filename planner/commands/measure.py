"""`planner measure`: measures this machine's devices and links, and writes documents to plan with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from planner.commands.console import Console, check_writable
from planner.commands.options import file_option, place_options
from planner.errors import EnvironmentProblem, ExitCode, InputError

if TYPE_CHECKING:
    from pathlib import Path

_MOST_SECONDS: Final = 300


def run(
    output: Path,
    *,
    console: Console,
    model: str | None = None,
    seconds: float = _MOST_SECONDS,
    nodes: int = 1,
    force: bool = False,
    **place: Any,
) -> int:
    """Measure this machine, write curves.json, cluster.yaml and devices/NAME.yaml to `output`, return the exit code.

    nodes: number of hosts that run this command at the same time.
    place: options that give the number of this host, as for `planner.launch.hosts.find_place`.

    Raises:
        PlannerError: an output file exists and `force` is false, the model is unknown, torch is missing, or a rank
            failed.
    """
    import json
    import os

    from planner.launch.hosts import find_place
    from planner.measure import measured_cluster, request, run_probe
    from planner.show.library import entry_text
    from planner.show.measured import measured_document_view
    from planner.specs.by_name import load_model
    from planner.specs.this_machine import detected_cluster

    host = find_place(nodes, os.environ, what="the measurement", **place)
    found = detected_cluster().model_copy(update={"name": "this-machine", "hosts": nodes})
    spec = load_model(model or ("tiny-gpt" if found.kind == "cpu" else "llama3-8b"))
    files = {name: output / name for name in ("curves.json", "cluster.yaml", f"devices/{found.device.name}.yaml")}
    if host is None or host.number == 0:
        _make_folder(output / "devices")
        check_writable(*files.values(), force=force)
    with console.progress(f"measuring, {seconds:.0f} s at most"):
        wanted = request(spec, found.kind, seconds)
        curves = run_probe(wanted, processes=found.devices_per_host, hosts=nodes, host=host)
    if curves is None:
        return ExitCode.OK
    made = measured_cluster(found, curves)
    document = made.model_dump(mode="json", exclude_none=True)
    device = document["device"]
    how = f"# Measured by `planner measure` with torch {curves['torch']}; curves.json has what was timed.\n"
    cluster = how + entry_text({**document, "device": device["name"]})
    texts = (json.dumps(curves, indent=1) + "\n", cluster, how + entry_text(device))
    for path, text in zip(files.values(), texts, strict=True):
        console.write(path, [text], force=force)
    console.render(measured_document_view(found, made, curves))
    return ExitCode.OK


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{path} is not a folder", hint="choose another name") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot write to {path}: {error.strerror}") from None


@click.command("measure")
@file_option("-o", "--output", metavar="DIR", required=True, help="Folder to write.")
@click.option(
    "--model", metavar="M", help="Model whose shapes are timed; by default tiny-gpt on CPUs, llama3-8b on GPUs."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, _MOST_SECONDS),
    default=_MOST_SECONDS,
    metavar="S",
    help="Stop after S seconds; values not measured keep their defaults.",
)
@click.option("--nodes", type=click.IntRange(1, 10_000), default=1, metavar="N", help="Number of hosts that take part.")
@place_options
@click.option("--force", is_flag=True, help="Replace files that exist.")
def command(**options: Any) -> int:
    """Measure this machine, and write documents to plan with.

    Devices and links are measured. DIR/cluster.yaml and DIR/devices/ have the measured efficiencies.
    DIR/curves.json has the measured times: products of M's shapes, attention, streaming memory, launches,
    collectives, copies from the host. Keep the machine idle. With --nodes, run this command on every host at once,
    like `planner launch`. The GPU measurements have never run on a GPU.
    """
    return run(console=Console(), **options)
