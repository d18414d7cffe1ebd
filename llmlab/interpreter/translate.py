"""A kernel's source, rewritten so that Python runs it: every operation becomes a call to the run's ``Runtime``.

The rewritten function keeps the kernel's file name and line numbers, and its globals are the kernel's own: nothing is added
to them. The runtime comes in as the argument of an enclosing factory, so one translation serves any number of runs at once.
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from triton.runtime.jit import JITFunction

RUNTIME = "__rt"

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Not: "not_", ast.Invert: "invert"}


class UntranslatableError(SyntaxError):
    """The kernel uses Python that Triton's language does not have."""


Factory = Callable[[Any], Callable[..., Any]]

# By the Python function, and only as long as it lives. (To hash a JITFunction is to hash all that it would compile.)
_TRANSLATIONS: WeakKeyDictionary[Callable[..., Any], Factory] = WeakKeyDictionary()


def translate(kernel: JITFunction) -> Factory:
    """``factory(runtime) -> function``, the function taking the kernel's parameters by position."""
    factory = _TRANSLATIONS.get(kernel.fn)
    if factory is None:
        factory = _TRANSLATIONS[kernel.fn] = _translate(kernel)
    return factory


def _translate(kernel: JITFunction) -> Factory:
    file, line = location(kernel)
    tree = kernel.parse()
    definition = _Rewriter(file).visit(tree.body[0])
    closure = inspect.getclosurevars(kernel.fn).nonlocals
    factory = ast.FunctionDef(
        name="__factory",
        args=_arguments([RUNTIME, *closure]),
        body=[definition, ast.Return(ast.Name(definition.name, ast.Load()))],
        decorator_list=[],
        type_params=[],
    )
    module = ast.fix_missing_locations(ast.Module([factory], type_ignores=[]))
    ast.increment_lineno(module, line - tree.body[0].lineno)
    namespace: dict[str, Any] = {}
    exec(compile(module, file, "exec"), kernel.fn.__globals__, namespace)
    make = namespace["__factory"]
    return lambda runtime: make(runtime, *closure.values())


def location(kernel: JITFunction) -> tuple[str, int]:
    """(file, line of ``def``)."""
    before = next(i for i, line in enumerate(kernel.raw_src) if line.lstrip().startswith("def "))
    return kernel.fn.__code__.co_filename, kernel.starting_line_number + before


def _arguments(names: list[str]) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])


class _Rewriter(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, node: ast.AST, what: str) -> UntranslatableError:
        return UntranslatableError(f"{what} (line {getattr(node, 'lineno', '?')} of the kernel in {self.file})")

    def call(
        self, node: ast.AST, name: str, args: list[ast.expr], keywords: list[ast.keyword] | None = None
    ) -> ast.Call:
        function = ast.Attribute(ast.Name(RUNTIME, ast.Load()), name, ast.Load())
        return ast.copy_location(ast.Call(function, args, keywords or []), node)

    # -- statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if node.args.vararg or node.args.kwarg:
            raise self.fail(node, "a kernel takes no *args or **kwargs")
        body = [self.visit(statement) for statement in node.body]
        new = ast.FunctionDef(node.name, _arguments(names), body, [], None, type_params=[])
        return ast.copy_location(new, node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if len(node.targets) != 1:
            raise self.fail(node, "a = b = c is not in the language")
        value = self.call(node, "assign", [self.visit(node.value)])
        return ast.copy_location(ast.Assign(node.targets, value), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        keep = ast.unparse(node.annotation).rsplit(".", 1)[-1] == "constexpr"
        value = self.call(node, "constant" if keep else "assign", [self.visit(node.value)])
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        if not isinstance(node.target, ast.Name):
            raise self.fail(node, "only a name can be assigned to")
        load = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        value = self.call(node, _BINARY[type(node.op)], [load, self.visit(node.value)])
        return ast.copy_location(ast.Assign([node.target], self.call(node, "assign", [value])), node)

    def visit_If(self, node: ast.If) -> ast.If:
        test = self.call(node.test, "truth", [self.visit(node.test)])
        body, orelse = ([self.visit(s) for s in block] for block in (node.body, node.orelse))
        return ast.copy_location(ast.If(test, body, orelse), node)

    def visit_While(self, node: ast.While) -> ast.While:
        if node.orelse:
            raise self.fail(node, "while ... else is not in the language")
        test = self.call(node.test, "loop_test", [self.visit(node.test)])
        return ast.copy_location(ast.While(test, [self.visit(s) for s in node.body], []), node)

    def visit_For(self, node: ast.For) -> ast.For:
        if not isinstance(node.iter, ast.Call) or not isinstance(node.target, ast.Name) or node.orelse:
            raise self.fail(node, "a for loop goes over range, tl.range or tl.static_range, by one name, without else")
        args = [node.iter.func, *(self.visit(arg) for arg in node.iter.args)]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.iter.keywords]
        iterator = self.call(node.iter, "loop", args, keywords)
        return ast.copy_location(ast.For(node.target, iterator, [self.visit(s) for s in node.body], []), node)

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        message = [self.visit(node.msg)] if node.msg is not None else []
        return ast.copy_location(ast.Expr(self.call(node, "device_assert", [self.visit(node.test), *message])), node)

    def unsupported(self, node: ast.AST) -> ast.AST:
        raise self.fail(node, f"{type(node).__name__} is not in the language")

    visit_With = visit_Try = visit_Raise = visit_Lambda = visit_Global = visit_Nonlocal = visit_Delete = unsupported
    visit_ClassDef = visit_AsyncFunctionDef = visit_Import = visit_ImportFrom = visit_Break = visit_Continue = (
        unsupported
    )
    visit_Yield = visit_YieldFrom = visit_Await = visit_NamedExpr = unsupported

    # -- expressions

    def visit_BinOp(self, node: ast.BinOp) -> ast.Call:
        if type(node.op) not in _BINARY:
            raise self.fail(node, f"the operator {type(node.op).__name__} is not in the language")
        return self.call(node, _BINARY[type(node.op)], [self.visit(node.left), self.visit(node.right)])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.Call:
        return self.call(node, _UNARY[type(node.op)], [self.visit(node.operand)])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
        lazy = [ast.copy_location(ast.Lambda(_arguments([]), self.visit(value)), value) for value in node.values]
        return self.call(node, "bool_and" if isinstance(node.op, ast.And) else "bool_or", lazy)

    def visit_Compare(self, node: ast.Compare) -> ast.Call:
        operands = [self.visit(operand) for operand in (node.left, *node.comparators)]
        names = []
        for op in node.ops:
            if isinstance(op, (ast.Is, ast.IsNot)):
                names.append("is_" if isinstance(op, ast.Is) else "is_not")
            elif type(op) in _COMPARE:
                names.append(_COMPARE[type(op)])
            else:
                raise self.fail(node, f"the operator {type(op).__name__} is not in the language")
        if len(names) == 1:
            return self.call(node, names[0], operands)
        return self.call(node, "compare_chain", [ast.Constant(tuple(names)), *operands])

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        test = self.call(node.test, "truth", [self.visit(node.test)])
        return ast.copy_location(ast.IfExp(test, self.visit(node.body), self.visit(node.orelse)), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        value = self.visit(node.value)
        if node.attr == "T":
            return self.call(node, "transpose", [value])
        return ast.copy_location(ast.Attribute(value, node.attr, node.ctx), node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.Call:
        return self.call(node, "getitem", [self.visit(node.value), self.visit(node.slice)])

    def visit_Slice(self, node: ast.Slice) -> ast.Call:
        parts = [self.visit(part) if part else ast.Constant(None) for part in (node.lower, node.upper, node.step)]
        return self.call(node, "slice", parts)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        args = [self.visit(arg) for arg in node.args]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        if isinstance(node.func, ast.Attribute):
            name = ast.copy_location(ast.Constant(node.func.attr), node)
            return self.call(node, "method", [self.visit(node.func.value), name, *args], keywords)
        return self.call(node, "call", [self.visit(node.func), *args], keywords)
