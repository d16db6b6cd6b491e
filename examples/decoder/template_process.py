"""The process that a chat template runs in: a job from standard input, its text to standard output.

It imports nothing of the package, so that it starts soon.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SECONDS, MEMORY, LONGEST = 10, 2**30, 2**20  # for a template; characters of what it writes


def _limit() -> None:
    try:
        import resource
    except ImportError:  # not on Windows, where only the time is limited
        return
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _environment() -> Any:
    """As transformers has it."""
    import datetime

    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Marks what an assistant wrote, for training: here it is text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)  # fmt: skip

    out = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    out.filters["tojson"] = tojson
    out.globals["raise_exception"] = raise_exception
    out.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return out


def _main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    environment = _environment()
    _limit()
    try:
        parts, length = [], 0
        for part in environment.from_string(job["template"]).generate(**job["values"]):
            parts.append(part)
            length += len(part)
            if length > LONGEST:
                raise ValueError(f"writes more than {LONGEST} characters")
        answer = "text", "".join(parts)
    except MemoryError:
        answer = "error", f"takes more than {MEMORY >> 20} MiB"
    except Exception as error:
        answer = "error", (" ".join(str(error).split()) or type(error).__name__)[:300]
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main()
