"""A function as source text: itself, and exactly what it uses of its module, each line where it stood in the file.

What is looked for in the module is the statement that binds a name. Imports, functions and classes travel as they
stand; a constant that was written as a literal travels by the value that it has now; one that is computed is computed
again on the rank. What is bound elsewhere (a notebook's variable, a closure, a `from x import *`) travels by value.
"""

import ast
import importlib.util
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeGuard

from basilica.core.errors import ValidationError
from basilica.shipping.literals import a, literal
from basilica.shipping.statements import (
    Def,
    Function,
    Text,
    assigns_literal,
    bound,
    dotted_name,
    is_at,
    parse,
    span,
    used_names,
)

INSTEAD = "pass it as an argument or make it in the function, or deploy with ship='pickle' if it can be pickled"
# What every module has by itself.
_OF_EVERY_MODULE = frozenset(vars(ModuleType("m"))) | {"__file__", "__builtins__", "__annotations__", "__cached__"}


@dataclass(frozen=True, slots=True)
class Captured:
    """`file` is a plain file name, for tracebacks."""

    name: str
    file: str
    text: str


def capture(function: Callable[..., Any]) -> Captured:
    """`ValidationError` if it is no function with source, or uses something that cannot travel."""
    return _Capture(plain_function(function)).captured()


def plain_function(source: Callable[..., Any]) -> FunctionType:
    """What decorators were put on, if it is something that can be called by its name in another process."""
    found = inspect.unwrap(source)
    name = getattr(found, "__name__", type(found).__name__)

    def refuse(problem: str) -> ValidationError:
        return ValidationError("source", name, problem)

    if inspect.ismethod(found):
        raise refuse("is a method of an object, which cannot travel; use a function")
    if not isinstance(found, FunctionType):
        kind = "a class" if inspect.isclass(found) else "a builtin" if inspect.isbuiltin(found) else a(found)
        raise refuse(f"is {kind}, not a function written in Python")
    if found.__name__ == "<lambda>":
        raise refuse("is a lambda; give it a name with `def`")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise refuse("is a generator, and nobody would iterate over it; use a function that returns")
    if "." in found.__qualname__ and not found.__qualname__.endswith(f"<locals>.{found.__name__}"):
        raise refuse("is a method of a class; use a function outside of classes")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A statement that travels; of its decorators ours are left out."""

    text: Text
    statement: ast.stmt
    left_out: tuple[ast.expr, ...] = ()

    @property
    def used(self) -> ast.stmt:
        if not self.left_out:
            return self.statement
        used = ast.parse(ast.unparse(self.statement)).body[0]
        assert isinstance(self.statement, Def)
        assert isinstance(used, Def)
        used.decorator_list = [d for d in self.statement.decorator_list if d not in self.left_out]
        return used

    @property
    def block(self) -> str:
        """Its lines as they stand, with nothing where a decorator was left out."""
        first, last = span(self.statement)
        lines = [line.rstrip("\n") for line in self.text.lines[first - 1 : last]]
        for decorator in self.left_out:
            for number in range(decorator.lineno, (decorator.end_lineno or decorator.lineno) + 1):
                lines[number - first] = ""
        return "\n".join(lines)


@dataclass(slots=True)
class _Capture:
    """Places are lines of the function's own file; 0: none."""

    root: FunctionType
    texts: dict[str, Text] = field(default_factory=dict)  # the function's own first
    pieces: dict[tuple[str, int, int], _Piece] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # short statements, with their place
    modules: dict[str, int] = field(default_factory=dict)  # names that `import name` binds, with its place
    closed_over: dict[str, object] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @property
    def namespace(self) -> dict[str, Any]:
        return self.root.__globals__

    @property
    def home(self) -> Text:
        return self.texts[self.root.__code__.co_filename]

    def refuse(self, problem: str) -> ValidationError:
        return ValidationError("source", self.root.__name__, problem)

    def captured(self) -> Captured:
        if self._text(self.root.__code__.co_filename) is None:
            raise self.refuse("its source cannot be found; write it into a file or a notebook")
        for cell in self._cells():
            self.texts.setdefault(cell.file, cell)
        self._keep_function(self.root)
        self._refuse_circles()
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", os.path.basename(self.home.file)).strip("_") or "source"
        return Captured(self.root.__name__, name if name.endswith(".py") else f"{name}.py", self._layout())

    def _text(self, file: str) -> Text | None:
        if file not in self.texts:
            text = parse(file, "".join(linecache.getlines(file, self.namespace)))
            if text is None:
                return None
            self.texts[file] = text
        return self.texts[file]

    def _cells(self) -> Iterator[Text]:
        """The cells of a notebook, newest first, if the function was typed into one."""
        typed = self.namespace.get("In")
        if isinstance(typed, list) and "get_ipython" in self.namespace:
            for number in range(len(typed) - 1, -1, -1):
                text = parse(f"cell {number:06}", typed[number])
                if text is not None:
                    yield text

    def _refuse_circles(self) -> None:
        """A variable that is made by running the function would start the next run on every rank."""
        for piece in self.pieces.values():
            if not isinstance(piece.statement, Def):
                calls = [n for n in ast.walk(piece.statement) if isinstance(n, ast.Call)]
                if any(isinstance(n, ast.Name) and n.id == self.root.__name__ for c in calls for n in ast.walk(c)):
                    made = ", ".join(sorted(bound(piece.statement)))
                    raise self.refuse(f"uses {made!r}, which is made by calling it")

    # ---- taking ------------------------------------------------------------------------------------------------------

    def _keep_function(self, function: FunctionType) -> None:
        code = function.__code__
        text = self._text(code.co_filename)
        found = [n for n in ast.walk(text.tree) if isinstance(n, Function) and is_at(n, code)] if text else []
        if text is None or not found:
            raise self.refuse(f"the source of {code.co_name!r} has changed since it was loaded; load it again")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in (function.__name__, self.root.__name__):
                self._close_over(name, cell)
        self._keep(text, found[0], free=code.co_freevars)
        self.seen.add(function.__name__)

    def _close_over(self, name: str, cell: CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:
            raise self.refuse(f"closes over {name!r}, which has no value yet") from None
        if name in self.closed_over and self.closed_over[name] is value:
            return
        if name in self.seen:
            raise self.refuse(f"uses two variables called {name!r}; rename one")
        self.closed_over[name] = value
        self.seen.add(name)
        if self._is_local_function(name, value):
            self._keep_function(value)
        elif not self._by_value(name, value):
            raise self.refuse(f"closes over {name!r} ({a(value)}), which cannot travel; {INSTEAD}")

    def _is_local_function(self, name: str, value: object) -> TypeGuard[FunctionType]:
        """Defined beside the one that uses it, and not what a decorator made of it."""
        return (
            isinstance(value, FunctionType)
            and value.__name__ == value.__code__.co_name == name
            and value.__globals__ is self.namespace
            and "<locals>" in value.__qualname__
        )

    def _keep(self, text: Text, statement: ast.stmt, free: Collection[str] = ()) -> None:
        """Take a statement, and all that it uses of the module."""
        key = (text.file, statement.lineno, statement.col_offset)
        if key in self.pieces:
            return
        decorators = statement.decorator_list if isinstance(statement, Def) else []
        piece = _Piece(text, statement, tuple(d for d in decorators if self._is_ours(d)))
        self.pieces[key] = piece
        if statement in text.tree.body:
            self.seen |= bound(statement)
        for name in sorted(used_names(piece.used, lazy_annotations=text.lazy_annotations)):
            if name not in free:
                self._need(name)

    def _is_ours(self, decorator: ast.expr) -> bool:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        root, *path = (dotted_name(called) or "").split(".")
        value = self.closed_over.get(root, self.namespace.get(root))
        for attribute in path:
            value = getattr(value, attribute, None)
        return str(getattr(value, "__module__", "")).partition(".")[0] == "basilica"

    def _need(self, name: str) -> None:
        """Something uses what the module has by that name."""
        if name not in self.namespace or name in _OF_EVERY_MODULE:
            return  # a builtin, or a name that has no value here either
        if name in self.closed_over:
            raise self.refuse(f"uses two variables called {name!r}; rename one")
        if name in self.seen:
            return
        self.seen.add(name)
        value = self.namespace[name]
        for text in tuple(self.texts.values()):
            statements = text.binding(name)
            if statements:
                self._by_statements(name, value, text, statements)
                return
        if not self._by_value(name, value):
            raise self.refuse(f"uses the global {name!r} ({a(value)}), which cannot travel; {INSTEAD}")

    def _by_statements(self, name: str, value: object, text: Text, statements: list[ast.stmt]) -> None:
        last = statements[-1]
        if isinstance(last, ast.Import | ast.ImportFrom):
            self._import(name, last, self._place(text, last))
        elif not isinstance(last, _ASSIGNMENTS):
            self._keep(text, last)
        else:
            assignments = [s for s in statements if isinstance(s, _ASSIGNMENTS)]
            source = literal(value) if all(assigns_literal(s, name) for s in assignments) else None
            if source is not None:
                self.lines[f"{name} = {source}"] = self._place(text, last)
            else:
                for statement in assignments:
                    self._keep(text, statement)

    def _place(self, text: Text, statement: ast.stmt) -> int:
        return statement.lineno if text is self.home and text.alone(statement) else 0

    def _import(self, name: str, statement: ast.Import | ast.ImportFrom, place: int) -> None:
        alias = next(n for n in statement.names if (n.asname or n.name.partition(".")[0]) == name)
        if isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            if statement.level:
                module = importlib.util.resolve_name(module, self._package())
            self.lines[_from(module, alias.name, name)] = place
        elif alias.asname:
            self.lines[f"import {alias.name} as {alias.asname}"] = place
        else:
            self.modules[name] = place

    def _package(self) -> str:
        package: str = self.namespace.get("__package__") or ""
        if not package:
            raise self.refuse("is in a file with relative imports that belongs to no package")
        return package

    def _by_value(self, name: str, value: object) -> bool:
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            if value.__name__ == name:
                self.modules[name] = 0
            else:
                self.lines[f"import {value.__name__} as {name}"] = 0
            return True
        source = literal(value)
        if source is not None:
            self.lines[f"{name} = {source}"] = 0
            return True
        home = self._home_of(name, value)
        if home is not None:
            self.lines[_from(*home, name)] = 0
        return home is not None

    def _home_of(self, name: str, value: object) -> tuple[str, str] | None:
        """Another module that has the value, and under which name."""
        candidates = [(getattr(value, "__module__", None), getattr(value, "__qualname__", ""))]
        for text in self.texts.values():
            for node in text.tree.body:
                if isinstance(node, ast.ImportFrom) and not node.level and node.names[0].name == "*":
                    candidates.append((node.module, name))
        for module, attribute in candidates:
            loaded = sys.modules.get(module) if isinstance(module, str) else None
            elsewhere = loaded is not None and vars(loaded) is not self.namespace and module != "__main__"
            if elsewhere and attribute.isidentifier() and getattr(loaded, attribute, None) is value:
                return str(module), attribute
        return None

    def _submodules(self) -> dict[str, set[str]]:
        """By name, the modules below it that are used: `import xml` is not enough for `xml.etree.ElementTree`."""
        found: dict[str, set[str]] = {}
        chains = {c for p in self.pieces.values() for n in ast.walk(p.used) if (c := dotted_name(n)) is not None}
        for chain in chains:
            root, *rest = chain.split(".")
            module = self.closed_over.get(root, self.namespace.get(root))
            if root in self.seen and isinstance(module, ModuleType):
                name, longest = module.__name__, None
                for part in rest:
                    name, module = f"{name}.{part}", getattr(module, part, None)
                    if not isinstance(module, ModuleType) or module.__name__ != name:
                        break
                    longest = name
                if longest is not None:
                    found.setdefault(root, set()).add(longest)
        return found

    # ---- the text ----------------------------------------------------------------------------------------------------

    def _layout(self) -> str:
        """One text. Lines of the function's own file stay where they were, so that tracebacks fit it."""
        rows: dict[int, list[str]] = {}
        for statement in self.home.tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                rows.setdefault(statement.lineno, []).append(ast.unparse(statement))
        top = max(rows, default=0)  # nothing may stand before an import of the future
        unplaced = self._place_lines(rows)
        elsewhere: list[str] = []  # a notebook's other cells
        later: list[str] = []
        for _, piece in sorted(self.pieces.items()):
            if piece.text is not self.home:
                elsewhere.append(piece.block)
            elif not self._place_piece(piece, rows):
                later.append(f"if True:\n{piece.block}" if piece.statement.col_offset else piece.block)
        if unplaced and top:
            rows[top] += unplaced
        elif unplaced and not elsewhere and 1 not in rows:
            rows[1] = unplaced
        elif unplaced:
            elsewhere.insert(0, "; ".join(unplaced))
        out: list[str] = []
        shift = 0
        for at in sorted(rows):
            if elsewhere and at > top:
                out += "\n".join(elsewhere).split("\n")
                elsewhere, shift = [], max(0, len(out) - at + 1)
            out += [""] * (at + shift - 1 - len(out))
            out += "; ".join(rows[at]).split("\n")
        return "\n".join([*out, *elsewhere, *later]).rstrip() + "\n"

    def _place_lines(self, rows: dict[int, list[str]]) -> list[str]:
        """Imports and values where they stood; those that stood nowhere are returned."""
        unplaced: list[str] = []
        submodules = self._submodules()
        lines = dict(self.lines)
        for name, place in self.modules.items():
            below = {m for m in submodules.pop(name, ()) if m.startswith(f"{name}.")}
            lines[f"import {', '.join(sorted(below) or [name])}"] = place
        for modules in submodules.values():
            lines |= {f"import {module}": 0 for module in modules}
        for line, place in sorted(lines.items()):
            (rows.setdefault(place, []) if place else unplaced).append(line)
        return unplaced

    def _place_piece(self, piece: _Piece, rows: dict[int, list[str]]) -> bool:
        """Put a statement of the home text where it stood; False if something else is there."""
        first, last = span(piece.statement)
        if piece.statement in self.home.tree.body:
            if self.home.alone(piece.statement):
                rows[first] = [piece.block]
            else:
                text = "".join(self.home.lines)
                rows.setdefault(first, []).append(ast.get_source_segment(text, piece.statement) or "")
            return True
        others = [span(p.statement) for p in self.pieces.values() if p is not piece and p.text is self.home]
        if any(low <= last and first - 1 <= high for low, high in others) or rows.keys() & set(range(first - 1, last)):
            return False
        rows[first - 1] = ["if True:"]  # dedenting it would change the strings in it
        rows[first] = [piece.block]
        return True


_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def _from(module: str, attribute: str, name: str) -> str:
    return f"from {module} import {attribute}" + ("" if attribute == name else f" as {name}")
