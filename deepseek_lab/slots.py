"""Which function fills which named slot: the package's, or the learner's.

A slot is a module attribute named by its dotted path, such as `deepseek_lab.model.norm.rms_norm`.  Package code
calls exercise functions through their module (`norm.rms_norm(...)`), so filling a slot takes hold everywhere.

A learner's function comes from a notebook and lacks the module's own names.  While it fills a slot it sees two
layers of globals: the learner's names first, then, live, those of the module.  Names that only repeat the module's
are passed over, so that a sibling slot filled at the same time is seen too.  Its own name is itself, also where it is
called without being in its slot: the package never answers the inner calls of a recursive function.
"""

import builtins
import difflib
import importlib
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

Function = Callable[..., Any]

_originals: dict[str, Any] = {}  # path -> the package's own, for every slot that is filled now


def resolve(path: str) -> tuple[types.ModuleType, str]:
    """Return the module and the attribute name that `path` stands for.

    Raises LookupError, with the nearest names, when there is no such module or attribute.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise LookupError(f"no slot {path!r}: importing {module_name!r} failed ({error})") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise LookupError(f"no slot {path!r}: {module_name} has no {name!r}{hint}")
    return module, name


def original(path: str) -> Any:
    """The package's own function for `path`, also while something else fills the slot."""
    module, name = resolve(path)
    return _originals.get(path, getattr(module, name))


def fill(functions: Mapping[str, Function]) -> None:
    """Put each function into its slot, for good.  All paths are resolved before the first slot changes."""
    bound = {path: bind(path, function) for path, function in functions.items()}
    for path, function in bound.items():
        module, name = resolve(path)
        _originals.setdefault(path, getattr(module, name))
        setattr(module, name, function)


@contextmanager
def filled(functions: Mapping[str, Function]) -> Iterator[None]:
    """Fill the slots inside the block, and put back what was there before."""
    before = {path: getattr(*resolve(path)) for path in functions}
    already = set(_originals)
    fill(functions)
    try:
        yield
    finally:
        for path, function in before.items():
            module, name = resolve(path)
            setattr(module, name, function)
            if path not in already:
                _originals.pop(path, None)


def filled_paths() -> list[str]:
    """The slots that do not hold the package's own function, sorted."""
    return sorted(path for path, own in _originals.items() if getattr(*resolve(path)) is not own)


def bind(path: str, function: Function) -> Any:
    """Give a function (or each method of a class) the two layers of globals that its slot calls for.

    The package's own function comes back as it is, and also stands in for an exercise that is not written yet.  A
    bound function pickles with the learner's own names only, so what crosses to another process must be bound there
    again; `fill` does.
    """
    module, _ = resolve(path)
    if isinstance(function, type):
        return _relayer_class(path, function, module)
    if getattr(function, "__unwritten__", False):
        return original(path)
    function = getattr(function, "__answer__", function)
    if not isinstance(function, types.FunctionType) or _belongs(function, module):
        return function
    twin = _relayer(function, module)
    _name_itself(path, function, twin, twin)
    return twin


def _relayer_class(path: str, owner: type, module: types.ModuleType) -> type:
    """A subclass whose methods are bound; the class itself stays as the learner's notebook has it."""
    methods, twins = {}, []
    for name, member in vars(owner).items():
        plain = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if isinstance(plain, types.FunctionType) and not _belongs(plain, module):
            twin = _relayer(plain, module)
            twins.append(twin)
            methods[name] = type(member)(twin) if plain is not member else twin
    if not methods:
        return owner
    bound = type(owner)(owner.__name__, (owner,), {**methods, "__doc__": owner.__doc__})
    for twin in twins:
        _name_itself(path, owner, bound, twin)
    return bound


def _name_itself(path: str, answer: Function, bound: Function, twin: types.FunctionType) -> None:
    """Where the learner's name of the slot is an answer to it, `twin` sees that answer by this name, bound as well."""
    name = path.rpartition(".")[2]
    marked = twin.__globals__.own.get(name)  # type: ignore[attr-defined]
    if getattr(marked, "__exercise__", None) == path:
        twin.__globals__[name] = bound if getattr(marked, "__answer__", marked) is answer else bind(path, marked)


def _belongs(function: types.FunctionType, module: types.ModuleType) -> bool:
    namespace = function.__globals__
    return namespace is vars(module) or (isinstance(namespace, _Layered) and namespace.module is module)


def _relayer(function: types.FunctionType, module: types.ModuleType) -> types.FunctionType:
    layered = _Layered(function.__globals__, module)
    twin = types.FunctionType(
        function.__code__, layered, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    twin.__doc__, twin.__module__, twin.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return twin


class _Layered(dict):
    """Globals in two layers.  A dict subclass, because the interpreter then asks `__missing__` for unknown names."""

    def __init__(self, own: dict[str, Any], module: types.ModuleType) -> None:
        super().__init__(__builtins__=builtins, __name__=own.get("__name__", "__main__"))
        self.own, self.module = own, module

    def __missing__(self, name: str) -> Any:
        return self.own[name] if name in self else vars(self.module)[name]

    def __contains__(self, name: object) -> bool:
        """True for the learner's own names only: those are what cloudpickle takes along."""
        if name not in self.own:
            return False
        theirs = vars(self.module)
        if name not in theirs:
            return True
        mine = self.own[str(name)]
        package_own = _originals.get(f"{self.module.__name__}.{name}")
        return mine is not theirs[str(name)] and mine is not package_own and not hasattr(mine, "__exercise__")


# What passed is kept between sessions, so that the trainer can run on it.


def lab_home() -> Path:
    """A learner's work: `$DEEPSEEK_LAB_HOME`, else `.lab` beside the nearest pyproject.toml, else `.lab` here."""
    if home := os.environ.get("DEEPSEEK_LAB_HOME"):
        return Path(home)
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), here)
    return root / ".lab"


def save_mine(path: str, function: Function, source: str) -> Path:
    """Keep a passing function for later sessions: a pickle to run, its source beside it to read."""
    folder = lab_home() / "functions"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{path}.py", source.encode())
    return write_atomically(folder / f"{path}.pkl", cloudpickle.dumps(bind(path, function)))


def load_mine() -> dict[str, Function]:
    """Every kept function by its path.

    Raises RuntimeError, naming the file and the way out, when one no longer loads.
    """
    mine = {}
    for file in sorted((lab_home() / "functions").glob("*.pkl")):
        path = file.name.removesuffix(".pkl")
        try:
            resolve(path)
            mine[path] = cloudpickle.loads(file.read_bytes())
        except Exception as error:
            raise RuntimeError(
                f"your {path} in {file} does not load here ({type(error).__name__}: {error}). "
                f"Run its check again in the notebook, or delete that file."
            ) from error
    return mine


def write_atomically(file: Path, content: bytes) -> Path:
    """Write beside `file`, then rename, so that no reader ever sees half of it."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, file)
    return file
