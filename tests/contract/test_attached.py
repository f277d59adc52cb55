"""What hangs on a model is declared in one table. Nothing else is put there: no mark, no hook, no method."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import gemma4_compat
from gemma4_compat._gemma4.accelerate import attached
from tests.helpers import ROOT

PACKAGE = ROOT / "gemma4_compat"
TABLE = "_gemma4.accelerate.attached"
PATCHES = {patch.id for patch in gemma4_compat.patches()}
#: Modules whose hooks last as long as a call: they are listed without a declaration. The last one's are of its
#: reproduction.
FOR_A_CALL = {
    "_generation.speculative.speculative_steps",
    "_gemma4.models.padding_row",
    "_gemma4.cache.shared_kv",
    "patches.adapters.peft_adapter_names",
    "patches.generation.transformers_assistant_memory",
    "patches.quantization.transformers_quantized_router",
}
#: Code that runs on models of its own.
_OWN_MODELS = ("_lab", "_adapter_tools.merge")
_MARK = re.compile(rf"(?<!_){attached.PREFIX}(?!hook\b)\w*")  # the hook is a file
_MAY = re.compile(
    rf"{attached.PREFIX}|attached\.|in_place\.replace|replace_forward|register_\w*hook|partial|MethodType|update_wrapper"
)
_REGISTERS = re.compile(r"_?register_(forward|full_backward|state_dict|load_state_dict)\w*hook")


@functools.cache
def modules(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """By dotted name below the package: those that may put something on an object."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): ast.parse(text)
        for path, text in sources.items()
        if _MAY.search(text)
    }


def is_named(node: ast.AST, *names: str) -> bool:
    """Whether an expression is one of these names, such as ``in_place.replace``."""
    last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return any(name.rpartition(".")[2] == last for name in names) and ast.unparse(node) in names


def names_of_marks(tree: ast.AST) -> Iterator[str]:
    """Names of marks that are written out, as a string or as an attribute."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", None)
        if isinstance(text, str):
            yield from (found[0] for found in _MARK.finditer(text))


def replaced_methods(tree: ast.AST) -> Iterator[str]:
    """What ``in_place.replace`` replaces; a name stands for the constant of that module.

    ``modules.replace_forward`` replaces one of two, where it is called.
    """
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_named(node.func, "modules.replace_forward"):
            yield from ("forward", "_old_forward")
        elif isinstance(node, ast.Call) and is_named(node.func, "in_place.replace"):
            name = node.args[1]
            if isinstance(name, ast.IfExp):  # of `modules.replace_forward` itself
                continue
            yield str(name.value if isinstance(name, ast.Constant) else constants[ast.unparse(name)])


def registers_hooks(tree: ast.AST) -> bool:
    """Whether a module gets a hook, outside of reproductions, which have models of their own."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any(one.arg == "workspace" for one in node.args.args):
            continue
        if isinstance(node, ast.Attribute) and _REGISTERS.fullmatch(node.attr):
            return True
        if registers_hooks(node):
            return True
    return False


def methods_by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines that assign a bound function to an attribute of an object that is not ``self``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if not is_named(node.value.func, "functools.partial", "types.MethodType", "functools.update_wrapper"):
            continue
        for target in node.targets:
            own = isinstance(target, ast.Attribute) and not is_named(target.value, "self")
            entry = isinstance(target, ast.Subscript) and is_named(getattr(target.value, "func", target), "vars")
            if own or entry:
                yield node.lineno


def undeclared(folder: Path = PACKAGE) -> dict[str, list[str]]:
    """What the modules of a package put on objects, and the table does not have."""
    found: dict[str, list[str]] = {}
    declared = {(item.kind, item.module): item for item in attached.DECLARED}
    methods = {(item.module, item.name) for item in attached.DECLARED if item.kind == "method"}
    for name, tree in modules(folder).items():
        faults = [] if name == TABLE else sorted(set(names_of_marks(tree)))
        faults += [f"method {method}" for method in replaced_methods(tree) if (name, method) not in methods]
        if not name.startswith(_OWN_MODELS):
            if registers_hooks(tree) and ("hooks", name) not in declared and name not in FOR_A_CALL:
                faults.append("hooks")
            faults += [f"a method put on an object by hand in line {line}" for line in methods_by_hand(tree)]
        if faults:
            found[name] = faults
    return found


def test_everything_that_hangs_on_a_model_is_declared() -> None:
    assert not undeclared(), "declare it in gemma4_compat/_gemma4/accelerate/attached.py"


def test_everything_declared_is_used() -> None:
    sources = modules()
    used = {
        node.attr
        for name, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and name != TABLE and is_named(node.value, "attached")
    }
    constants = {name for name in vars(attached) if name.isupper()} - {"PREFIX", "DECLARED"}
    unused = sorted(constants - used)
    for item in attached.DECLARED:
        put = {
            "hooks": lambda tree: registers_hooks(tree),
            "method": lambda tree, item=item: item.name in replaced_methods(tree),
        }.get(item.kind)
        if put is not None and not (item.module in sources and put(sources[item.module])):
            unused.append(f"{item.kind} {item.name} of {item.module}")
    unused += sorted(FOR_A_CALL - {name for name, tree in sources.items() if registers_hooks(tree)})
    assert not unused


def test_every_declaration_says_what_it_is_for() -> None:
    bad = [
        item
        for item in attached.DECLARED
        if (item.patch and item.patch not in PATCHES)
        or not re.fullmatch(r"[A-Z][^.]*\.", item.purpose.replace("...", "").replace("load_state_dict", ""))
        or not item.on
        or (item.kind == "mark") == bool(item.module)
    ]
    keys = [(item.kind, item.name, item.module) for item in attached.DECLARED]
    assert not bad
    assert len(set(keys)) == len(keys)


def test_each_kind_of_fault_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(
        "setattr(x, '_gemma4_compat_a', 1)\n"
        "x._gemma4_compat_b = 1\n"
        "in_place.replace(x, 'merge', f)\n"
        "x.register_forward_hook(f)\n"
        "vars(x)['forward'] = functools.partial(f, x)\n"
        "x.forward = types.MethodType(f, x)\n"
    )
    assert undeclared(tmp_path) == {
        "sample": [
            "_gemma4_compat_a",
            "_gemma4_compat_b",
            "method merge",
            "hooks",
            "a method put on an object by hand in line 5",
            "a method put on an object by hand in line 6",
        ]
    }
