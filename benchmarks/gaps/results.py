"""A results file that several sessions fill."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gaps.training import Run
from benchmarks.lm import UsageError

Record = dict[str, Any]  # of a run: its key's parts, and what came of it


class Results:
    """What runs came to, written to a file as soon as it is known.

    Args:
        path: an existing file is gone on with; None writes none.
        about: the machine, versions and texts.

    Raises:
        UsageError: the file's runs were done on another machine, or with other versions or texts.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        saved = json.loads(path.read_text()) if path and path.exists() else {"runs": []}
        for name, value in about.items():
            if saved.get(name, value) != value:
                raise UsageError(
                    f"{path} has runs with {name} {saved[name]}, here it is {value}: their losses cannot be paired; "
                    "give another --results"
                )
        self.about = {**saved, **about}
        self._records = {_key(record): record for record in self.about.pop("runs")}

    def find(self, run: Run) -> Record | None:
        return self._records.get(run.key())

    def is_done(self, run: Run) -> bool:
        """Otherwise it failed or was not started."""
        return "held_out" in (self.find(run) or {})

    def add(self, run: Run, outcome: dict[str, Any]) -> None:
        """In place of an earlier record of the same run."""
        record = {**json.loads(run.key()), **outcome}
        self._records[_key(record)] = record
        if self._path:
            self._write(self._path)

    def seeds(self) -> list[int]:
        return sorted({record["settings"]["seed"] for record in self._records.values()})

    def expected_seconds(self, run: Run) -> float:
        """The least that the same run has taken with any seed, 0 if there is none: how busy the machine is differs."""
        variant = _variant(json.loads(run.key()))
        same = [record for record in self._records.values() if _variant(record) == variant]
        return min((record["seconds"] for record in same if "seconds" in record), default=0.0)

    def _write(self, path: Path) -> None:
        """One run a line, and as a whole or not at all."""
        head = json.dumps({**self.about, "runs": []}, indent=1)[: -len("]\n}")]
        lines = ",\n".join(json.dumps(record) for record in self._records.values())
        partial = path.with_name(path.name + ".partial")
        partial.write_text(f"{head}\n{lines}\n]}}\n")
        os.replace(partial, path)


def _key(record: Record) -> str:
    return json.dumps({name: record[name] for name in ("text", "settings", "base")}, sort_keys=True)


def _variant(record: Record) -> dict[str, Any]:
    return {"text": record["text"], "base": record["base"], **record["settings"], "seed": None}
