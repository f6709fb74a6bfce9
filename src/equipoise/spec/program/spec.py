"""A training program: what it can run, and how it runs it.

Why
    A plan that a program cannot run is worthless, and a forecast of one program is wrong for
    another on the same devices.

What it decides
    Which settings a program has, and what it takes where none is given. A setting that it lacks is
    refused by name, with those that it has.

Kept true (tests/unit/spec/program/test_file.py)
    Every shipped program refuses what it lacks and nothing else; each fact has a source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise.base.errors import SpecError
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.device.spec import DeviceSpec
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.program.stack import Stack
from equipoise.spec.recompute import modules_of

DEFAULT = "equipoise"
"""The program of a forecast that names none."""


_Asked = tuple[str, object, tuple[object, ...] | None, str]
"""A setting, its value, those that there are, and its flag."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One training program; a tuple that is None holds all settings, an empty one none."""

    name: str
    title: str
    stack: Stack
    orders: tuple[str, ...] | None
    """Orders of ranks, by ``spec.layout.ORDERS``; the first is its own."""
    schedules: tuple[str, ...] | None
    recompute: tuple[str, ...] | None
    modules: tuple[str, ...] | None
    """Modules of a layer that it can compute again, by ``spec.recompute.MODULES``."""
    context: tuple[str, ...] | None
    """What travels between context ranks; the first is its own."""
    precision: tuple[str, ...] | None
    zero: tuple[int, ...] | None
    sharding: str
    """Which context rank holds which tokens."""
    sources: tuple[tuple[str, str], ...]
    """Where each fact comes from."""

    @property
    def order(self) -> str:
        """The order of ranks that it takes by itself."""
        return self.orders[0] if self.orders else next(iter(ORDERS))

    @property
    def context_strategy(self) -> str:
        """What travels between context ranks if nothing else is asked for."""
        return self.context[0] if self.context else "needed-kv"

    def require_device(self, device: DeviceSpec) -> None:
        """Refuse another program where steps are priced from what this one was timed to take.

        Raises:
            SpecError: names both.
        """
        if self.name != DEFAULT and device.is_here:
            raise SpecError(
                f"{device.name} is priced from what {DEFAULT} takes on it, and program {self.name} "
                f"is another. Name a shipped device, or leave program out."
            )

    def can_recompute(self, setting: str) -> bool:
        """Whether it can run a setting of recomputation."""
        modules = modules_of(setting)
        known = self.modules if modules else self.recompute
        return known is None or (modules or {setting}) <= set(known)

    def require_modules(self, setting: str) -> None:
        """Refuse modules that the program cannot recompute.

        Raises:
            SpecError: names them, and those that it can.
        """
        if modules_of(setting) and not self.can_recompute(setting):
            raise SpecError(self._say_modules(setting))

    def _say_modules(self, setting: str) -> str:
        lacks = sorted(modules_of(setting) - set(self.modules or ()))
        if self.modules:
            return (
                f"program {self.name} cannot recompute {', '.join(lacks)}; its modules are "
                f"{', '.join(self.modules)}. Give those, or another --program."
            )
        first = "" if not self.recompute else f" {self.recompute[0]}"
        return (
            f"program {self.name} recomputes no modules, and --recompute is {setting}. Give "
            f"--recompute{first or ' none'}, or another --program, as megatron-core."
        )

    def require_own_layers(self) -> None:
        """Refuse layers with strategies of their own in a program that has none.

        Raises:
            SpecError: names the program.
        """
        if self.name != DEFAULT:
            raise SpecError(
                f"program {self.name} lays out all layers alike, and layers gives them strategies "
                f"of their own. Leave layers or program out."
            )

    def require_given(self, given: Mapping[str, object], precision: str) -> None:
        """Refuse what was given for a search whose other settings are open.

        Args:
            given: Settings by the names of ``plan.space.columns``.
            precision: Of the step.

        Raises:
            SpecError: names the setting, and those that the program has.
        """
        asked: list[_Asked] = [("precision", precision, self.precision, "--precision")]
        for what, known, axis in (
            ("recompute", self.recompute, ""),
            ("schedule", self.schedules, "pp"),
            ("context strategy", self.context, "cp"),
        ):
            value = given.get(what.replace(" ", "_"))
            wants_ranks = not known and int(str(given.get(axis, 1))) > 1
            if (value is not None or wants_ranks) and not modules_of(str(value)):
                asked.append((what, value, known, f"--{what.replace(' ', '-')}"))
        self._require_each(asked, given)

    def _require_each(self, asked: Sequence[_Asked], sizes: Mapping[str, object]) -> None:
        """Refuse the first value that is not among those known.

        Raises:
            SpecError: names it, and those that are.
        """
        for what, value, known, flag in asked:
            if known is None or value in known:
                continue
            if known:
                has = ", ".join(map(str, known))
                raise SpecError(
                    f"program {self.name} cannot run {what} {value}; it has {has}. Give "
                    f"{flag}{'' if flag.endswith('=') else ' '}{known[0]}, or another --program."
                )
            ranks, axis = ("stages", "pp") if what == "schedule" else ("context ranks", "cp")
            if axis not in sizes:
                raise SpecError(
                    f"program {self.name} has no {ranks}, and {flag} is {value}. Leave it out, or "
                    f"give another --program."
                )
            raise SpecError(
                f"program {self.name} has no {ranks}, and the layout has {axis}={sizes[axis]}. "
                f"Give a layout without {axis}, or another --program."
            )

    def require(
        self,
        layout: Layout,
        schedule: str,
        recompute: str,
        context_strategy: str,
        precision: str,
    ) -> None:
        """Refuse what the program cannot run.

        Raises:
            SpecError: names the setting, and those that it has.
        """
        asked: list[_Asked] = [("precision", precision, self.precision, "--precision")]
        self.require_modules(recompute)
        if not modules_of(recompute):
            asked.append(("recompute", recompute, self.recompute, "--recompute"))
        if layout.zero_ranks > 1:
            asked.append(("zero", layout.zero, self.zero, "--layout zero="))
        if layout.pp > 1:
            asked.append(("schedule", schedule, self.schedules, "--schedule"))
            if layout.dp > 1:
                named = next(name for name, axes in ORDERS.items() if axes == layout.order)
                asked.append(("order", named, self.orders, "--order"))
        if layout.cp > 1:
            asked.append(("context strategy", context_strategy, self.context, "--context-strategy"))
        self._require_each(asked, {"pp": layout.pp, "cp": layout.cp})
        if layout.pp > 1 and schedule not in SCHEDULES:
            raise SpecError(f'schedule: "{schedule}" is not one of {", ".join(SCHEDULES)}.')
