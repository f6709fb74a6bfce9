"""A guide with one flaw each: its line, and the whole sentence."""

import pytest

from support.runbooks.guides import GOOD, flaws


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "of instant late\n",
            "of instant lat\n",
            "10: No instant is called lat. Nearest: late. All: start, proof, unproven, late, "
            "came, slow, slow-why, even, stopped, continued, slow-link, even-link, changed, stop.",
        ),
        (
            "count of instant late\n",
            "max waited of instant late\n",
            "10: No such field: waited. Nearest: waited_s. All: t, rank, name, waiting_rank, "
            "waited_s, message, what, phase, missing, culprits, stacks, calls.",
        ),
        (
            "count of instant",
            "max message of instant",
            "10: max takes numbers, and message is a text. Use first or last.",
        ),
        (
            "count of instant late\n",
            "count of instant late over last 5 steps\n",
            "10: instant late has no step, so a window of steps holds none. Give s, min or h.",
        ),
        (
            "count of instant late\n",
            "count of instant late over last 5 days\n",
            "10: A window is in steps, s, min or h, not in days.",
        ),
        (
            "count of instant late\n",
            "count of instant late by stacks\n",
            "10: Events cannot be grouped by stacks, which is an object.",
        ),
        (
            "count of instant",
            "count of instnat",
            "10: A journal has no events of kind instnat. Nearest: instant. All: span, "
            "scalar, instant, decision, fault, metric.",
        ),
        (
            "late = count of",
            "late counts",
            '10: "late counts instant late" sets nothing. Begin with a name in lower case and'
            " =, as in: late = count of instant late.",
        ),
        (
            "`late > 0`",
            "`lat > 0`",
            "13: Nothing has set `lat` here. Nearest: late.",
        ),
        (
            "`late > 0`",
            "`late`",
            "13: `late` is a number, not a condition.",
        ),
        (
            "`late > 0`",
            "`late > `",
            "13: `late >` cannot be read as an expression.",
        ),
        (
            "({late} times)",
            "({lates} times)",
            "14: Nothing has set `lates` here. Nearest: late.",
        ),
        (
            "- else: **none**; stop: nothing was late ({late} times).\n",
            "",
            '13: "First" says nothing for the case that no condition holds. Add - else: '
            "**outcome**.",
        ),
        (
            "; stop: nothing was late ({late} times)",
            "",
            '14: "First" = "none" leads nowhere. Let a step come after it, or stop: and why.',
        ),
        (
            "- else: **none**",
            "- else: none",
            "14: This outcome cannot be read. Write - if `CONDITION`: **outcome**, or - else:"
            " **outcome**, and ; stop: WHY behind it where nothing follows.",
        ),
        (
            "- else: **none**",
            "- else: **late**",
            '14: "First" has the outcome "late" twice.',
        ),
        (
            "after: First = late",
            "after: Frist = late",
            '18: No step is called "Frist". Nearest: First.',
        ),
        (
            "after: First = late",
            "after: First = soon",
            '18: "First" never comes out as "soon". Its outcomes: late, none.',
        ),
        (
            "after: First = late",
            "after: First = none",
            '18: "Second" is never reached: what it comes after cannot all happen.',
        ),
        (
            "after: First = late",
            "after: First = late and First = none",
            '18: "Second" is never reached: what it comes after cannot all happen.',
        ),
        (
            "after: First = late",
            "after: Second",
            "18: These steps wait for each other: Second -> Second.",
        ),
        (
            "## Second",
            "## First",
            '16: Line 7 has a step called "First", too. Rename one.',
        ),
        (
            "## Second",
            "## Second and last",
            '16: "Second and last" cannot be a step\'s name: it has letters, digits, spaces '
            "and hyphens, and neither of the words and, or.",
        ),
        (
            "> {late} ranks",
            "> {later} ranks",
            "20: Nothing has set `later` here. Nearest: late.",
        ),
        (
            "equipoise report RUN",
            "equipoise repot RUN",
            '23: equipoise repot RUN: There is no verb "repot". Nearest: report.',
        ),
        (
            "equipoise report RUN",
            "equipoise report RUN --ot x",
            "23: equipoise report RUN --ot x: equipoise report: --ot: no such flag. Nearest: --out",
        ),
        (
            "equipoise report RUN",
            "equipoise train run.toml --train.lrr 3",
            "23: equipoise train run.toml --train.lrr 3: --train.lrr: no such key. Nearest: "
            "--train.lr",
        ),
        (
            "equipoise report RUN",
            "rm -rf RUN",
            "23: An action is a command of equipoise, such as: equipoise doctor.",
        ),
        (
            "equipoise report RUN",
            "equipoise report 'RUN",
            "23: This command cannot be read: no closing quotation.",
        ),
        (
            "when: instant late",
            "when: instant soon",
            "5: No instant is called soon. Nearest: slow. All: start, proof, unproven, late, "
            "came, slow, slow-why, even, stopped, continued, slow-link, even-link, changed, stop.",
        ),
        (
            "# Something is late\n",
            "\n",
            "1: The guide has no title. Begin it with # and what is wrong.",
        ),
    ],
)
def test_a_flaw_is_named_with_its_line(before: str, after: str, expected: str) -> None:
    assert before in GOOD
    assert f"mine.md:{expected}" in flaws(GOOD.replace(before, after, 1))
