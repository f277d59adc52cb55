"""Files that state releases: requirements files, pyproject.toml, pylock.toml and uv.lock."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.generated.fuzz import values
from tests.generated.fuzz.case import File
from tests.generated.fuzz.values import Raw

_NAMES = (
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "torch",
    "Py_Torch",
    "é",
    "a" * 300,
    "",
    "-",
    "pip[a]",
    "peft[a,b]",
)
_VERSIONS = (
    *(
        "5.6.2",
        "0.19.1",
        "1",
        "1.*",
        "2.0.dev1",
        "1!2.3+local",
        "9" * 4290,
        "9" * 5000,
        "1." * 300 + "1",
        "1." * 20_000 + "1",
    ),
    *("", "x", "\u0661", "1e9", "-1", "0", "1.0.post" + "9" * 500, "\x1b[31m", "*", "1.0rc" + "1" * 30),
)
_OPERATORS = ("==", ">=", "<=", "~=", "!=", "===", "<", ">", "=", "=>", " @ ", ",", "")
_MARKERS = (
    *("", "", "", "; python_version >= '3.8'", "; os_name == 'nt'", "; extra == 'a'", "; python_version ~= 'x'", ";"),
    *("; " + "(" * 300 + "os_name=='a'" + ")" * 300, "; " + "(" * 20_000, "; os_name in 'posix' or 'a' in os_name"),
    *(
        "; " + " or ".join(["os_name == 'a'"] * 2000),
        "; python_version < '" + "9" * 5000 + "'",
        "; os_name == '\x1b[31m'",
    ),
)
_OTHERS = (
    *(
        "",
        "# a comment",
        "\\",
        "a \\",
        "--pre",
        "-i https://user:secret@example.com",
        "--hash=sha256:00",
        "--unknown \x1b[31m",
    ),
    *("./peft-0.19.1-py3-none-any.whl", "https://e.com/peft-0.19.1.tar.gz", "git+https://e.com/a#egg=peft", "-e ."),
    *(
        "peft @ file:///a b",
        "peft @ https://[",
        "-e git+ssh://[::1#egg=peft",
        "${HOME}",
        "${A}${A}",
        "peft # ${HOME}",
        "-",
    ),
    *(
        " " * 30_000 + "peft",
        "peft" + " " * 30_000,
        "peft" + " " * 30_000 + "#",
        "-r" + " " * 30_000,
        "peft\t" * 5000,
        "x" * 10**6,
    ),
    *(
        "peft --hash=" + "a" * 1000,
        "# " * 20_000,
        "-----BEGIN PRIVATE KEY-----",
        "password = hunter2",
        "\x0c",
        "\x85peft",
        "\0",
    ),
    *(
        "--requirement = 'r1.txt'",
        '-r"r1.txt"',
        "-rr1.txt",
        "-c c.txt",
        "-r ./././r1.txt",
        "-r sub/../r1.txt",
        "-r .",
        "-r /dev/zero",
    ),
    *(
        "-r /dev/null",
        "-r fifo.txt",
        "-r loop.txt",
        "-r gone.txt",
        "-r " + "a" * 300,
        "-r \udcff",
        "-r /proc/self/mem",
        "-r r1.txt",
    ),
    *("-r https://e.com/a", "-c /etc/passwd", "-r\0", "[a](b)", "peft>=1,<2,!=1.5,~=1.0", "peft" + ",>=1" * 3000),
)

_requirement = st.builds(
    lambda *parts: "".join(parts),
    st.sampled_from(_NAMES),
    st.sampled_from(_OPERATORS),
    st.sampled_from(_VERSIONS),
    st.sampled_from(_MARKERS),
)
_line = _requirement | st.sampled_from(_OTHERS) | values.text
_times = st.sampled_from([1, 1, 1, 1, 1, 1, 1, 2, 200, 5000])


#: Characters of a line with its repetitions; a reader takes 8 MiB of a file.
_MOST = 2 << 20


def _joined(lines: list[tuple[str, int]], encoding: str, end: str) -> bytes:
    text = end.join(end.join([line[: _MOST // times]] * times) for line, times in lines)
    return text.encode(encoding, "surrogatepass")


_text = st.builds(
    _joined,
    st.lists(st.tuples(_line, _times), min_size=1, max_size=5),
    st.sampled_from(["utf-8"] * 6 + ["utf-16", "utf-8-sig"]),
    st.sampled_from(["\n"] * 5 + ["\r", "\r\n", "\x0b", "\u2028"]),
)
_file = values.bytes_of(_text).map(File)


def _project(first: File, second: File, constraints: File) -> dict[str, File]:
    return {
        "requirements.txt": first,
        "r1.txt": second,
        "c.txt": constraints,
        "fifo.txt": File(kind="fifo"),
        "loop.txt": File(b"loop.txt", kind="link"),
        "sub": File(kind="folder"),
    }


def _doubled(depth: int, option: str) -> dict[str, File]:
    """Each file includes the next one twice."""
    files = {f"r{number}.txt": File(f"{option} r{number + 1}.txt\n".encode() * 2) for number in range(1, depth)}
    return {"requirements.txt": File(f"{option} r1.txt\n".encode()), **files, f"r{depth}.txt": File(b"peft\n")}


def _chained(depth: int) -> dict[str, File]:
    files = {f"r{number}.txt": File(f"-r r{number + 1}.txt\n".encode()) for number in range(1, depth)}
    return {"requirements.txt": File(b"-r r1.txt\n"), **files, f"r{depth}.txt": File(b"peft\n")}


_SPECIAL = [
    *(_doubled(depth, option) for depth in (3, 26) for option in ("-r", "-c")),
    *(_chained(depth) for depth in (20, 1500)),
    *(
        {"requirements.txt": File(target, kind="link")}
        for target in (b"/dev/zero", b"/dev/random", b"gone", b"requirements.txt")
    ),
    *({"requirements.txt": File(kind=kind)} for kind in ("fifo", "folder")),
    {"requirements.txt": File(b"peft\n", hole=3 << 30)},
    {"requirements.txt": File(b"peft==1\n" * 100_000)},
    {"requirements.txt": File(b"peft==0.19.%d\n" % 1 + b"\n".join(b"peft!=0.%d" % number for number in range(4000)))},
]
requirements = values.mostly(
    st.builds(_project, _file, _file | st.just(File(b"peft==0.19.1\n")), _file), st.sampled_from(_SPECIAL)
)

_asked = (_requirement | st.sampled_from(_OTHERS) | values.text).map(lambda text: text[:20_000])


def _with(document: Any, key: tuple[str, ...], items: list[Any]) -> Any:
    changed = values.apply(document, ())
    table = changed
    for part in key[:-1]:
        table = table.setdefault(part, {})
    table[key[-1]] = items
    return changed


_PYPROJECT: tuple[dict[str, Any], ...] = (
    {
        "project": {
            "name": "demo",
            "dependencies": ["transformers>=5.5", "peft"],
            "optional-dependencies": {"gpu": ["bitsandbytes"], "all": ["demo[gpu]"]},
            "dynamic": ["version"],
        },
        "dependency-groups": {"dev": ["accelerate==1.13.0", {"include-group": "test"}], "test": ["torch"]},
        "tool": {
            "uv": {
                "sources": {"peft": {"git": "https://example.com/peft"}, "torch": [{"index": "a"}]},
                "constraint-dependencies": ["torch<3"],
                "override-dependencies": ["peft==0.19.1"],
                "dev-dependencies": ["pytest"],
            }
        },
    },
    {"project": {"dependencies": ["peft"]}},
    {"dependency-groups": {"a": [{"include-group": "b"}], "b": ["peft"]}},
)
_LISTS = (
    ("project", "dependencies"),
    ("project", "optional-dependencies", "gpu"),
    ("dependency-groups", "dev"),
    ("tool", "uv", "override-dependencies"),
)
_PYLOCK: tuple[dict[str, Any], ...] = (
    {
        "lock-version": "1.0",
        "created-by": "uv",
        "environments": ["sys_platform == 'linux'"],
        "extras": ["gpu"],
        "dependency-groups": ["dev"],
        "packages": [
            {
                "name": "transformers",
                "version": "5.6.2",
                "marker": "'gpu' in extras",
                "wheels": [{"url": "https://e/a.whl"}],
            },
            {"name": "peft", "vcs": {"type": "git", "url": "https://example.com", "commit-id": "0" * 40}},
            {"name": "torch", "version": "2.13.0", "directory": {"path": "."}},
        ],
    },
)
_UV_LOCK: tuple[dict[str, Any], ...] = (
    {
        "version": 1,
        "revision": 3,
        "requires-python": ">=3.10",
        "package": [
            {"name": "transformers", "version": "5.6.2", "source": {"registry": "https://pypi.org/simple"}},
            {
                "name": "peft",
                "source": {"git": "https://example.com/peft?rev=1#0"},
                "dependencies": [{"name": "torch"}],
            },
        ],
    },
)


def _groups(depth: int) -> dict[str, Any]:
    """Each group includes the next one twice."""
    groups: dict[str, Any] = {f"g{number}": [{"include-group": f"g{number + 1}"}] * 2 for number in range(depth)}
    return {"dependency-groups": {**groups, f"g{depth}": ["peft"]}}


def _chain(depth: int) -> dict[str, Any]:
    groups: dict[str, Any] = {f"g{number}": [{"include-group": f"g{number + 1}"}] for number in range(depth)}
    return {"dependency-groups": {**groups, f"g{depth}": ["peft"]}}


#: TOML that no writer makes: dotted keys, tables and arrays without end.
_TOML = (
    *(Raw(".".join("a" * 1 for _ in range(depth)) + " = 1") for depth in (50, 2000, 20_000)),
    *(Raw("[" + ".".join(["a"] * depth) + "]") for depth in (2000, 20_000)),
    *(Raw("a = " + "[" * depth + "]" * depth) for depth in (50, 400, 100_000)),
    *(Raw("a = " + "{a=" * depth + "1" + "}" * depth) for depth in (50, 400, 50_000)),
    *(Raw("\n".join(f"a{number}.b.c.d = {number}" for number in range(3000))), Raw("[[a.b]]\n" * 5000)),
    *(
        Raw("a = 1" + "0" * 5000),
        Raw("a = 0x" + "f" * 10_000),
        Raw("a = 1e" + "9" * 300),
        Raw("a = 9999-99-99"),
        Raw(""),
    ),
    *(
        Raw('a = """' + '"' * 20_000),
        Raw("# " + "a" * 10**6),
        Raw("a = '''\n" * 3000),
        Raw('"\\uD800" = 1'),
        Raw("a=1\ra=2"),
    ),
    *(
        Raw("[project]\ndependencies = [" + '"peft",' * 30_000 + "]"),
        Raw(" " * 200_000 + "a = 1"),
        Raw("a = 2000-01-01"),
    ),
)
_FILES = [
    File(b"/dev/zero", kind="link"),
    File(kind="fifo"),
    File(kind="folder"),
    File(b"gone", kind="link"),
    File(b"a=1\n", hole=3 << 30),
]


def _toml(
    name: str, documents: tuple[dict[str, Any], ...], lists: tuple[tuple[str, ...], ...], more: tuple[Any, ...] = ()
) -> st.SearchStrategy[dict[str, File]]:
    document = values.changed(documents)
    if lists:
        document |= st.builds(_with, st.sampled_from(documents), st.sampled_from(lists), st.lists(_asked, max_size=3))
    hostile = values.mostly(document, st.sampled_from((*_TOML, *more)))
    content = values.bytes_of(st.builds(values.as_toml, hostile)).map(File)
    return values.mostly(content, st.sampled_from(_FILES), 30).map(lambda file: {name: file})


pyproject = _toml("pyproject.toml", _PYPROJECT, _LISTS, (_groups(3), _groups(25), _chain(30), _chain(3000)))
pylock = _toml("pylock.toml", _PYLOCK, (("environments",), ("extras",)))
uv_lock = _toml("uv.lock", _UV_LOCK, ())
