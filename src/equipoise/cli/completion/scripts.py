"""Completion scripts of bash, zsh and fish: all words stand in them, so that no tab starts Python.

Kept true (tests/unit/cli/completion/test_verb.py)
    A real bash completes verbs, flags, keys, values and files from its script.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from equipoise.cli.completion.words import Flag, Verb, Words

_HEAD = "# Made by: equipoise completion {}. Make it again after an upgrade.\n"


def write_bash(words: Words) -> str:
    """For bash: source it, or put it into the folder of bash-completion."""
    return (
        _HEAD.format("bash")
        + _choose(words)
        + """
_equipoise() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} offered=
    COMPREPLY=()
    if [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    if [[ $current == = ]]; then before=${COMP_WORDS[COMP_CWORD-1]}; current=; fi
    _equipoise_words "$COMP_CWORD" "$current" "$before" "${COMP_WORDS[1]}" "${COMP_WORDS[2]}"
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
}
complete -o default -F _equipoise equipoise
"""
    )


def write_zsh(words: Words) -> str:
    """For zsh: source it after compinit, or name it _equipoise in a folder of fpath."""
    return (
        "#compdef equipoise\n"
        + _HEAD.format("zsh")
        + _choose(words)
        + """
_equipoise() {
    local offered=
    _equipoise_words $((CURRENT - 1)) "$words[CURRENT]" "$words[CURRENT-1]" "$words[2]" "$words[3]"
    if [[ -n $offered ]]; then compadd -- ${=offered}; else _files; fi
}
if [[ $funcstack[1] == _equipoise ]]; then _equipoise "$@"; else compdef _equipoise equipoise; fi
"""
    )


def _choose(words: Words) -> str:
    """The function that sets ``offered``, in the language that bash and zsh share."""
    lines = [
        "# Sets $offered. Arguments: position, word, word before, verb, verb below it.",
        "_equipoise_words() {",
        '    local verb="$4"',
        '    if [ "$1" -le 1 ]; then ' + _assign(" ".join(words.top)) + "; return; fi",
    ]
    for name, below in words.groups.items():
        lines += [
            f'    if [ "$verb" = {name} ]; then',
            f'        if [ "$1" -le 2 ]; then {_assign(" ".join(below))}; return; fi',
            '        verb="$verb $5"',
            "    fi",
        ]
    lines.append('    case "$verb $3" in')
    for pattern, flag in _valued(words):
        values = _assign(" ".join(flag.values)) if flag.values else ":"
        lines.append(f"        {pattern}) {values}; return;;")
    lines += ["    esac", '    case "$2" in', "    -*)", '        case "$verb" in']
    for verb in words.verbs:
        flags = " ".join(flag.name for flag in verb.flags)
        keys = " $_equipoise_keys" if verb.takes_keys else ""
        lines.append(f'        "{verb.name}") {_assign(flags + keys)};;')
    lines += ["        esac;;", "    *)", '        case "$verb" in']
    for verb in words.verbs:
        if verb.values:
            lines.append(f'        "{verb.name}") {_assign(" ".join(verb.values))};;')
    lines += ["        esac;;", "    esac", "}"]
    keys = " ".join(key.name for key in words.keys)
    return f'_equipoise_keys="{keys}"\n' + "\n".join(lines) + "\n"


def _assign(words: str) -> str:
    return f'offered="{words}"'


def _valued(words: Words) -> Iterator[tuple[str, Flag]]:
    """Patterns of a verb and a flag that takes a value; a key's has any verb."""
    for verb in words.verbs:
        for flag in verb.flags:
            if flag.takes_value:
                yield f'"{verb.name} {flag.name}"', flag
    for key in words.keys:
        yield f"*' {key.name}'", key


def write_fish(words: Words) -> str:
    """For fish: put it into ~/.config/fish/completions."""
    lines = [_HEAD.format("fish").rstrip()]
    lines += _verbs("__fish_use_subcommand", words.top)
    for name, below in words.groups.items():
        others = " ".join(below)
        seen = f"__fish_seen_subcommand_from {name}"
        lines += _verbs(f"{seen}; and not __fish_seen_subcommand_from {others}", below)
    keyed = []
    for verb in words.verbs:
        when = _seen(verb)
        if verb.takes_keys:
            keyed.append(verb)
        if verb.values:
            lines.append(f"complete -c equipoise -f -n {when} -a {_quoted(' '.join(verb.values))}")
        lines += [_flag(flag, when) for flag in verb.flags]
    lines += _keys(words.keys, keyed)
    return "\n".join(lines) + "\n"


def _verbs(when: str, verbs: Mapping[str, str]) -> list[str]:
    return [
        f"complete -c equipoise -f -n {_quoted(when)} -a {name} -d {_quoted(about)}"
        for name, about in verbs.items()
    ]


def _seen(verb: Verb) -> str:
    return _quoted(
        "; and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.name.split())
    )


def _flag(flag: Flag, when: str) -> str:
    values = f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r"
    name = flag.name.removeprefix("--")
    about = _quoted(_first_sentence(flag.about))
    return f"complete -c equipoise -n {when} -l {name}{values * flag.takes_value} -d {about}"


def _keys(keys: Iterable[Flag], verbs: Iterable[Verb]) -> list[str]:
    tops = dict.fromkeys(verb.name.split()[-1] for verb in verbs)
    when = _quoted(f"__fish_seen_subcommand_from {' '.join(tops)}")
    return [_flag(key, when) for key in keys]


def _first_sentence(text: str) -> str:
    return re.split(r"[;(:]", " ".join(text.split()))[0].strip().replace("%%", "%")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}
