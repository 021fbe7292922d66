"""Which values can be a tensor's, for which Python waits when it asks for them."""

from __future__ import annotations

import ast
import re

from diagnose.source.calling import callee, given_to, is_call
from diagnose.source.statements import is_operation, nodes_within

PREDICATES = {"isnan", "isinf", "isfinite", "allclose", "equal", "any", "all"}

TENSOR_PACKAGES = re.compile(r"^(torch|pytorch|einops|kornia|lightning)")
"""Packages whose functions give tensors."""
GENERATORS = {"default_rng", "RandomState", "Random"}
BUILTINS = {"input", "open", "str", "repr", "len", "round", "format"}
NO_TENSORS = {
    *("read", "readline", "strip", "lstrip", "rstrip", "split", "replace", "group", "decode", "format"),
}
"""Functions, and methods of texts, whose results are no tensors."""
OF_TORCH_ALONE = {"device", "Size", "numel", "seed", "initial_seed", "iinfo", "finfo", "typename"}
"""Functions of torch that give no tensor either, as do those that get or ask: `torch.get_num_threads()`."""
PRODUCTS = {
    *("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot", "linear"),
    *("conv1d", "conv2d", "conv3d"),
}
TURNS = {"T", "mT", "H", "mH", "data"}
LIGHT = {
    *("double", "float", "to", "abs", "cos", "sin", "exp", "log", "log1p", "sqrt", "square", "pow"),
    *("mean", "sum", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze"),
    *("contiguous", "flatten"),
}
"""Calls beside which a product is most of what a line does."""


def without_tensors(tree: ast.Module) -> frozenset[str]:
    """Returns the names of a file on which nothing that is called gives a tensor.

    They are what it imports, but for torch's and what is relative, and its generators of random numbers:
    `np`, `self.rng`.
    """
    found: set[str] = set()
    for node in nodes_within(tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if not TENSOR_PACKAGES.match(alias.name)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases = node.names if not TENSOR_PACKAGES.match(node.module or "") else []
        else:
            aliases = []
            if isinstance(node, ast.Assign) and is_call(node.value, GENERATORS):
                found.update(ast.unparse(target) for target in node.targets)
        found.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
    return frozenset(found)


def may_be_tensor(node: ast.expr, imported: frozenset[str]) -> bool:
    """Whether a value can be a tensor's, by what it is asked of: not in `int(re.sub(...))`."""
    if isinstance(node, ast.Call) and not callee(node)[1]:
        return False
    asked = node
    while isinstance(asked, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(asked, ast.Call):
            name, base = callee(asked)
            if name in (NO_TENSORS if base else BUILTINS):
                return False
            if not base:
                break  # a function that was imported may give tensors: `float(loss_of(x).mean())`
            asked = asked.func
        elif ast.unparse(asked) in imported:
            return False
        else:
            asked = asked.value
    else:
        if isinstance(asked, ast.Name) and asked.id in imported:
            return False
    return isinstance(node, (ast.Call, ast.Name, ast.Subscript))


def asks_tensor(test: ast.expr) -> bool:
    """Whether a condition asks a tensor: it calls a predicate of torch's, or compares what torch gives."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and any(map(_of_torch, (node.left, *node.comparators))):
            return True
        if not isinstance(node, ast.Call):
            continue
        name, base = callee(node)
        if name in PREDICATES and base not in ("", "math", "np"):
            return True
        if not base and name in ("all", "any") and len(node.args) == 1:
            asked = node.args[0]  # a comparison that has items is an array's
            if isinstance(asked, ast.Compare) and not isinstance(asked.ops[0], (ast.In, ast.NotIn)):
                return True
    return False


def _of_torch(node: ast.expr) -> bool:
    """Whether an expression is what a function of torch computes: `torch.min(y)`."""
    if not isinstance(node, ast.Call):
        return False
    name, base = callee(node)
    return (
        base in ("torch", "torch.linalg")
        and name not in OF_TORCH_ALONE
        and not name.startswith(("get_", "is_", "are_"))
    )


def factors(text: str) -> frozenset[str]:
    """Returns the attributes with which a line takes a product as they are, each by its last name: `basis`,
    of `x @ self.basis.T`, but not of `x @ self.basis.float()`.

    There are none where something else on the line may take most of its time, a module or another product,
    nor of a statement that goes on in the next line.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return frozenset()
    products = [[node.left, node.right] for node in nodes if is_operation(node, ast.MatMult)]
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        if is_call(call, PRODUCTS):
            of = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            products.append([*given_to(call), *of])
        elif not is_call(call, LIGHT):
            return frozenset()
    if len(products) > 1:
        return frozenset()
    scaled = [each for node in nodes if is_operation(node, ast.Mult) for each in (node.left, node.right)]
    found = (_turned(factor) for factor in (products[0] if products else scaled))
    return frozenset(factor.attr for factor in found if isinstance(factor, ast.Attribute))


def _turned(value: ast.expr) -> ast.expr:
    """Returns of what an expression is a part, or the same with its axes in another order."""
    while isinstance(value, ast.Subscript) or (isinstance(value, ast.Attribute) and value.attr in TURNS):
        value = value.value
    return value
