"""Hostile texts in every field that accepts text: every output must show them unchanged, or the planner refuse them."""

from __future__ import annotations

import contextlib
import html.parser
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import main
from planner.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = (
    *("[/bold]", "[red]x[/red]", "\x1b[31m", "\x1b]0;x\x07", "\u202e", "\u2066", "\x00", "\x07", "\r", "\n", "\x9b31m"),
    *("</script>", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "&lt;", "-->"),
    *(
        "$(touch owned)",
        "`touch owned`",
        "; touch owned;",
        "' ; touch owned ; '",
        '" ; touch owned ; "',
        "| touch owned",
    ),
    *("\n#SBATCH --wrap=id\n", "${IFS}", "%s%n", "{{7*7}}", "{0.__class__}", "!!python/object/apply:os.system [id]"),
    *("*a", "&a", "- ", ": ", "# ", "\t", "\ufeff", "\u2028", "\ud800", "a" * 10_000, "\U0001f4a5", "../../etc", "\\"),
    *("javascript:alert(1)", "]]>", "<!--", "\u0085", "--option", "=cmd|' /C calc'!A0", "\u200b", "\u0301" * 50),
)
JOB = ["tiny-gpt", "dgx-a100", "--gpus", "2", "--global-batch", "8", "--seq-len", "64"]
FILES = ("page.html", "trace.json", "plan.json")


class _Tags(html.parser.HTMLParser):
    """Collects the tags and event handlers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag, *(f"{tag} {name}" for name, _ in attrs if name.startswith("on"))]


def text_of(rng: random.Random) -> str:
    """A text of one to three hostile parts, with harmless parts between them."""
    return "".join(rng.choice((rng.choice(PARTS), rng.choice(PARTS), "name")) for _ in range(rng.randrange(1, 4)))


def _said(words: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue() + err.getvalue()


def _documents(rng: random.Random, text: str) -> list[str]:
    """The words of a command with the text in one place: a value of a document, an option, a path or a setting."""
    quoted = json.dumps(text)
    model = (
        f"name: {quoted if rng.random() < 0.5 else 'mine'}\narchitecture: llama\nnum_layers: 4\nhidden_size: 64\n"
        "num_heads: 4\nnum_kv_heads: 4\nffn_hidden_size: 128\nvocab_size: 256\nmax_sequence_length: 128\n"
    )
    model += rng.choice(
        ("", f"{quoted}: 1\n", f"layers: {quoted}\n", f"num_layers: {quoted}\n", f"# {text}\n", f"{text}\n")
    )
    Path("model.yaml").write_text(model, encoding="utf-8", errors="surrogatepass")
    config = {"model_type": text, "architectures": [text]}
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    Path("run.sh").write_text(f"torchrun pretrain_gpt.py --num-layers {text} --x {quoted}\n", "utf-8", "surrogatepass")
    places = (
        ["plan", "model.yaml", *JOB[1:]], ["plan", "config.json", *JOB[1:]], ["plan", text, *JOB[1:]],
        ["plan", JOB[0], text, *JOB[2:]], ["plan", *JOB, "--set", text], ["plan", *JOB, "--set", f"model.name={text}"],
        ["plan", *JOB, "--set", f"{text}=1"], ["plan", *JOB, "--pin", text], ["plan", *JOB, "--pin", f"tp={text}"],
        ["plan", *JOB, "--engine", text], ["plan", *JOB, "--calibration", text], ["explain", *JOB, "--layout", text],
        ["explain", *JOB, "--why-not", text], ["explain", *JOB, "--what-if", text], ["explain", "--from", "run.sh"],
        ["explain", "--from", "run.sh", "--model", text], ["explain", text], ["diff", text, text],
        ["glossary", text], ["models", text], ["clusters", text], ["launch", text, "--dry-run"],
        ["emit", text, "--to", text], ["accuracy", text], [text], ["plan", *JOB, "--global-batch", text],
        ["plan", *JOB, "--set", f"cluster.name={text}"], ["plan", *JOB, "--set", f"device.name={text}"],
    )  # fmt: skip
    words = list(rng.choice(places))
    if words[0] == "plan" and rng.random() < 0.6:
        words += ["--html", FILES[0], "--trace", FILES[1], "-o", FILES[2]]
    return words + (["--json"] if words[0] == "plan" and rng.random() < 0.3 else [])


def check(number: int, folder: Path) -> str:
    """The fault of the planner with a hostile text, in words; the working folder is the empty `folder`."""
    rng = random.Random(f"text {number}")  # noqa: S311 - no secret
    # a process argument cannot contain NUL; a byte that is not UTF-8 becomes a lone surrogate
    words = [word.replace("\x00", "").replace("\ud800", "\udcff") for word in _documents(rng, text_of(rng))]
    try:
        code, said = _said(words)
    except BaseException as error:  # noqa: BLE001 - whatever escapes is what this looks for
        return f"{type(error).__name__} {str(error)[:100]!r}: planner {words!r:.300}"
    if code == ExitCode.BUG:
        return f"exit code 1: planner {words!r:.300}"
    bad = [character for character in said if not character.isprintable() and character != "\n"]
    if bad:
        return f"{bad[0]!r} reaches the terminal: planner {words!r:.300}"
    return next((f"{fault}: planner {words!r:.300}" for fault in _faults_of_files(folder)), "")


def _faults_of_files(folder: Path) -> Iterator[str]:
    if (folder / "owned").exists():
        (folder / "owned").unlink()
        yield "a command of the text ran"
    page, trace, plan = (folder / name for name in FILES)
    for path in (trace, plan):
        if path.exists():
            json.loads(path.read_text(encoding="utf-8"))
    if plan.exists():
        for words in (["emit", "plan.json", "--to", "torch", "-o", "out"], ["explain", "plan.json"]):
            code, _ = _said(words)
            if code == ExitCode.BUG:
                yield f"{words[0]} ends with 1"
    if page.exists():
        tags = _Tags()
        tags.feed(page.read_text(encoding="utf-8"))
        if any(" on" in tag for tag in tags.found) or "img" in tags.found:
            yield "a tag of the text is in the page"


def texts(numbers: range) -> Iterator[str]:
    """The fault of each case in words."""
    here = Path.cwd()
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            try:
                yield check(number, Path(folder))
            except ValueError as error:
                yield f"a document that cannot be read back: {error}"
    assert Path.cwd() == here


if __name__ == "__main__":  # one case
    with tempfile.TemporaryDirectory() as FOLDER, contextlib.chdir(FOLDER):
        print(check(int(sys.argv[1]), Path(FOLDER)))
