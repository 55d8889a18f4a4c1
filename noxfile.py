"""What continuous integration runs, and what you run before it."""

import shutil
import subprocess

import nox

nox.options.sessions = ["tests", "lint", "types", "imports"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
DECLARED = ("3.11", "3.12", "3.13", "3.14")


def _works(version: str) -> bool:
    """Whether an interpreter is there and runs; a launcher without its interpreter does not."""
    python = shutil.which(f"python{version}")
    return python is not None and not subprocess.run([python, "--version"], capture_output=True, check=False).returncode


# The interpreters that this machine has; where none has a versioned name, the one that runs nox.
PYTHONS = [version for version in DECLARED if _works(version)] or None


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests that need no service."""
    session.install(".[examples]", *nox.project.dependency_groups(PYPROJECT, "test"))
    # Handed out one by one, or else the long ones could be the last of one process; for a debugger say `-- -n 0`.
    session.run("pytest", "--numprocesses=2", "--maxschedchunk=1", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    session.install(".[examples,bench]", *nox.project.dependency_groups(PYPROJECT, "types"))
    session.run("mypy")


@nox.session
def imports(session: nox.Session) -> None:
    """Check that rooms import only downwards, and through their doors."""
    session.install(".", *nox.project.dependency_groups(PYPROJECT, "imports"))
    session.run("lint-imports")


@nox.session
def hooks(session: nox.Session) -> None:
    """Run the pre-commit hooks on every file, with the tools that they take from the environment."""
    session.install(".[examples,bench]", *nox.project.dependency_groups(PYPROJECT, "hooks"))
    session.run("pre-commit", "run", "--all-files", *session.posargs)
