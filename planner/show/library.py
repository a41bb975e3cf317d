"""Output of `planner models`, `clusters`, `engines` and `glossary`: the list of shipped entries, or one entry."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from planner.show.columns import Columns
from planner.show.screen import clean, section, stack
from planner.units import format_bytes, format_count, format_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rich.console import RenderableType

_DERIVED: Final = ("num_params", "num_active_params", "source", "price_source")
"""Keys of an entry that are derived, that is, not in its document."""


def entries(found: Any, table: Callable[[Any], RenderableType], *, as_json: bool) -> RenderableType:
    """Return one entry (a dict) or the table of several, or either as JSON."""
    if as_json:
        return json.dumps(found, indent=1) + "\n"
    return entry_text(found) if isinstance(found, dict) else table(found)


def model_table(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """Show the models as a table."""
    rows = [
        (
            Text(clean(entry["name"]), style="bold"),
            format_count(entry["num_params"]),
            format_count(entry["num_active_params"]),
            str(entry["num_layers"]),
            str(entry["hidden_size"]),
            str(entry["max_sequence_length"]),
        )
        for entry in entries
    ]
    return Columns(
        rows,
        right=(1, 2, 3, 4, 5),
        optional=(5, 4, 3, 2),
        header=("model", "parameters", "active", "layers", "hidden", "sequence"),
    )


def cluster_table(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """Show the clusters as a table; bandwidths and prices are per device, for a mixed cluster between its pools."""
    rows = []
    for entry in entries:
        links = ", ".join(f"{clean(link['name'])} {format_rate(link['bytes_per_second'])}" for link in entry["links"])
        hosts = [f"{pool['devices_per_host']} x {clean(pool['device'])}" for pool in entry.get("pools", [entry])]
        memory = format_bytes(min(pool["memory_bytes"] for pool in entry.get("pools", [entry])))
        if len(hosts) > 1:
            hosts, links = [f"{len(hosts)} pools"], f"{' + '.join(hosts)}, {links}"
        price = f"{entry['usd_per_hour']:.2f}" if entry.get("usd_per_hour") else ""
        rows.append((Text(clean(entry["name"]), style="bold"), hosts[0], memory, price, links))
    header = ("cluster", "host", "memory", "USD/h", "links, one device one way")
    return Columns(rows, right=(2, 3), wrap=(4,), optional=(3, 2), header=header)


def engine_table(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """Show the engines as a table: axes, programs for which emit writes files, and axes that no such program runs."""
    rows = [
        (
            Text(clean(entry["name"]), style="bold"),
            clean(", ".join(entry["axes"])),
            clean(", ".join(map(str, entry["zero_stages"]))),
            clean(", ".join(entry["emits"])) or "priced only",
            clean(", ".join(entry["priced_only"])),
            clean(entry["program"]),
        )
        for entry in entries
    ]
    header = ("engine", "parallelism", "ZeRO", "emit --to", "priced only", "program")
    return Columns(rows, wrap=(5,), optional=(5, 1), header=header)


def glossary_view(found: Collection[dict[str, Any]]) -> RenderableType:
    """Show entries of the glossary below the headings of their sections."""
    sections: dict[str, list[Text]] = {}
    for each in found:
        name, _, words = each["text"].partition(":")
        line = Text.assemble((clean(name), "bold"), clean(f":{words}"))
        sections.setdefault(each["section"], []).append(line)
    return stack(*(section(title, *lines) for title, lines in sections.items()))


def entry_text(entry: dict[str, Any]) -> str:
    """Return one entry as a document that can be saved, changed and used; derived values are comments."""
    import yaml

    derived = {key: entry[key] for key in _DERIVED if key in entry}
    document = {key: value for key, value in entry.items() if key not in derived}
    told = {key: f"{value:,}" if isinstance(value, int) else clean(value) for key, value in derived.items()}
    comments = "".join(f"# {key}: {text}\n" for key, text in told.items())
    return comments + yaml.safe_dump(document, sort_keys=False, width=1000)
