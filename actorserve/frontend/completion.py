# SPDX-License-Identifier: Apache-2.0
"""Completion for bash, zsh and fish, written from the command's own parser.

    argparse parser ──► Command, Flag, Kind (what is there) ──► a script for one shell

The script is made anew whenever a shell starts (`source <(actorserve completion bash)`), so it
knows what the installed version knows, and a TAB starts no Python. What a value is follows from
its metavar: FILE, DIR, REPOSITORY, or choices with bars between them.
"""

from __future__ import annotations

import argparse
import enum
import re
import shlex
from collections.abc import Callable, Iterator

import msgspec


class Kind(enum.Enum):
    """What may stand for a value."""

    NONE = enum.auto()  # a flag without a value
    ANY = enum.auto()  # nothing that a shell could know
    CHOICE = enum.auto()
    FILE = enum.auto()
    DIRECTORY = enum.auto()


class Argument(msgspec.Struct, frozen=True):
    """A flag (by all its names) or a positional argument (without any)."""

    names: tuple[str, ...]
    kind: Kind
    choices: tuple[str, ...]
    metavar: str
    help: str
    is_optional: bool
    is_repeatable: bool


class Command(msgspec.Struct, frozen=True):
    """A command; the program itself is one without a name."""

    name: str
    help: str
    arguments: tuple[Argument, ...]

    @property
    def flags(self) -> list[Argument]:
        """The arguments that have names."""
        return [each for each in self.arguments if each.names]

    @property
    def positionals(self) -> list[Argument]:
        """The arguments that go by their place."""
        return [each for each in self.arguments if not each.names]


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell of SHELLS."""
    return SHELLS[shell](parser.prog, list(_commands(parser)))


def _commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """Yield the program itself, then its commands."""
    # argparse has no public way to its actions; documentation tools read these names, too.
    own = []
    found = []
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            own.append(action)
            continue
        texts = {each.dest: each.help or "" for each in action._choices_actions}
        for name, command in action.choices.items():
            found.append(Command(name, texts.get(name, ""), _arguments(command._actions)))
    yield Command("", parser.description or "", _arguments(own))
    yield from found


def _arguments(actions: list[argparse.Action]) -> tuple[Argument, ...]:
    shown = [each for each in actions if each.help != argparse.SUPPRESS]
    return tuple(_argument(each) for each in shown)


def _argument(action: argparse.Action) -> Argument:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(map(str, action.choices or ()))
    if not choices and "|" in metavar:
        choices = tuple(metavar.split("|"))
    return Argument(
        tuple(action.option_strings),
        Kind.NONE if action.nargs == 0 else _kind(metavar, choices),
        choices,
        metavar,
        _first_sentence(action.help or ""),
        action.nargs in ("?", "*"),
        action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction),
    )


def _kind(metavar: str, choices: tuple[str, ...]) -> Kind:
    if choices:
        return Kind.CHOICE
    last = metavar.rpartition("=")[2]
    if last.startswith(("DIR", "REPOSITORY")):
        return Kind.DIRECTORY
    return Kind.FILE if last == "FILE" else Kind.ANY


def _first_sentence(text: str) -> str:
    """Return a help text without its default and what follows a semicolon."""
    return re.split(r"; | \(default", text.replace("%%", "%"))[0]


def _function(program: str) -> str:
    return "_" + re.sub(r"\W", "_", program)


# --- bash ----------------------------------------------------------------------------------------

_BASH = """\
# bash completion for @PROGRAM@: source <(@PROGRAM@ completion bash)
@FUNCTION@() {
    local IFS=$' \\t\\n'
    local cur=${COMP_WORDS[COMP_CWORD]} flag= before= command= words= values= index
    COMPREPLY=()
    # The first word that is no flag is the command.
    for ((index = 1; index < COMP_CWORD; index++)); do
        if [[ ${COMP_WORDS[index]} != -* ]]; then command=${COMP_WORDS[index]}; break; fi
    done
    # --flag=value is three words to bash, unless somebody took = out of COMP_WORDBREAKS.
    if [[ $cur == = ]]; then
        cur= flag=${COMP_WORDS[COMP_CWORD-1]}
    elif [[ $cur == --*=* ]]; then
        flag=${cur%%=*} before=${cur%%=*}= cur=${cur#*=}
    elif ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[COMP_CWORD-1]} == = ]]; then
        flag=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ ${COMP_WORDS[COMP_CWORD-1]} == --* ]]; then
        flag=${COMP_WORDS[COMP_CWORD-1]}
    fi
    case $command:$flag in
@VALUES@
    esac
    case $command in
@WORDS@
    esac
    # A flag whose value may be left out is followed by its value, or by anything else.
    if [[ -n $values ]] && [[ $cur != -* || -n $before ]]; then
        words=$values
    elif [[ $cur == -* ]]; then
        words=${words#*/}
    else
        words=${words%%/*}
    fi
    case $words in
        '<directory>') compopt -o dirnames -o filenames; return ;;
    esac
    COMPREPLY=($(compgen -P "$before" -W "$words" -- "$cur"))
}
complete -F @FUNCTION@ @PROGRAM@
"""


def _bash(program: str, commands: list[Command]) -> str:
    values, words = [], []
    for command in commands:
        for flag in command.flags:
            pattern = "|".join(f"{command.name}:{name}" for name in flag.names)
            if flag.kind is Kind.FILE:
                values.append(f"{pattern}) compopt -o default; return ;;")
            elif flag.kind is Kind.DIRECTORY:
                values.append(f"{pattern}) compopt -o dirnames; return ;;")
            elif flag.kind is Kind.CHOICE:
                values.append(f"{pattern}) values={shlex.quote(' '.join(flag.choices))} ;;")
            elif flag.kind is Kind.ANY and not flag.is_optional:
                values.append(f"{pattern}) return ;;")
        names = " ".join(name for flag in command.flags for name in flag.names)
        places = _bash_places(command, commands)
        words.append(f"{shlex.quote(command.name)}) words={shlex.quote(f'{places}/{names}')} ;;")
    return _filled(
        _BASH,
        PROGRAM=program,
        FUNCTION=_function(program),
        VALUES="\n".join(f"        {line}" for line in values),
        WORDS="\n".join(f"        {line}" for line in words),
    )


def _bash_places(command: Command, commands: list[Command]) -> str:
    """Return the words that may stand where no flag does."""
    if not command.name:
        return " ".join(each.name for each in commands if each.name)
    kinds = {each.kind for each in command.positionals}
    if Kind.DIRECTORY in kinds:
        return "<directory>"
    return " ".join(choice for each in command.positionals for choice in each.choices)


# --- zsh -----------------------------------------------------------------------------------------

_ZSH = """\
#compdef @PROGRAM@
# zsh completion for @PROGRAM@, after compinit: source <(@PROGRAM@ completion zsh)
@FUNCTION@() {
    local curcontext=$curcontext state line
    local -a commands
    typeset -A opt_args
    commands=(
@COMMANDS@
    )
    _arguments -C \\
@OWN@
        '1:command:->command' '*::argument:->argument' && return
    case $state in
        command) _describe command commands ;;
        argument)
            case $words[1] in
@ARGUMENTS@
            esac ;;
    esac
}
if [[ $funcstack[1] == @FUNCTION@ ]]; then
    @FUNCTION@ "$@"
else
    compdef @FUNCTION@ @PROGRAM@
fi
"""


def _zsh(program: str, commands: list[Command]) -> str:
    named = [each for each in commands if each.name]
    own = [spec for each in commands[0].flags for spec in _zsh_flag(each)]
    cases = []
    for command in named:
        specs = [spec for each in command.flags for spec in _zsh_flag(each)]
        specs += [_zsh_positional(each) for each in command.positionals]
        lines = " \\\n".join(f"                    {spec}" for spec in specs)
        cases.append(f"                {command.name}) _arguments \\\n{lines} ;;")
    return _filled(
        _ZSH,
        PROGRAM=program,
        FUNCTION=_function(program),
        COMMANDS="\n".join(
            "        " + shlex.quote(f"{each.name}:{_zsh_text(each.help)}") for each in named
        ),
        OWN="\n".join(f"        {spec} \\" for spec in own),
        ARGUMENTS="\n".join(cases),
    )


def _zsh_flag(flag: Argument) -> Iterator[str]:
    """Yield what _arguments takes for each name of a flag."""
    others = "" if flag.is_repeatable else f"({' '.join(flag.names)})"
    star = "*" if flag.is_repeatable else ""
    for name in flag.names:
        text = f"[{_zsh_text(flag.help)}]"
        if flag.kind is Kind.NONE:
            yield shlex.quote(f"{others}{name}{text}")
            continue
        colons = "::" if flag.is_optional else ":"
        metavar = _zsh_text(flag.metavar)
        yield shlex.quote(f"{others}{star}{name}={text}{colons}{metavar}:{_zsh_action(flag)}")


def _zsh_positional(argument: Argument) -> str:
    place = "*" if argument.is_repeatable else "1"
    return shlex.quote(f"{place}:{_zsh_text(argument.metavar)}:{_zsh_action(argument)}")


def _zsh_action(argument: Argument) -> str:
    if argument.kind is Kind.CHOICE:
        return f"({' '.join(argument.choices)})"
    return {Kind.FILE: "_files", Kind.DIRECTORY: "_files -/"}.get(argument.kind, " ")


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


# --- fish ----------------------------------------------------------------------------------------

_FISH = """\
# fish completion for @PROGRAM@: @PROGRAM@ completion fish | source
complete -c @PROGRAM@ -e
complete -c @PROGRAM@ -f
@LINES@
"""
_FISH_DIRECTORIES = (
    "(__fish_complete_directories (string replace -r -- '^-[^=]*=' '' (commandline -ct)))"
)


def _fish(program: str, commands: list[Command]) -> str:
    lines = []
    for command in commands:
        if command.name:
            lines.append(
                f"complete -c {program} -n __fish_use_subcommand "
                f"-a {command.name} -d {_fish_quoted(command.help)}"
            )
            condition = _fish_quoted(f"__fish_seen_subcommand_from {command.name}")
        else:
            condition = "__fish_use_subcommand"
        for each in command.arguments:
            lines.append(f"complete -c {program} -n {condition} {_fish_argument(each)}")
    return _filled(_FISH, PROGRAM=program, LINES="\n".join(lines))


def _fish_argument(argument: Argument) -> str:
    parts = [
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in argument.names
    ]
    if argument.names and argument.kind is not Kind.NONE and not argument.is_optional:
        parts.append("-r")
    if argument.kind is Kind.CHOICE:
        parts.append(f"-f -a {_fish_quoted(' '.join(argument.choices))}")
    elif argument.kind is Kind.DIRECTORY:
        parts.append(f"-f -a {_fish_quoted(_FISH_DIRECTORIES)}")
    elif argument.kind is Kind.FILE:
        parts.append("-F")
    else:
        parts.append("-f")
    return " ".join([*parts, "-d", _fish_quoted(argument.help)])


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _filled(template: str, **texts: str) -> str:
    """Put texts into a script, whose own braces and percent signs mean something to the shell."""
    for name, text in texts.items():
        template = template.replace(f"@{name}@", text)
    return template


SHELLS: dict[str, Callable[[str, list[Command]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
