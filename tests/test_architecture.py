"""Who may import whom (docs/architecture.md): `server -> engine -> scheduler, runner -> programs -> ... -> ops`.

PROTECTS: that each part can be read, tested and replaced without the parts above it.  Imports are read from the source,
so a breach is found even where it would work.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from rlt_jax.models.registry import MODELS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rlt_jax", "server")

# Lowest first.  A module may import from rows above its own in this table, and from its own row.
# A name stands for the module and all below it, unless a longer one says otherwise.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("rlt_jax", "rlt_jax.runtime", "rlt_jax.errors", "rlt_jax.platform"),
    ("rlt_jax.request", "rlt_jax.config"),
    ("rlt_jax.ops",),
    ("rlt_jax.exits", "rlt_jax.sampling", "rlt_jax.kvcache", "rlt_jax.text", "rlt_jax.chat", "rlt_jax.models"),
    ("rlt_jax.validation", "rlt_jax.runtime.plan", "rlt_jax.runtime.policy", "rlt_jax.runtime.memory"),
    ("rlt_jax.runtime.slots",),
    ("rlt_jax.runtime.programs",),
    ("rlt_jax.runtime.compiler",),
    ("rlt_jax.runtime.scheduler", "rlt_jax.runtime.runner", "rlt_jax.runtime.outputs"),
    ("rlt_jax.runtime.engine",),
    ("rlt_jax.llm", "rlt_jax.client"),
    ("rlt_jax.cli", "rlt_jax.generate", "rlt_jax.demo", "rlt_jax.bench", "rlt_jax.train", "server"),
)

# Packages whose modules have rows of their own, so that a new one must be given its place: these names hold only
# themselves.
ALONE = ("rlt_jax", "rlt_jax.runtime")

# (who, what they must not reach, why).  "Reach" counts imports of imports, those of a type checker or inside a function
# left out.
UNREACHABLE = (
    ("rlt_jax.runtime.scheduler", "jax", "its tests run in milliseconds"),
    ("rlt_jax.kvcache.pages", "jax", "its tests run in milliseconds"),
    ("rlt_jax", "jax", "reading a config or an error class needs no jax"),
    ("rlt_jax.client", "jax", "a client runs where no jax is installed"),
    ("rlt_jax.cli", "jax", "--help and a wrong option answer at once"),
    ("rlt_jax.generate", "jax", "--help and a wrong option answer at once"),
    ("server.__main__", "jax", "--help and a wrong option answer at once"),
    ("rlt_jax.llm", "grpc", "the offline API needs no network"),
    ("rlt_jax.runtime.engine", "grpc", "the engine knows no transport"),
)

# (who, what none of them may import, even in a function or for a type checker)
FORBIDDEN = (
    ("rlt_jax.ops", ("rlt_jax.request", "rlt_jax.models", "rlt_jax.kvcache", "rlt_jax.runtime")),
    ("rlt_jax.models", ("rlt_jax.request", "rlt_jax.kvcache", "rlt_jax.runtime", "rlt_jax.exits")),
    ("rlt_jax.kvcache", ("rlt_jax.request", "rlt_jax.models", "rlt_jax.runtime")),
    ("rlt_jax.exits", ("rlt_jax.request", "rlt_jax.models", "rlt_jax.runtime")),
    ("rlt_jax.sampling", ("rlt_jax.request", "rlt_jax.models", "rlt_jax.runtime")),
    ("rlt_jax.runtime.scheduler", ("jax", "rlt_jax.runtime.runner", "rlt_jax.runtime.programs")),
    ("rlt_jax.runtime.runner", ("rlt_jax.runtime.scheduler", "rlt_jax.runtime.outputs", "rlt_jax.kvcache.pages")),
)

NO_MODEL_NAMES = ("rlt_jax.runtime", "rlt_jax.kvcache", "rlt_jax.ops", "server")


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file and what it imports: full names, of packages and of names in them alike."""

    name: str
    path: Path
    imports: frozenset[str]  # all, wherever they stand
    at_import: frozenset[str]  # those that run when the module is imported


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported(node: ast.stmt, module: str) -> list[str]:
    """The names that one import statement brings in; `from a import b` gives both "a" and "a.b"."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}: a relative import"
        assert node.module is not None
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def at_import_time(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run when the module is imported, nested ones included."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node):
            continue
        found.append(node)
        for field in ("body", "orelse", "finalbody"):
            found += at_import_time(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            found += at_import_time(handler.body)
    return found


def read(name: str, path: Path, source: str) -> Module:
    tree = ast.parse(source)
    everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return Module(
        name=name,
        path=path,
        imports=frozenset(n for node in everywhere for n in imported(node, name)),
        at_import=frozenset(n for node in at_import_time(tree.body) for n in imported(node, name)),
    )


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = read(name, path, path.read_text(encoding="utf-8"))
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layer(name: str) -> int:
    """The row of LAYERS with the longest name that holds `name`."""
    best = max(
        (
            (len(prefix), row)
            for row, prefixes in enumerate(LAYERS)
            for prefix in prefixes
            if name == prefix or (prefix not in ALONE and within(name, prefix))
        ),
        default=None,
    )
    assert best is not None, f"{name} stands in no layer: give it one in LAYERS"
    return best[1]


def upward(module: Module) -> list[str]:
    """What a module imports from layers above its own."""
    mine = layer(module.name)
    ours = [name for name in module.imports if name in modules()]
    return sorted(name for name in ours if layer(name) > mine)


def reaches(start: str, target: str) -> list[str] | None:
    """The chain of imports from `start` to `target`, or None."""
    seen, queue = {start}, [[start]]
    while queue:
        chain = queue.pop(0)
        module = modules().get(chain[-1])
        if module is None:
            continue
        parents = [".".join(module.name.split(".")[:i]) for i in range(1, module.name.count(".") + 1)]
        for name in sorted({*module.at_import, *parents}):
            if within(name, target):
                return [*chain, name]
            if name in modules() and name not in seen:
                seen.add(name)
                queue.append([*chain, name])
    return None


# -- the reader of imports itself -------------------------------------------------------------------------------------


def test_imports_are_found_where_they_hide() -> None:
    source = """
from typing import TYPE_CHECKING
import a.b
from c import d
if TYPE_CHECKING:
    import typed
try:
    import tried
except ImportError:
    import instead
class C:
    import in_class
    def f(self):
        from lazy import g
"""
    found = read("m", Path("m.py"), source)
    assert found.at_import == {"typing", "typing.TYPE_CHECKING", "a.b", "c", "c.d", "tried", "instead", "in_class"}
    assert found.imports - found.at_import == {"typed", "lazy", "lazy.g"}


def test_a_breach_is_found() -> None:
    bad = read("rlt_jax.ops.bad.api", Path("api.py"), "from rlt_jax.runtime.engine import LLMEngine")
    assert upward(bad) == ["rlt_jax.runtime.engine"]
    assert reaches("rlt_jax.runtime.programs", "jax") is not None
    assert reaches("rlt_jax.llm", "jax")[0] == "rlt_jax.llm"


# -- the rules --------------------------------------------------------------------------------------------------------


def test_nothing_lower_imports_anything_higher() -> None:
    # `import rlt_jax` offers the engine on first use: the one lazy import upwards, explained where it stands
    breaches = {m.name: upward(m) for m in modules().values() if m.name != "rlt_jax"}
    assert {name: found for name, found in breaches.items() if found} == {}


def test_the_server_is_imported_by_nobody() -> None:
    outside = [m for m in modules().values() if not within(m.name, "server")]
    assert [m.name for m in outside if any(within(name, "server") for name in m.imports)] == []


@pytest.mark.parametrize(("who", "what", "why"), UNREACHABLE, ids=lambda value: value if "." in value else None)
def test_what_a_module_must_not_reach(who: str, what: str, why: str) -> None:
    chain = reaches(who, what)
    assert chain is None, f"{' -> '.join(chain or [])}, but {why}"


@pytest.mark.parametrize(("who", "whom"), FORBIDDEN, ids=[who for who, _ in FORBIDDEN])
def test_what_a_part_must_not_know(who: str, whom: tuple[str, ...]) -> None:
    members = [m for m in modules().values() if within(m.name, who)]
    assert members
    breaches = {m.name: sorted(n for n in m.imports if any(within(n, w) for w in whom)) for m in members}
    assert {name: found for name, found in breaches.items() if found} == {}


def test_a_module_that_says_no_jax_reaches_none() -> None:
    claims = [
        m.name
        for m in modules().values()
        if re.search(
            r"\bno jax\b", ast.get_docstring(ast.parse(m.path.read_text(encoding="utf-8"))) or "", re.IGNORECASE
        )
    ]
    assert "rlt_jax.runtime.scheduler" in claims
    assert {name: chain for name in claims if (chain := reaches(name, "jax"))} == {}


@pytest.mark.parametrize("package", NO_MODEL_NAMES)
def test_models_are_known_by_their_spec_alone(package: str) -> None:
    """No name of a model family, in code, comment or docstring: what depends on the family is asked of its spec."""
    names = re.compile("|".join(map(re.escape, sorted(MODELS))), re.IGNORECASE)
    members = [m for m in modules().values() if within(m.name, package)]
    assert members
    found = [
        f"{m.path.relative_to(ROOT)}:{number}: {line.strip()}"
        for m in members
        for number, line in enumerate(m.path.read_text(encoding="utf-8").splitlines(), start=1)
        if names.search(line)
    ]
    assert found == []
    assert not any(within(name, "rlt_jax.models.registry") for m in members for name in m.imports)
