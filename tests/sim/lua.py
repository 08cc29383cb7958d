"""The few words of Lua that our scripts for the store use, turned into Python: what runs are the scripts themselves.

Owns the translation. The one rule: what is not understood raises SyntaxError at once; nothing is guessed. Tables are
dicts with keys from 1, nil is None; numbers that are whole stay integers.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

_TOKEN: Final = re.compile(
    r"""\s+|--[^\n]*
    |(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<sign>\.\.\.|\.\.|==|~=|<=|>=|[-+*/%^#<>=(){}\[\];:,.])""",
    re.VERBOSE,
)
_KEYWORDS: Final = frozenset(
    [
        "and",
        "break",
        "do",
        "else",
        "elseif",
        "end",
        "false",
        "for",
        "function",
        "if",
        "in",
        "local",
        "nil",
        "not",
        "or",
        "repeat",
        "return",
        "then",
        "true",
        "until",
        "while",
    ]
)
_LEVELS: Final = (("or",), ("and",), ("<", ">", "<=", ">=", "~=", "=="), ("..",), ("+", "-"), ("*", "/", "%"))
_CALLS: Final = {
    "+": "_add", "-": "_sub", "*": "_mul", "/": "_div", "%": "_mod", "..": "_join",
    "==": "_eq", "~=": "_ne", "<": "_lt", ">": "_gt", "<=": "_le", ">=": "_ge",
}  # fmt: skip

Call = Callable[..., Any]


@functools.cache
def compiled(text: str) -> Callable[[Call, list[str], list[str]], Any]:
    """`script(call, keys, args)` with `call` as redis.call; answers as the store would."""
    source = _Translator(text).module()
    scope = dict(_RUNTIME)
    exec(compile(source, "<lua>", "exec"), scope)
    made = scope["script"]

    def run(call: Call, keys: list[str], args: list[str]) -> Any:
        return _answer(made(_redis(call), _table(keys), _table(args)))

    return run


def _redis(call: Call) -> Callable[..., Any]:
    def redis_call(name: str, *args: Any) -> Any:
        return _reply(call(name, *(_text(arg) for arg in args)))

    return redis_call


def _reply(value: Any) -> Any:
    """An answer of the store as Lua sees it."""
    if value is None:
        return False
    if isinstance(value, (list, tuple)):
        return _table([_reply(item) for item in value])
    return value


def _answer(value: Any) -> Any:
    """What a script returns as its caller sees it."""
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, dict):
        return [_answer(value[place]) for place in range(1, _length(value) + 1)]
    return value if isinstance(value, str) else int(value)


class _Translator:
    """One script. Every local gets a name of its own, so that Lua's blocks need no scopes in Python."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._scopes: list[dict[str, tuple[str, int]]] = [
            {"KEYS": ("KEYS", 0), "ARGV": ("ARGV", 0), **{name: (f"lua_{name}", -1) for name in _GLOBALS}}
        ]
        self._function = 0  # depth
        self._numbers = itertools.count(1)
        self._lines: list[str] = []
        self._indent = 1
        self._outer: list[set[str]] = [set()]

    def module(self) -> str:
        self._block(("",))
        return "\n".join(["def script(redis_call, KEYS, ARGV):", *self._lines, "    return None"])

    # Tokens.

    @property
    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self, *expected: str) -> str:
        kind, text = self._next
        if expected and (text not in expected or kind == "string"):
            raise SyntaxError(f"{text!r} where one of {expected} was expected")
        self._at += 1
        return text

    def _is(self, *texts: str) -> bool:
        kind, text = self._next
        return kind != "string" and text in texts

    def _skip(self, text: str) -> bool:
        if self._is(text):
            self._at += 1
            return True
        return False

    # Names.

    def _declare(self, name: str) -> str:
        own = f"{name}_{next(self._numbers)}"
        self._scopes[-1][name] = (own, self._function)
        return own

    def _find(self, name: str) -> tuple[str, int]:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise SyntaxError(f"the name {name} is not known")

    def _emit(self, line: str) -> None:
        self._lines.append("    " * self._indent + line)

    # Statements.

    def _block(self, ends: tuple[str, ...]) -> None:
        self._scopes.append({})
        start = len(self._lines)
        while not (self._is(*ends) or (self._next == ("end", "") and "" in ends)):
            self._statement()
        if len(self._lines) == start:
            self._emit("pass")
        self._scopes.pop()

    def _body(self, *ends: str) -> None:
        self._indent += 1
        self._block(ends)
        self._indent -= 1

    def _statement(self) -> None:
        match self._next[1] if self._next[0] == "name" else "":
            case "local":
                self._take()
                self._local()
            case "if":
                self._if()
            case "for":
                self._for()
            case "return":
                self._take()
                self._emit(f"return {'None' if self._is('end', 'else', 'elseif', '') else self._expression()}")
                self._skip(";")
            case _:
                self._assignment()

    def _local(self) -> None:
        if self._skip("function"):
            self._function_named(self._take())
            return
        names = [self._take()]
        while self._skip(","):
            names.append(self._take())
        values = self._expressions() if self._skip("=") else []
        values += ["None"] * (len(names) - len(values))
        if len(values) == len(names) == 2 and values[1] == "None" and values[0].startswith("_method"):
            values = [f"{values[0]} or (None, None)"]
        targets = [self._declare(name) for name in names]
        self._emit(f"{', '.join(targets)} = {', '.join(values)}")

    def _function_named(self, name: str) -> None:
        own = self._declare(name)
        self._take("(")
        self._function += 1
        self._scopes.append({})
        parameters = []
        while not self._skip(")"):
            parameters.append(self._declare(self._take()))
            self._skip(",")
        self._emit(f"def {own}({', '.join(f'{each}=None' for each in parameters)}):")
        place = len(self._lines)
        self._outer.append(set())
        self._body("end")
        self._take("end")
        outer = self._outer.pop()
        if outer:
            self._lines.insert(place, "    " * (self._indent + 1) + f"nonlocal {', '.join(sorted(outer))}")
        self._scopes.pop()
        self._function -= 1

    def _if(self) -> None:
        word = "if"
        self._take("if")
        while True:
            condition = self._expression()
            self._take("then")
            self._emit(f"{word} _true({condition}):")
            self._body("elseif", "else", "end")
            match self._take("elseif", "else", "end"):
                case "elseif":
                    word = "elif"
                case "else":
                    self._emit("else:")
                    self._body("end")
                    self._take("end")
                    return
                case _:
                    return

    def _for(self) -> None:
        self._take("for")
        names = [self._take()]
        while self._skip(","):
            names.append(self._take())
        self._scopes.append({})
        if self._skip("="):
            bounds = self._expressions()
            over = f"_range({', '.join(bounds)})"
        else:
            self._take("in")
            over = f"_each({self._expression()}, {len(names)})"
        targets = ", ".join(self._declare(name) for name in names)
        self._take("do")
        self._emit(f"for {targets} in {over}:")
        self._body("end")
        self._take("end")
        self._scopes.pop()

    def _assignment(self) -> None:
        target = self._postfix()
        if not self._is("=", ","):
            self._emit(target)
            return
        targets = [target]
        while self._skip(","):
            targets.append(self._postfix())
        self._take("=")
        values = self._expressions()
        if len(targets) != len(values):
            raise SyntaxError("as many values as names are understood")
        temporary = [f"_t{next(self._numbers)}" for _ in targets]
        self._emit(f"{', '.join(temporary)} = {', '.join(values)}")
        for name, value in zip(targets, temporary, strict=True):
            self._store(name, value)

    def _store(self, target: str, value: str) -> None:
        if target.startswith("_index("):
            self._emit(f"_put({target.removeprefix('_index(')[:-1]}, {value})")
            return
        depth = next((depth for scope in self._scopes for own, depth in scope.values() if own == target), None)
        if depth is not None and depth < self._function:
            self._outer[-1].add(target)
        self._emit(f"{target} = {value}")

    # Expressions.

    def _expressions(self) -> list[str]:
        found = [self._expression()]
        while self._skip(","):
            found.append(self._expression())
        return found

    def _expression(self, level: int = 0) -> str:
        if level == len(_LEVELS):
            return self._unary()
        left = self._expression(level + 1)
        while self._is(*_LEVELS[level]):
            sign = self._take()
            right = self._expression(level if sign == ".." else level + 1)
            match sign:
                case "or" | "and":
                    temporary = f"_t{next(self._numbers)}"
                    both = (f"({temporary} if _true({temporary} := {left}) else {right})" if sign == "or"
                            else f"({right} if _true({temporary} := {left}) else {temporary})")  # fmt: skip
                    left = both
                case _:
                    left = f"{_CALLS[sign]}({left}, {right})"
        return left

    def _unary(self) -> str:
        if self._skip("not"):
            return f"(not _true({self._unary()}))"
        if self._skip("-"):
            return f"_sub(0, {self._unary()})"
        if self._skip("#"):
            return f"_length({self._unary()})"
        return self._postfix()

    def _postfix(self) -> str:
        value = self._primary()
        while True:
            if self._skip("["):
                value = f"_index({value}, {self._expression()})"
                self._take("]")
            elif self._skip("."):
                value = f"_index({value}, {self._take()!r})"
            elif self._skip(":"):
                name = self._take()
                value = f"_method({value}, {name!r}, {self._arguments()})"
            elif self._is("("):
                value = f"{value}({self._arguments()})"
            else:
                return value

    def _arguments(self) -> str:
        self._take("(")
        found = []
        while not self._skip(")"):
            found.append(self._expression())
            self._skip(",")
        if found and found[-1].startswith("lua_unpack("):
            found[-1] = f"*{found[-1]}"
        return ", ".join(found)

    def _primary(self) -> str:
        kind, text = self._next
        self._at += 1
        if kind == "number":
            return text
        if kind == "string":
            return repr(text[1:-1].encode().decode("unicode_escape"))
        if text == "(":
            inner = self._expression()
            self._take(")")
            return inner
        if text == "{":
            return self._constructor()
        if kind != "name":
            raise SyntaxError(f"{text!r} is no value")
        if text in ("nil", "true", "false"):
            return {"nil": "None", "true": "True", "false": "False"}[text]
        if text in _KEYWORDS:
            raise SyntaxError(f"{text!r} is no value")
        if text == "redis":
            self._take(".")
            self._take("call")
            return "redis_call"
        return self._find(text)[0]

    def _constructor(self) -> str:
        found = []
        while not self._skip("}"):
            found.append(self._expression())
            self._skip(",")
        return f"_table([{', '.join(found)}])"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise SyntaxError(f"{text[at : at + 20]!r} is not understood")
        if found.lastgroup is not None:
            yield found.lastgroup, found.group()
        at = found.end()


# What the translated text calls.


def _true(value: Any) -> bool:
    return value is not None and value is not False


def _table(items: Any) -> dict[Any, Any]:
    return {place: item for place, item in enumerate(items, 1) if item is not None}


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    count = len(value)
    while count and count not in value:
        count -= 1
    return count


def _number(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError(f"arithmetic on {value!r}")
    found = lua_tonumber(value)
    if found is None:
        raise TypeError(f"arithmetic on {value!r}")
    return found


def _whole(value: float) -> Any:
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


def _arithmetic(work: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def both(left: Any, right: Any) -> Any:
        return _whole(work(_number(left), _number(right)))

    return both


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.17g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError(f"{value!r} is neither text nor number")


def _join(left: Any, right: Any) -> str:
    return _text(left) + _text(right)


def _equal(left: Any, right: Any) -> bool:
    """Text and numbers are never equal; nil and false are not either."""
    if isinstance(left, bool) or isinstance(right, bool) or left is None or right is None:
        return left is right
    return isinstance(left, str) == isinstance(right, str) and bool(left == right)


def _index(table: Any, key: Any) -> Any:
    return table.get(_whole(key))


def _put(table: Any, key: Any, value: Any) -> None:
    table[_whole(key)] = value


def _range(first: Any, last: Any, step: Any = 1) -> Iterator[int]:
    at = _number(first)
    while at <= _number(last):
        yield at
        at += _number(step)


def _each(over: Any, names: int) -> Iterator[Any]:
    for item in over:
        yield item if names > 1 else item[0]


_PATTERN: Final = {"%d": r"\d", "%s": r"\s", "%w": r"\w"}


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """Lua's patterns, as far as classes, groups, anchors and + * go."""
    return re.compile(re.sub(r"%[dsw]", lambda found: _PATTERN[found.group()], text))


def _method(value: str, name: str, *args: Any) -> Any:
    match name:
        case "match":
            found = _pattern(args[0]).search(value)
            if found is None:
                return None
            groups = found.groups()
            return groups if len(groups) > 1 else groups[0] if groups else found.group()
        case "gmatch":
            return ((found.group(),) for found in _pattern(args[0]).finditer(value))
        case "sub":
            return value[args[0] - 1 : args[1] if len(args) > 1 else None]
        case _:
            raise SyntaxError(f"the method {name} is not understood")


def lua_tonumber(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    try:
        return _whole(float(value)) if isinstance(value, str) else None
    except ValueError:
        return None


def lua_ipairs(table: dict[Any, Any]) -> Iterator[tuple[int, Any]]:
    for place in itertools.count(1):
        if table.get(place) is None:
            return
        yield place, table[place]


def lua_unpack(table: dict[Any, Any], first: int = 1) -> list[Any]:
    return [table.get(place) for place in range(first, _length(table) + 1)]


def _format(form: str, value: Any) -> str:
    return form % _number(value)


_GLOBALS: Final = ("tonumber", "tostring", "ipairs", "unpack", "math", "string", "table")


class _Library(dict[str, Any]):
    """math, string, table."""


_MATH: Final = _Library(
    floor=lambda value: math.floor(_number(value)),
    ceil=lambda value: math.ceil(_number(value)),
    max=lambda *values: max(map(_number, values)),
    min=lambda *values: min(map(_number, values)),
    huge=math.inf,
)
_STRING: Final = _Library(format=_format)
_LUA_TABLE: Final = _Library(
    concat=lambda table, joint="": joint.join(_text(table[place]) for place in range(1, _length(table) + 1))
)
_RUNTIME: Final[dict[str, Any]] = {
    "_true": _true, "_table": _table, "_length": _length, "_join": _join, "_index": _index, "_put": _put,
    "_range": _range, "_each": _each, "_method": _method,
    "_eq": _equal, "_ne": lambda left, right: not _equal(left, right),
    "_lt": lambda left, right: left < right, "_gt": lambda left, right: left > right,
    "_le": lambda left, right: left <= right, "_ge": lambda left, right: left >= right,
    "_add": _arithmetic(lambda left, right: left + right), "_sub": _arithmetic(lambda left, right: left - right),
    "_mul": _arithmetic(lambda left, right: left * right), "_div": _arithmetic(lambda left, right: left / right),
    "_mod": _arithmetic(lambda left, right: left % right),
    "lua_tonumber": lua_tonumber, "lua_tostring": _text, "lua_ipairs": lua_ipairs, "lua_unpack": lua_unpack,
    "lua_math": _MATH, "lua_string": _STRING, "lua_table": _LUA_TABLE,
}  # fmt: skip
