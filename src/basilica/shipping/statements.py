"""The names that statements of a module bind and use, from their text alone."""

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """The text of a file or of a notebook's cell."""

    file: str
    lines: list[str]
    tree: ast.Module

    @property
    def lazy_annotations(self) -> bool:
        return any(
            isinstance(s, ast.ImportFrom) and s.module == "__future__" and any(n.name == "annotations" for n in s.names)
            for s in self.tree.body
        )

    def binding(self, name: str) -> list[ast.stmt]:
        """Return the top-level statements that bind the name; not those under `if __name__ == "__main__"`."""
        return [s for s in self.tree.body if not _is_main_guard(s) and name in bound(s)]

    def alone(self, statement: ast.stmt) -> bool:
        """Return whether the statement shares no line with another."""
        first, last = span(statement)
        others = (span(s) for s in self.tree.body if s is not statement)
        return not any(a <= last and first <= b for a, b in others)


def parse(file: str, text: str) -> Text | None:
    try:
        return Text(file, text.splitlines(keepends=True), ast.parse(text)) if text.strip() else None
    except (SyntaxError, ValueError):
        return None


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def span(statement: ast.stmt) -> tuple[int, int]:
    """Return the statement's first and last line, decorators included."""
    decorators = statement.decorator_list if isinstance(statement, Def) else []
    return min([statement.lineno, *(d.lineno for d in decorators)]), statement.end_lineno or statement.lineno


def bound(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement binds, also in the branches of `if` and `try`."""
    match statement:
        case ast.Import(names=names):
            return {n.asname or n.name.partition(".")[0] for n in names}
        case ast.ImportFrom(names=names):
            return {n.asname or n.name for n in names}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            return {name}
        case ast.AugAssign(target=ast.Name(id=name)):
            return {name}
        case ast.If() | ast.Try():
            inner = (n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.stmt))
            handlers = (s for h in getattr(statement, "handlers", ()) for s in h.body)
            return set().union(*map(bound, (*inner, *handlers)))
        case ast.stmt() if type(statement).__name__ == "TypeAlias":  # Python 3.12
            return {statement.name.id}  # type: ignore[attr-defined]
    return set()


def is_at(node: Function, code: CodeType) -> bool:
    return node.name == code.co_name and span(node)[0] == code.co_firstlineno


def dotted_name(node: ast.AST) -> str | None:
    """Return the text of a dotted name such as `a.b.c`, None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def assigns_literal(statement: ast.stmt, name: str) -> bool:
    """Return whether the statement is like `name = 1`, with nothing to compute and no other target."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
            return _is_literal(value)
        case ast.AnnAssign(value=value) | ast.AugAssign(value=value) if value is not None:
            return _is_literal(value)
    return False


def _is_literal(node: ast.expr) -> bool:
    parts = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp)
    grammar = (ast.operator, ast.unaryop, ast.expr_context)
    return all(isinstance(part, parts + grammar) for part in ast.walk(node))


def used_names(statement: ast.stmt, *, lazy_annotations: bool) -> set[str]:
    """Return the names that a statement reads from its module when it, or the thing that it defines, is executed."""
    statement = _WithoutUnused(lazy_annotations).visit(ast.parse(ast.unparse(statement)))
    table = symtable.symtable(ast.unparse(statement), "<shipped>", "exec")
    return set(_globals_of(table))


class _WithoutUnused(ast.NodeTransformer):
    """Removes annotations that are never evaluated: of local variables, and all where they are lazy.

    Annotations of classes stay: dataclasses and similar code read them.
    """

    def __init__(self, lazy: bool) -> None:
        self._lazy = lazy
        self._in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._in_function = self._in_function, False
        self.generic_visit(node)
        self._in_function = before
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if self._in_function:
            node.annotation = ast.Constant(None)
        return node

    def _function(self, node: Function) -> ast.AST:
        if self._lazy:
            node.returns = None
            given = node.args
            for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
                if arg is not None:
                    arg.annotation = None
        before, self._in_function = self._in_function, True
        self.generic_visit(node)
        self._in_function = before
        return node


def _globals_of(table: symtable.SymbolTable) -> Iterator[str]:
    at_top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (at_top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals_of(child)
