"""The plan of every profile that comes along for every model that comes along, as text: one file a profile.

`make golden` (`python -m tests.agent.pal.golden_plans`) writes them anew; the difference is then there to be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dragoman_agent.model.random_source import random_model_names
from dragoman_agent.pal.library import library_names, load_library
from dragoman_agent.pal.offline import Outlook, Wish, look_ahead, open_shapes, outlook_to_dict
from dragoman_agent.pal.switches import Switches

FOLDER = Path(__file__).parent / "golden"


def golden_text(profile_name: str) -> str:
    """The plans of one profile: a line a value, so that a change is a line of a diff."""
    profile = load_library(profile_name)
    models = {
        name: _sections(look_ahead(profile, open_shapes(name, Path()), Wish(), Switches()))
        for name in random_model_names()
    }
    return _spread(models, depth=3) + "\n"


def write_all(folder: Path = FOLDER) -> list[Path]:
    """Write a file for each profile of the library, and remove those of profiles that are gone."""
    folder.mkdir(exist_ok=True)
    written = []
    for name in library_names():
        path = folder / f"{name}.json"
        path.write_text(golden_text(name), encoding="utf-8")
        written.append(path)
    for path in set(folder.glob("*.json")) - set(written):
        path.unlink()
    return written


def _sections(outlook: Outlook) -> dict[str, Any]:
    told = outlook_to_dict(outlook)
    if not told["plan"]:
        return {"does not fit": {"problem": told["problem"], "changes": told["changes"]}}
    predicted = {
        f"{entry['concurrency']} x {entry['context_tokens']} tokens": {
            name: value for name, value in entry.items() if name not in ("concurrency", "context_tokens")
        }
        for entry in told["predicted"]
    }
    decided = {decision.subject: decision.chosen for decision in outlook.decisions}
    return {"plan": told["plan"], "memory": told["memory"], "predicted": predicted, "decided": decided}


def _spread(value: Any, depth: int) -> str:
    """JSON with a line for each entry down to `depth`, and one line for what is below."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(_rounded(value), ensure_ascii=False)
    margin = " " * (4 - depth)
    body = ",\n".join(f"{margin}{json.dumps(key)}: {_spread(entry, depth - 1)}" for key, entry in value.items())
    return "{\n" + body + "\n" + margin[1:] + "}"


def _rounded(value: Any) -> Any:
    """Floats to four digits: more would differ between machines and tell nothing."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    for path in write_all():
        print(path.name, file=sys.stderr)
