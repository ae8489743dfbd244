"""Update rules of the user by import path, ``package.module:Class``.

A store's record names its rules, and a party with a cluster's token can submit any record. So at its start a
parameter server imports only the rules that its own command line allows, and looks up a record's rule among
them. The record has the digest of the rule's file. A server with another file refuses the store, because its
shard copies would get other bits.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from adam_async.errors import ConfigError
from adam_async.option_types import fault_of_path, read_table
from adam_async.run.user_code import folder_words, import_named, read_args

# Commands check import paths with this file before they import NumPy.
if TYPE_CHECKING:
    from adam_async.model.rules import ImportedRule, UserRule
    from adam_async.run.config import Config


class RuleSource:
    """The user rules that the servers of this process may apply.

    Args:
        kinds: Classes of these rules.

    Raises:
        ConfigError: A class is not a rule, or has no file; the error names the cause.
    """

    def __init__(self, kinds: "Iterable[type[UserRule]]" = ()) -> None:
        self._allowed: dict[str, tuple[type[UserRule], str]] = {}
        for kind in kinds:
            self.allow(kind)

    def allow(self, kind: "type[UserRule]") -> None:
        """Allow one more rule."""
        self._allowed[path_of_rule(kind)] = kind, digest_of(kind)

    def rule_for(self, record: "ImportedRule") -> "UserRule":
        """Return a record's rule, with its constants.

        Raises:
            ConfigError: The rule is not allowed here (the error has the option that allows it), has another
                file, or does not take the constants.
        """
        path = record.path
        if path not in self._allowed:
            raise ConfigError(
                # A refused client gets 200 bytes of the text, so the option comes first.
                f"this server does not allow rule {path}: start it with --allow-rule {path}, and --step-path "
                "DIR for its folder, if you trust it"
            )
        kind, digest = self._allowed[path]
        if digest != record.digest:
            raise ConfigError(
                f"rule {path} has another file here, with SHA-256 {digest[:12]} instead of "
                f"{record.digest[:12]}: use the same file in all servers, clients and replays"
            )
        rule = _rule_with(kind, {**_constants_in(record), "rate": record.rate})
        if (arrays := _arrays_of(rule)) != record.arrays:
            raise ConfigError(
                f"rule {path} has the state arrays {arrays} here, and its record {record.arrays}"
            )
        return rule


def rule_kind(path: str) -> "type[UserRule]":
    """Import the class of a rule.

    Args:
        path: ``package.module:Class``; the module itself must define the class.

    Raises:
        ConfigError: The path or import is wrong, or the class is not a rule; the error names the cause.
    """
    if fault := fault_of_path(path):
        raise ConfigError(f"rule {path!r:.200}: {fault}")
    kind = import_named(path, "rule")
    from adam_async.model.rules import UserRule  # imports NumPy

    if not (isinstance(kind, type) and issubclass(kind, UserRule)) or kind.step is UserRule.step:
        raise ConfigError(
            f"rule {path} is no rule: expected a class that derives from UserRule and has a step"
        )
    if path_of_rule(kind) != path:
        raise ConfigError(f"rule {path}: its module does not define it: give {path_of_rule(kind)}")
    return kind


def path_of_rule(kind: "type[UserRule]") -> str:
    """Return the import path of a rule's class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def digest_of(kind: type) -> str:
    """Return the SHA-256 of the file that defines a class, in hexadecimal.

    Raises:
        ConfigError: Other processes cannot import the class, or its module has no file.
    """
    name = kind.__module__
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if name == "__main__" or "." in kind.__qualname__ or spec is None:
        raise ConfigError(
            f"rule {kind.__qualname__} is defined in {name}, where servers cannot import it: define it at "
            "the top of a module of its own, and import it from there"
        )
    try:
        return hashlib.sha256(spec.loader.get_data(spec.origin)).hexdigest()
    except (AttributeError, OSError, TypeError) as error:
        raise ConfigError(f"rule {name}:{kind.__qualname__}: its module has no file: {error}") from error


def record_of(rule: "UserRule") -> "ImportedRule":
    """Return a rule's record, by which servers find and check the rule.

    Raises:
        ConfigError: Servers cannot import its class, its constants have no JSON form, or its state arrays are
            invalid; the error names the cause.
    """
    from adam_async.model.rules.imported import ImportedRule  # imports NumPy

    path = path_of_rule(type(rule))
    try:
        constants = msgspec.json.decode(msgspec.json.encode(rule), type=dict[str, Any])
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"rule {path}: its constants have no form in JSON: {error}") from None
    constants.pop("rate", None)
    text = msgspec.json.encode(constants, order="deterministic").decode()
    record = ImportedRule(
        path=path, digest=digest_of(type(rule)), arrays=_arrays_of(rule), constants=text, rate=rule.rate
    )
    if _rule_with(type(rule), {**_constants_in(record), "rate": rule.rate}) != rule:
        raise ConfigError(
            f"rule {path}: its constants {text:.200} make another rule: use numbers, texts and lists"
        )
    return record


def with_rule(config: "Config") -> "Config":
    """Return a run's options with the record of the user rule that they name; imports the rule.

    Raises:
        ConfigError: The rule cannot be imported, or does not take its arguments; the error names the cause.
    """
    if ":" not in config.rule or config.rule_record:
        return config
    record = record_of(_rule_with(rule_kind(config.rule), read_args(config.rule_args, "rule_args")))
    return msgspec.structs.replace(config, rule_record=msgspec.json.encode(record).decode())


def _rule_with(kind: "type[UserRule]", constants: Mapping[str, Any]) -> "UserRule":
    """Return a rule with these constants."""
    known = kind.__struct_fields__
    if unknown := [name for name in constants if name not in known]:
        raise ConfigError(f"{kind.__name__} has no constant {unknown[0]!r:.80}; it has {', '.join(known)}")
    try:
        return read_table(kind, constants, f"{kind.__name__}: ")
    except Exception as error:  # user code may raise anything
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path_of_rule(kind)}(**{dict(constants)!r:.200}) failed: {error!r:.200}"
        ) from error


def _constants_in(record: "ImportedRule") -> dict[str, Any]:
    try:
        return msgspec.json.decode(record.constants, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"rule {record.path}: its constants are no JSON object: {error}") from None


def _arrays_of(rule: "UserRule") -> tuple[tuple[str, float], ...]:
    """Return the state arrays of a rule with their first values."""
    try:
        return tuple([(str(name), float(first)) for name, first in rule.arrays.items()])
    except Exception as error:  # user code may raise anything
        path = path_of_rule(type(rule))
        raise ConfigError(f"rule {path}: arrays is no mapping of names to numbers: {error!r:.200}") from error


def allow_rules(paths: Sequence[str]) -> RuleSource:
    """Import the rules that a parameter server allows, so no store waits for the import.

    Raises:
        ConfigError: A rule cannot be imported, or is not a rule.
    """
    return RuleSource([rule_kind(path) for path in paths])


def rule_words(paths: Sequence[str], folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the words of a parameter server's command line that let it import these rules."""
    words = folder_words(folders) if paths else []
    return (*words, *(word for path in dict.fromkeys(paths) for word in ("--allow-rule", path)))
