"""A SymPy object from the text that `str()` of one gives, such as `Integral(x, x)`, without evaluating it as code:
Python's own syntax tree, read by a list of allowed names, calls and operators. Used only in a worker process."""

import ast
import re
from collections.abc import Callable
from typing import Any, ClassVar

import sympy

_CALLS = frozenset({
    "Abs", "Integral", "Sum", "Product", "Limit", "Derivative", "factorial", "binomial", "sqrt", "log",
    "exp", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "Min", "Max", "floor", "ceiling", "gcd", "lcm",
    "Matrix", "Interval", "Union", "Intersection", "Complement", "FiniteSet", "Eq", "Ne", "Lt", "Le", "Gt",
    "Ge", "Rational", "Symbol", "Function", "Mod",
})  # fmt: skip
_CONSTANTS = {
    "pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo, "EmptySet": sympy.S.EmptySet,
    "Reals": sympy.S.Reals, "Integers": sympy.S.Integers, "Rationals": sympy.S.Rationals,
    "Complexes": sympy.S.Complexes, "Naturals": sympy.S.Naturals, "Naturals0": sympy.S.Naturals0,
}  # fmt: skip
SYMPY_LIKE = re.compile(
    r"\*\*|\b(?:" + "|".join([*sorted(_CALLS), *_CONSTANTS]) + r")\b\s*(?:\(|\.|$)|^\{.*\}$|^[a-z]\w* *[!<>=]="
)


class TooHard(ValueError):
    """The text is outside the bounds; the message says which."""


class _SympyReader(ast.NodeVisitor):
    """A SymPy expression from Python's syntax tree; every name, call and operator is from a list."""

    _BINARY: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        ast.Add: lambda a, b: a + b,
        ast.Sub: lambda a, b: a - b,
        ast.Mult: lambda a, b: a * b,
        ast.Div: lambda a, b: a / b,
        ast.Pow: lambda a, b: a**b,
    }
    _COMPARE: ClassVar[dict[type, Any]] = {
        ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne, ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
    }  # fmt: skip

    def generic_visit(self, node: ast.AST) -> Any:
        raise TooHard(f"no {type(node).__name__} is read in an answer")

    def visit_Expression(self, node: ast.Expression) -> Any:
        return self.visit(node.body)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise TooHard("only numbers are constants")
        return sympy.Rational(ast.unparse(node)) if isinstance(node.value, float) else sympy.Integer(node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        return _CONSTANTS.get(node.id, sympy.Symbol(node.id, real=True))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if not isinstance(node.op, ast.USub | ast.UAdd):
            raise TooHard("only signs are unary")
        value = self.visit(node.operand)
        return -value if isinstance(node.op, ast.USub) else value

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if type(node.op) not in self._BINARY:
            raise TooHard(f"no operator {type(node.op).__name__}")
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Pow) and getattr(right, "is_number", False) and abs(right) > 10_000:
            raise TooHard("a power too large to compute")
        return self._BINARY[type(node.op)](left, right)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1 or type(node.ops[0]) not in self._COMPARE:
            raise TooHard("one comparison at a time")
        return self._COMPARE[type(node.ops[0])](self.visit(node.left), self.visit(node.comparators[0]))

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return sympy.Tuple(*[self.visit(item) for item in node.elts])

    def visit_List(self, node: ast.List) -> Any:
        return [self.visit(item) for item in node.elts]

    def visit_Set(self, node: ast.Set) -> Any:
        return sympy.FiniteSet(*[self.visit(item) for item in node.elts])

    def visit_Call(self, node: ast.Call) -> Any:
        arguments = [self.visit(item) for item in node.args]
        if isinstance(node.func, ast.Attribute):
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "Interval"):
                raise TooHard("no attribute is read")
            makers = {"open": sympy.Interval.open, "Lopen": sympy.Interval.Lopen, "Ropen": sympy.Interval.Ropen}
            return makers[node.func.attr](*arguments)
        if not isinstance(node.func, ast.Name):
            raise TooHard("only named functions are called")
        if node.func.id == "Limit":
            direction = [k.value.value for k in node.keywords if k.arg == "dir" and isinstance(k.value, ast.Constant)]
            return sympy.Limit(*arguments, *direction)
        if node.func.id in ("factorial", "binomial") and any(
            getattr(a, "is_number", False) and abs(a) > 1000 for a in arguments
        ):
            raise TooHard("a factorial too large to compute")
        if node.func.id in _CALLS:
            return getattr(sympy, node.func.id)(*arguments)
        return sympy.Function(node.func.id)(*arguments)


def read_sympy(text: str) -> Any:
    """Return a SymPy object of the text `str()` of one gives; None where it is not such a text."""
    try:
        tree = ast.parse(text.strip().replace("\n", " "), mode="eval")
        return _SympyReader().visit(tree)
    except (SyntaxError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
        return None
