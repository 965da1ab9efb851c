"""What comes out of a cure: every way that was tried, the model that held, and the folder that brings it back."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from bilip.cures.rung import RUNGS
from bilip.cures.treated import Treated, copied
from bilip.errors import BilipError, CheckpointError, need, said_by
from bilip.record import AuditRecord, environment, write_aside
from bilip.record.files import UNSEALED, is_whole, read_file, seal
from bilip.record.plain import from_plain, json_text, parse_json

__all__ = ["FILES", "Attempt", "Cure", "require_folder", "restore"]

VERSION = 1
MOST, MOST_WEIGHTS = 2**28, 2**37  # bytes that are read of a list of steps, and of weights
FILES = ("model.safetensors", "before.json", "after.json", "cure.json")
"""What a cure writes; the last one last: a folder without it is not whole."""


@dataclass
class Attempt:
    """One way that was tried.

    Attributes:
        rung: Name of the rung.
        what: What was done, in words.
        outcome: `cured`, `not safe`, `too costly`, `skipped` or `failed`.
        reason: Why, in one sentence.
        record: The audit afterwards, where there was one.
        cost: Held-out loss afterwards, and by how much it rose; empty without a loss.
        repair_seconds: Time of the repair.
        audit_seconds: Time of the audit.
        facts: What the rung itself reports.
        settings: What applies it again.
        verdicts: Status of each use that was asked for.
    """

    rung: str
    what: str
    outcome: str
    reason: str = ""
    record: AuditRecord | None = None
    cost: dict[str, float] = field(default_factory=dict)
    repair_seconds: float = 0.0
    audit_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)
    treated: Treated | None = field(default=None, repr=False)
    loss: Any = field(default=None, repr=False)

    def plain(self) -> dict[str, Any]:
        """As JSON values, without the audit."""
        aside = ("record", "settings", "treated", "loss")
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name not in aside}


@dataclass
class Cure:
    """What came out of a cure.

    Attributes:
        status: `cured`; `not needed`, the model is safe as it is; `best so far`, the time was over before a cure was found and the
            model is better than before, but not safe; or `not cured`.
        model: The cured model, in evaluation mode; a copy of the model as it was if nothing was needed; `None` if nothing held.
        done: What was done, in words.
        uses: What had to become safe.
        before: The audit of the model as it was.
        after: The audit of `model`; `None` if nothing held.
        tried: Every way that was tried, in order, those that were skipped included.
        held_out: The held-out loss before, where there was a loss.
        loss: The loss with its own parameters as tuned along, where it is a module.
        chosen: The way that was handed over, one of `tried`.
        interrupted: Whether Ctrl-C ended it.

    Example:
        >>> import bilip, torch
        >>> from bilip.demo import load_demo_flow
        >>> result = bilip.cure(load_demo_flow("affine_half"), torch.rand(1000, 2) * 8 - 4)
        >>> result.status
        'not needed'
    """

    status: str
    model: Any
    done: str
    uses: tuple[str, ...]
    before: AuditRecord
    after: AuditRecord | None
    tried: tuple[Attempt, ...]
    held_out: dict[str, float] = field(default_factory=dict)
    loss: Any = None
    chosen: Attempt | None = field(default=None, repr=False)
    interrupted: bool = False

    @property
    def cured(self) -> bool:
        """Whether the wanted uses are safe now."""
        return self.status in ("cured", "not needed")

    @property
    def cost(self) -> dict[str, float]:
        """The held-out loss afterwards, and by how much it rose (`rise`)."""
        return {} if self.chosen is None else dict(self.chosen.cost)

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """A table of what was tried, in text."""
        lines = [f"{self.status}: {self.done}" if self.done else self.status]
        for attempt in self.tried:
            rise = attempt.cost.get("rise")
            cost = "" if rise is None else f", held-out loss {rise:+.3g}"
            lines.append(f"  {attempt.rung:12} {attempt.outcome:10} {attempt.what or attempt.reason}{cost}")
            if attempt.what and attempt.reason and attempt.outcome != "cured":
                lines.append(f"  {'':23} {attempt.reason}")
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """What was done, as JSON values; the audits have files of their own."""
        return {
            "format": "bilip-cure",
            "version": VERSION,
            "status": self.status,
            "done": self.done,
            "uses": list(self.uses),
            "steps": [] if self.chosen is None else [{"rung": self.chosen.rung, "settings": self.chosen.settings}],
            "held_out_before": self.held_out,
            "cost": self.cost,
            "tried": [attempt.plain() for attempt in self.tried],
            "environment": environment(),
        }

    def save(self, folder: str | Path) -> None:
        """Write `cure.json`, the audits and the weights, under the library's own names, as `model.safetensors` (else `model.pt`).

        `bilip.cures.restore(model, folder)` brings a model of the same architecture into the cured form.

        Raises:
            CheckpointError: The folder holds a model that no cure wrote, such as the one that was cured, or cannot be written to.
        """
        target = Path(folder)
        require_folder(target)
        try:
            target.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".cure", dir=target) as made:
                self._write(Path(made))  # aside: what fails here leaves an earlier cure as it was
                (target / "cure.json").unlink(missing_ok=True)
                for name in FILES:
                    if (Path(made) / name).exists():
                        os.replace(Path(made) / name, target / name)
                    else:  # an earlier cure's, which this one lacks
                        (target / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write to the folder {target} ({error.strerror}).") from error

    def _write(self, folder: Path) -> None:
        checksum = None
        if self.chosen is not None and self.chosen.treated is not None:
            checksum = _write_state(folder, self.chosen.treated.state())
        elif self.model is not None:
            checksum = _write_state(folder, copied(self.model).state())
        self.before.save(folder / "before.json")
        if self.after is not None:
            self.after.save(folder / "after.json")
        document = {**self.plain(), "sha256_of_weights": checksum, "sha256": UNSEALED}
        write_aside(folder / "cure.json", seal(json_text(document).encode()))


def require_folder(folder: Path) -> None:
    """Refuse a folder with a model that no cure wrote: a cure has a folder of its own."""
    held = next((name for name in ("config.json", "model.safetensors") if (folder / name).exists()), None)
    if held is not None and not (folder / "cure.json").exists():
        raise CheckpointError(
            f"cannot write a cure to {folder}: it holds {held}, of a model that no cure wrote. Name another folder, or a new one."
        )


def restore(model: Any, folder: str | Path) -> Any:
    """A model in the form that a saved cure gave it.

    Args:
        model: A model built like the one that was cured; its weights do not matter. It is not changed.
        folder: What `Cure.save` or `bilip cure --out` wrote.

    Returns:
        The cured model, in evaluation mode.
    """
    source = Path(folder)
    raw = read_file(
        source / "cure.json", most=MOST, error=CheckpointError, missing="does not exist; Cure.save writes it."
    )
    document = from_plain(parse_json(raw, str(source / "cure.json")))
    if not isinstance(document, dict) or document.get("format") != "bilip-cure":
        raise CheckpointError(f"{source / 'cure.json'} was not written by a cure.")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{source / 'cure.json'} has version {document.get('version')!r:.40}; this bilip reads version {VERSION}."
        )
    if not is_whole(raw, document.get("sha256")):
        raise CheckpointError(
            f"{source / 'cure.json'} is damaged or was edited: its checksum is another one. Cure the model again."
        )
    if document.get("status") == "not cured":
        raise CheckpointError(f"{source} holds no model: nothing that was tried made it safe.")
    treated = copied(model)
    try:
        for step in document["steps"]:
            treated = RUNGS[step["rung"]]().apply(treated, dict(step["settings"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BilipError):
            raise
        raise CheckpointError(
            f"what {source / 'cure.json'} says was done cannot be done to {type(model).__name__} ({said_by(error)}): pass a model "
            "built like the one that was cured, or cure it again."
        ) from error
    try:
        treated.load(_read_state(source, document.get("sha256_of_weights")))
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the weights in {source} do not fit {type(model).__name__} ({said_by(error)})."
        ) from error
    return treated.evaluated().model


def _write_state(folder: Path, state: Mapping[str, Tensor]) -> str:
    """Write the weights, and return their checksum."""
    safetensors = need("safetensors.torch", "saving a cured model", "train")
    data = safetensors.save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
    write_aside(folder / "model.safetensors", data)
    return hashlib.sha256(data).hexdigest()


def _read_state(folder: Path, checksum: object) -> dict[str, Tensor]:
    safetensors = need("safetensors.torch", "loading a cured model", "train")
    path = folder / "model.safetensors"
    data = read_file(path, most=MOST_WEIGHTS, error=CheckpointError, missing="does not exist; Cure.save writes it.")
    if hashlib.sha256(data).hexdigest() != checksum:
        raise CheckpointError(
            f"{path} is damaged, or not the one that cure.json belongs to: its checksum is another one."
        )
    try:
        return safetensors.load(data)
    except Exception as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({said_by(error)}).") from error
