"""Sessions beside the two README commands: `pip install nox`, then `nox -l`.

Each session installs torch once in an environment of its own; what needs many stacks (the matrix, a bisection) borrows
that torch and adds the rest with uv, which takes seconds a stack. Arguments go after `--`.
"""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True
nox.options.reuse_existing_virtualenvs = True

NEWEST = ("-c", "constraints/newest.txt")
THREAD = ("-c", "constraints/thread.txt")
#: What tools/matrix needs beside torch; the libraries under test are installed in each stack.
MATRIX = (
    "torch",
    "uv",
    "pytest>=9",
    "msgspec>=0.19",
    "packaging>=22",
    "typer>=0.12",
    "wrapt>=1.16",
    "tomli>=2; python_version<'3.11'",
)

#: What upstream's tests import beside the libraries (tests/upstream.toml), and what fetches them.
UPSTREAM = ("attrs", "datasets", "diffusers", "parameterized", "scikit-learn", "scipy", "pip")

#: Software on top of the libraries that tests/world/clients runs.
CLIENTS = ("datasets", "lm-eval", "trl", "torchvision")

#: Readers of exported adapters (tests/world/readers); llama-cpp-python compiles llama.cpp. What follows them, they
#: import.
READERS = ("mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2", "mlx-vlm==0.7.10", "gguf==0.19.0",
           "llama-cpp-python==0.3.36", "diskcache")  # fmt: skip

#: Other quantization libraries (docs/QUANTIZATION.md) and what they import; gptqmodel builds from source.
QUANTIZERS = ("torchao==0.18.0", "optimum-quanto==0.2.7", "optimum==2.3.0", "compressed-tensors==0.20.0",
              "llmcompressor==0.14.0.1", "loguru", "datasets", "pyarrow", "pandas", "dill", "multiprocess", "xxhash",
              "gptqmodel==7.6.0", "pypcre", "tokenicer", "logbar", "device-smi", "defuser", "threadpoolctl", "ninja",
              "protobuf", "aiohttp", "nvidia-ml-py", "pytz")  # fmt: skip


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff; mypy on the package, and for names that do not exist on the rest; mypy and pyright on what users write."""
    session.install(*NEWEST, ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pyright", env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})  # no look-up of a newer release
    session.run("lint-imports")
    session.run("python", "-m", "tools.english")
    session.run("python", "-m", "tools.lines")


@nox.session
def package(session: nox.Session) -> None:
    """The wheel and the sdist: the same bytes twice, complete, accepted by an index."""
    session.install(*NEWEST, ".[dev]")
    session.run("python", "-m", "pytest", "tests/project/tools/test_package.py")


@nox.session
@nox.parametrize("stack", ["newest", "thread"])
def tests(session: nox.Session, stack: str) -> None:
    """The quick tests in one stack: README's command."""
    session.install("-c", f"constraints/{stack}.txt", ".[test]")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session
@nox.parametrize("stack", ["newest", "thread"])
def promises(session: nox.Session, stack: str) -> None:
    """The tests of every push: what a patch promises, the one-device oracle, all cases."""
    session.install("-c", f"constraints/{stack}.txt", ".[test]")
    session.run("python", "-m", "pytest", "-n", "2", "--promises", *session.posargs)


@nox.session
@nox.parametrize("stack", ["newest", "thread"])
def full(session: nox.Session, stack: str) -> None:
    """Every test in one stack."""
    session.install("-c", f"constraints/{stack}.txt", ".[test]")
    session.run("python", "-m", "pytest", "-n", "2", "--full", *session.posargs)


@nox.session
def upgrade(session: nox.Session) -> None:
    """`-- LIBRARY RELEASE`: measures a new release, writes the data, says what a person has to look at."""
    session.install(*NEWEST, *MATRIX)
    session.run("python", "-m", "tools.upgrade", *session.posargs)


@nox.session
def fingerprints(session: nox.Session) -> None:
    """`-- LIBRARY ...`: the code that patches replace in every measured release of these libraries (default: all)."""
    session.install(*NEWEST, *MATRIX)
    session.run("python", "-m", "tools.upgrade", "--again", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """Patch tests in every stack of tests/matrix.toml; results in docs/evidence. `-- --ci`, `-- STACK ...`."""
    session.install(*NEWEST, *MATRIX)
    session.run("python", "-m", "tools.matrix", "run", *session.posargs)


@nox.session
def beside(session: nox.Session) -> None:
    """The shim beside libraries that patch the same classes, in both orders. `-- --ci`, `-- LIBRARY ...`."""
    session.install(*NEWEST, *MATRIX)
    session.run("python", "-m", "tools.matrix", "beside", *session.posargs)


@nox.session
def bisect(session: nox.Session) -> None:
    """`-- PATCH LIBRARY`: where the affected releases begin and end."""
    session.install(*NEWEST, *MATRIX)
    session.run("python", "-m", "tools.matrix", "bisect", *session.posargs)


@nox.session
def canary(session: nox.Session) -> None:
    """The newest pre-releases of everything: what the doctor says. Reports, never fails."""
    session.install(*NEWEST, *MATRIX)
    session.run("python", "-m", "tools.matrix", "canary", *session.posargs)


@nox.session
@nox.parametrize("stack", ["newest", "thread"])
def upstream(session: nox.Session, stack: str) -> None:
    """Accelerate's and PEFT's own tests, with the shim off and on; fails where an outcome differs."""
    session.install("-c", f"constraints/{stack}.txt", ".[test]", *UPSTREAM)
    session.run(
        "python", "tools/upstream_suites.py", "--out", f"docs/evidence/upstream/{stack}.json", *session.posargs
    )


@nox.session
@nox.parametrize("stack", ["newest", "thread"])
def clients(session: nox.Session, stack: str) -> None:
    """lm-evaluation-harness, TRL, the Trainer and pipelines on split models; results in docs/evidence/clients."""
    session.install("-c", f"constraints/{stack}.txt", ".[test]", *CLIENTS)
    # A torchvision that was built against another torch breaks the import of transformers; without it, tests that need
    # it are skipped.
    if session.run("python", "-c", "import torchvision", success_codes=[0, 1], silent=True):
        session.run("pip", "uninstall", "-y", "torchvision")
    results = {"GEMMA4_COMPAT_CLIENTS": f"docs/evidence/clients/{stack}.json"}
    session.run("python", "-m", "pytest", "tests/world/clients", *session.posargs, env=results)


@nox.session
def readers(session: nox.Session) -> None:
    """mlx-lm, mlx-vlm and llama.cpp read what `export` writes, and compute what PEFT does (Linux, CPU)."""
    session.install(*NEWEST, ".[test]", "requests")
    session.install("--no-deps", *READERS)  # they want other releases of what is under test
    session.run("python", "-m", "pytest", "tests/world/readers", *session.posargs)


@nox.session
def quantizers(session: nox.Session) -> None:
    """Weights of torchao, quanto, GPTQ, AWQ and compressed-tensors, offloaded and with adapters."""
    session.install(*NEWEST, ".[test]", "requests", "setuptools>=84.2.1,<85")
    # They want other releases of what is under test; gptqmodel's setup reads the installed torch.
    session.install("--no-deps", "--no-build-isolation", *QUANTIZERS)
    names = ("other_libraries", "accelerate_subclass_offload", "transformers_packed_layers")
    files = (f"tests/patches/quantization/test_{name}.py" for name in names)
    session.run("python", "-m", "pytest", "--full", *files, *session.posargs)


@nox.session
def interpreters(session: nox.Session) -> None:
    """The same small case in every interpreter mode and packaging; `-- --python PATH` adds interpreters."""
    session.install(*NEWEST, ".[test]", "pyinstaller>=6.10")
    session.run("python", "-m", "tests.world.interpreters", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Write the generated pages and parts of pages, then build the site in site/, with warnings as errors."""
    session.install(".[docs]")
    session.run("python", "tools/docs.py", *session.posargs)
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def site_check(session: nox.Session) -> None:
    """Look at the site in Chromium: contrast, width, pictures, search (`apt-get install chromium chromium-driver`)."""
    session.install(".[docs]", "selenium>=4.20")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "-m", "tools.site_check", "site", *session.posargs)
